"""The sampler in this process: prompts are prefilled in small batches, replies decoded together.

Left padding lives in this file and nowhere else. Masks and positions come from lengths, never from a token's value, so
a pad id that is also the end id does no harm. Each row draws from its own random numbers (a counter-based generator
seeded by the request's key), one number a token, so a reply does not depend on which others it is sampled with, apart
from rounding in the matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.errors import PromptError
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import Sampler, SampleRequest
from sparring.policies.distribution import effective, log_distribution
from sparring.policies.kv_buffer import KeyValueBuffer, bytes_per_token, is_plain
from sparring.policies.language_model import micro_batches
from sparring.types import Reply, SamplingSettings

_COMPACT_BELOW = 0.75  # share of rows still running under which finished ones are worth a copy of the cache


@dataclass(slots=True)
class SamplerStatistics:
    """What a sampler did since it was made, or since :meth:`InProcessSampler.reset_statistics`.

    >>> SamplerStatistics(reply_tokens=100, decode_seconds=0.5, prefill_seconds=0.5).tokens_per_second
    100.0
    """

    replies: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens that were computed: equal prompts once, padding excluded."""
    reply_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Reply tokens over the whole time, prefill included."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.reply_tokens / seconds if seconds else 0.0


class InProcessSampler:
    """Samples from a policy's present weights. A ``Sampler``.

    Args:
        policy: Whose adapter is used and whose version is stamped on the replies.
        prefill_tokens: Prompt tokens, padding included, of one prefill batch. Small batches stay in a CPU's cache.
        cache_bytes: Size of the keys and values of the rows that are decoded together; more rows wait their turn.
    """

    def __init__(self, policy: CausalLM, *, prefill_tokens: int | None = None, cache_bytes: int = 2 * 1024**3) -> None:
        self.policy = policy
        self.prefill_tokens = prefill_tokens or (1536 if policy.core.device.type == "cpu" else 32768)
        self.cache_bytes = cache_bytes
        self.statistics = SamplerStatistics()

    def reset_statistics(self) -> None:
        """Count from 0 again."""
        self.statistics = SamplerStatistics()

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Reply]:
        """Replies in the order of the requests.

        Log-probs are of the very distribution drawn from; greedy replies (temperature 0) carry those of temperature 1.

        Raises:
            PromptError: A prompt is empty, or does not leave room for the reply in the model's context.
            ValueError: The settings make no distribution.
        """
        effective(settings.temperature, settings.top_p)
        if settings.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {settings.max_new_tokens}, must be 1 or more")
        limit = self.policy.core.context_length
        for number, request in enumerate(requests):
            length = len(request.prompt_ids)
            if not length:
                raise PromptError(f"request {number} has an empty prompt")
            if limit is not None and length + settings.max_new_tokens > limit:
                raise PromptError(
                    f"request {number}: {length} prompt tokens and {settings.max_new_tokens} to come exceed the "
                    f"model's context of {limit}: shorten the prompt or lower max_new_tokens"
                )
        replies: list[Reply | None] = [None] * len(requests)
        with torch.inference_mode(), self.policy.activated():
            waiting = _by_prompt(requests)
            while waiting:
                batch = _Batch(self, settings)
                waiting = batch.admit(waiting)
                for index, reply in batch.run():
                    replies[index] = reply
        self.statistics.replies += len(requests)
        self.statistics.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        return [reply for reply in replies if reply is not None]


def as_sampler(sampler: InProcessSampler) -> Sampler:
    """The same object; here so that the type checker holds the class to its contract."""
    return sampler


@dataclass(slots=True)
class _Prompt:
    """A distinct prompt and the requests that ask for it."""

    ids: tuple[int, ...]
    requests: list[int] = field(default_factory=list)
    keys: list[tuple[int, ...]] = field(default_factory=list)
    """Of those requests."""


def _by_prompt(requests: Sequence[SampleRequest]) -> list[_Prompt]:
    """Distinct prompts, longest first (so that the first prefill tells how much memory a batch takes at most)."""
    found: dict[tuple[int, ...], _Prompt] = {}
    for index, request in enumerate(requests):
        prompt = found.setdefault(request.prompt_ids, _Prompt(request.prompt_ids))
        prompt.requests.append(index)
        prompt.keys.append(request.key)
    return sorted(found.values(), key=lambda prompt: -len(prompt.ids))


def row_uniforms(key: tuple[int, ...], count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A row's random numbers: shape (count,), in [0, 1), the same for a key wherever and with whomever it is sampled.

    >>> bool((row_uniforms((1, 2), 3)[:2] == row_uniforms((1, 2), 2)).all())
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token of each row by the inverse of its cumulative distribution in fp64.

    Args:
        log_probs: fp32 (N, V), -inf outside the support.
        uniforms: fp64 (N,), in [0, 1).

    Returns:
        int64 (N,). Never a token of probability 0.
    """
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.minimum(uniforms.unsqueeze(-1) * total, total * (1.0 - 1e-15))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


class _Batch:
    """Rows that are decoded together: the cache, its mask, and what has been sampled so far.

    Columns of the cache: ``width`` for prompts, right-aligned, then one a step. With a plain cache (every layer sees
    its whole past) all prompts of the batch share buffers; others stay the model's own cache, one prefill batch each.
    """

    def __init__(self, sampler: InProcessSampler, settings: SamplingSettings) -> None:
        self.sampler, self.settings = sampler, settings
        self.core, self.policy = sampler.policy.core, sampler.policy
        self.device = self.core.device
        self.prompts: list[_Prompt] = []
        self.cache: Any = None
        self.plain = False

    # Prefill

    def admit(self, waiting: list[_Prompt]) -> list[_Prompt]:
        """Prefill as many of the waiting prompts (longest first) as the memory allows; returns the rest."""
        started = time.perf_counter()
        width = len(waiting[0].ids)
        groups = micro_batches([len(prompt.ids) for prompt in waiting], self.sampler.prefill_tokens)[::-1]
        total = sum(len(prompt.requests) for prompt in waiting)
        cache, hidden, members, filled, capacity = None, [], [], 0, 0
        for group in groups:
            chunk = [waiting[index] for index in group]
            rows = sum(len(prompt.requests) for prompt in chunk)
            if cache is not None and filled + rows > capacity:
                break
            own_cache, states = self._prefill(chunk)
            repeats = [place for place, prompt in enumerate(chunk) for _ in prompt.requests]
            source = torch.tensor(repeats, device=self.device)
            members.extend(chunk)
            hidden.append(states[source])
            if cache is None:
                self.plain = is_plain(own_cache) and self.core.uses_sdpa
                if not self.plain:
                    if rows > len(chunk):
                        own_cache.batch_select_indices(source)
                    self.cache = own_cache
                    break
                capacity = max(rows, min(self._room(own_cache, width), total))
                extra = self.settings.max_new_tokens
                cache = KeyValueBuffer.like(own_cache, rows=capacity, columns=width, extra=extra)
            cache.fill(slice(filled, filled + rows), own_cache, source)
            filled += rows
        self.prompts = members
        if cache is not None:
            if filled < capacity:
                cache.select(torch.arange(filled, device=self.device), drop_columns=0)
            self.cache = cache
        self.logits = self.core.logits(torch.cat(hidden))
        statistics = self.sampler.statistics
        statistics.prefilled_tokens += sum(len(prompt.ids) for prompt in members)
        statistics.prefill_seconds += time.perf_counter() - started
        taken = {id(prompt) for prompt in members}
        return [prompt for prompt in waiting if id(prompt) not in taken]

    def _room(self, cache: Any, width: int) -> int:
        """Rows whose keys and values fit the sampler's bytes."""
        row_bytes = max(bytes_per_token(cache), 1) * (width + self.settings.max_new_tokens)
        return max(1, self.sampler.cache_bytes // row_bytes)

    def _prefill(self, chunk: Sequence[_Prompt]) -> tuple[Any, Tensor]:
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
            mask = (columns >= padding).to(torch.int64).to(self.device)
            positions = (columns - padding).clamp(min=0).to(self.device)
        cache = self.core.new_cache()
        states = self.core.hidden(ids.to(self.device), mask=mask, positions=positions, cache=cache)
        return cache, states[:, -1]

    # Decode

    def run(self) -> list[tuple[int, Reply]]:
        """Decode until every row has ended or run out; returns (request's index, reply)."""
        started = time.perf_counter()
        steps = self.settings.max_new_tokens
        keys = [key for prompt in self.prompts for key in prompt.keys]
        lengths = torch.tensor(
            [len(prompt.ids) for prompt in self.prompts for _ in prompt.requests], device=self.device
        )
        uniforms = torch.from_numpy(np.stack([row_uniforms(key, steps) for key in keys])).to(self.device)
        tokens = torch.zeros((len(keys), steps), dtype=torch.int64, device=self.device)
        log_probs = torch.zeros((len(keys), steps), device=self.device)
        counts = torch.zeros(len(keys), dtype=torch.int64, device=self.device)
        ends = torch.tensor(sorted(self.policy.chat.end_ids), device=self.device)
        rows = torch.arange(len(keys), device=self.device)  # which reply each row of the cache belongs to
        alive = torch.ones(len(keys), dtype=torch.bool, device=self.device)
        width = int(lengths.max())
        mask = self._mask(lengths, width)
        logits = self.logits
        for step in range(steps):
            chosen, chosen_log_probs = self._choose(logits, uniforms[rows, step])
            tokens[rows, step] = chosen
            log_probs[rows, step] = chosen_log_probs
            counts[rows] += alive
            alive = alive & ~torch.isin(chosen, ends)
            running = int(alive.sum())
            if running == 0 or step == steps - 1:
                break
            if running <= _COMPACT_BELOW * len(alive):
                keep = alive.nonzero().squeeze(-1)
                rows, chosen, lengths, alive = rows[keep], chosen[keep], lengths[keep], alive[keep]
                width = self._compact(keep, width, int(lengths.max()))
                mask = self._mask(lengths, width)
            hidden = self.core.hidden(
                chosen.unsqueeze(-1),
                mask=None if mask is None else mask[..., : width + step + 1],
                positions=(lengths + step).unsqueeze(-1),
                cache=self.cache,
            )
            logits = self.core.logits(hidden[:, -1])
        replies = self._replies(tokens, log_probs, counts)
        self.sampler.statistics.reply_tokens += sum(len(reply.token_ids) for _, reply in replies)
        self.sampler.statistics.decode_seconds += time.perf_counter() - started
        return replies

    def _choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        settings = self.settings
        distribution = log_distribution(logits, settings.temperature, settings.top_p)
        if settings.temperature == 0.0:
            chosen = logits.argmax(dim=-1)
        else:
            chosen = draw(distribution, uniforms)
        return chosen, distribution.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    def _mask(self, lengths: Tensor, width: int) -> Tensor | None:
        """Which columns a row may look at, for all steps to come: (n, 1, 1, columns) ready for attention where the
        cache is plain (an addend on a CPU, where that is quicker), else (n, columns) of 0 and 1 for the model. None
        where no row has padding."""
        if self.plain and int(lengths.min()) == width:
            return None
        columns = torch.arange(width + self.settings.max_new_tokens, device=self.device)
        seen = columns >= (width - lengths).unsqueeze(-1)
        if not self.plain:
            return seen.to(torch.int64)
        seen = seen[:, None, None, :]
        if self.device.type != "cpu":
            return seen
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))

    def _compact(self, keep: Tensor, width: int, longest: int) -> int:
        """Drop finished rows from the cache, and columns that are padding in all others; returns the new width."""
        if self.plain:
            self.cache.select(keep, drop_columns=width - longest)
            return longest
        self.cache.batch_select_indices(keep)
        return width

    def _replies(self, tokens: Tensor, log_probs: Tensor, counts: Tensor) -> list[tuple[int, Reply]]:
        ids, values, lengths = tokens.tolist(), log_probs.tolist(), counts.tolist()
        replies, row = [], 0
        for prompt in self.prompts:
            for index in prompt.requests:
                length = lengths[row]
                reply = Reply(
                    token_ids=tuple(ids[row][:length]),
                    log_probs=tuple(values[row][:length]),
                    truncated=ids[row][length - 1] not in self.policy.chat.end_ids,
                    version=self.policy.version,
                )
                replies.append((index, reply))
                row += 1
        return replies
