"""Rows side by side: prompts are prefilled in small batches, padded on the left, each row with a cache of its own.

Left padding lives in this file and nowhere else. Masks and positions come from lengths, never from a token's value, so
a pad id that is also the end id does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparring.inference.kv_cache import CodedColumns
from sparring.policies.contract import SampleRequest
from sparring.policies.kv_buffer import KeyValueBuffer, bytes_per_token, held_cache, is_plain
from sparring.policies.language_model import LanguageModel, micro_batches
from sparring.types import KeyValueSettings


@dataclass(slots=True)
class Prompt:
    """A distinct prompt and the requests that ask for it."""

    ids: tuple[int, ...]
    requests: list[int] = field(default_factory=list)
    keys: list[tuple[int, ...]] = field(default_factory=list)
    """Of those requests."""


def by_prompt(requests: Sequence[SampleRequest]) -> list[Prompt]:
    """Distinct prompts, longest first (so that the first prefill tells how much memory a batch takes at most)."""
    found: dict[tuple[int, ...], Prompt] = {}
    for index, request in enumerate(requests):
        prompt = found.setdefault(request.prompt_ids, Prompt(request.prompt_ids))
        prompt.requests.append(index)
        prompt.keys.append(request.key)
    return sorted(found.values(), key=lambda prompt: -len(prompt.ids))


class PaddedRows:
    """Rows that are decoded together.

    Columns of the cache: ``width`` for prompts, right-aligned, then one a step. With a plain cache (every layer sees
    its whole past) all prompts of the batch share buffers; others, and coded ones, stay the model's own cache,
    one prefill batch each.

    Attributes:
        prompts: The prompts of the rows, in the order of the rows (a prompt has one row for each request).
        logits: fp32 (R, V), after the prompts.
        lengths: int64 (R,): prompt tokens of each row.
        prefilled: Token positions computed for the prompts, padding left out.
    """

    def __init__(
        self, core: LanguageModel, waiting: Sequence[Prompt], *, prefill_tokens: int, cache_bytes: int, new_tokens: int,
        kv: KeyValueSettings,
    ) -> None:  # fmt: skip
        """Takes as many of the waiting prompts (longest first) as the memory allows."""
        self.core, self.new_tokens, self._cache_bytes = core, new_tokens, cache_bytes
        self.cache: Any = None
        self.plain = False
        started = time.perf_counter()
        width = len(waiting[0].ids)
        groups = micro_batches([len(prompt.ids) for prompt in waiting], prefill_tokens)[::-1]
        total = sum(len(prompt.requests) for prompt in waiting)
        cache, hidden, members, filled, capacity = None, [], list[Prompt](), 0, 0
        for group in groups:
            chunk = [waiting[index] for index in group]
            rows = sum(len(prompt.requests) for prompt in chunk)
            if cache is not None and filled + rows > capacity:
                break
            own_cache, states = self._prefill(chunk)
            repeats = [place for place, prompt in enumerate(chunk) for _ in prompt.requests]
            source = torch.tensor(repeats, device=core.device)
            members.extend(chunk)
            hidden.append(states[source])
            if cache is None:
                self.plain = is_plain(own_cache) and core.uses_sdpa and not kv.coded
                if not self.plain:
                    if kv.coded:
                        own_cache = held_cache(own_cache, lambda keys, values: CodedColumns(keys, values, kv))
                    if rows > len(chunk):
                        own_cache.batch_select_indices(source)
                    self.cache = own_cache
                    break
                capacity = max(rows, min(self._room(own_cache, width), total))
                cache = KeyValueBuffer.like(own_cache, rows=capacity, columns=width, extra=new_tokens)
            cache.fill(slice(filled, filled + rows), own_cache, source)
            filled += rows
        self.prompts = members
        if cache is not None:
            if filled < capacity:
                cache.select(torch.arange(filled, device=core.device), drop_columns=0)
            self.cache = cache
        self.logits = core.logits(torch.cat(hidden))
        self.lengths = torch.tensor(
            [len(prompt.ids) for prompt in members for _ in prompt.requests], device=core.device
        )
        self.prefilled = sum(len(prompt.ids) for prompt in members)
        self._width = int(self.lengths.max())
        self._mask = self._make_mask()
        self.prefill_seconds = time.perf_counter() - started

    def forward(self, chosen: Tensor, step: int) -> Tensor:
        """Hidden states (R, H) after one more token a row; ``step`` counts from 0."""
        hidden = self.core.hidden(
            chosen.unsqueeze(-1),
            mask=None if self._mask is None else self._mask[..., : self._width + step + 1],
            positions=(self.lengths + step).unsqueeze(-1),
            cache=self.cache,
        )
        return hidden[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only; columns that are padding in all of them go too."""
        self.lengths = self.lengths[rows]
        if self.plain:
            longest = int(self.lengths.max())
            self.cache.select(rows, drop_columns=self._width - longest)
            self._width = longest
        else:
            self.cache.batch_select_indices(rows)
        self._mask = self._make_mask()

    def _room(self, cache: Any, width: int) -> int:
        """Rows whose keys and values fit the sampler's bytes."""
        row_bytes = max(bytes_per_token(cache), 1) * (width + self.new_tokens)
        return max(1, self._cache_bytes // row_bytes)

    def _prefill(self, chunk: Sequence[Prompt]) -> tuple[Any, Tensor]:
        """The chunk's cache, left-padded to its longest, and the last hidden state of each prompt (n, H)."""
        width = max(len(prompt.ids) for prompt in chunk)
        ids = torch.full((len(chunk), width), self.core.pad_id, dtype=torch.int64)
        for place, prompt in enumerate(chunk):
            ids[place, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        lengths = torch.tensor([len(prompt.ids) for prompt in chunk])
        mask = positions = None
        if int(lengths.min()) < width:
            columns = torch.arange(width)
            padding = (width - lengths).unsqueeze(-1)
            mask = (columns >= padding).to(torch.int64).to(self.core.device)
            positions = (columns - padding).clamp(min=0).to(self.core.device)
        cache = self.core.new_cache()
        states = self.core.hidden(ids.to(self.core.device), mask=mask, positions=positions, cache=cache)
        return cache, states[:, -1]

    def _make_mask(self) -> Tensor | None:
        """Which columns a row may look at, for all steps to come: (n, 1, 1, columns) ready for attention where the
        cache is plain (an addend on a CPU, where that is quicker), else (n, columns) of 0 and 1 for the model. None
        where no row has padding."""
        if self.plain and int(self.lengths.min()) == self._width:
            return None
        columns = torch.arange(self._width + self.new_tokens, device=self.core.device)
        seen = columns >= (self._width - self.lengths).unsqueeze(-1)
        if not self.plain:
            return seen.to(torch.int64)
        seen = seen[:, None, None, :]
        if self.core.device.type != "cpu":
            return seen
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
