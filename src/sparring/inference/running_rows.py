"""Rows that join and leave between two tokens: a slot each in common buffers, filled from the left to its own length.

Prompts come prefilled, what they share computed once (``tree_rows.prefill``); a row that joins copies its keys and values
into its slot, a row that leaves gives the slot to the last one. So rows of any age go through the model together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparring.inference.tree_rows import Past, Prefilled, prefill
from sparring.policies.language_model import LanguageModel
from sparring.policies.tree_attention import Span
from sparring.tokens.prefix_tree import distinct_prefixes, shared_length

COLUMNS_TOGETHER = 64
"""Buffers are as wide as the longest row may become, in these units."""
REMEMBERED_FROM = 96
"""Prompts below so many tokens are computed quicker than looked up."""


class RunningRows:
    """Keys and values of the rows that are decoded; a ``tree_attention.DecodingRows``.

    Attributes:
        count: Rows.
        lengths: int64 (count,): filled columns of each row.
    """

    def __init__(self, core: LanguageModel) -> None:
        self.core, self.count = core, 0
        self.lengths = torch.zeros(0, dtype=torch.int64, device=core.device)
        self._columns = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._mask = torch.zeros(0)
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._end = 0

    def bytes_with(self, rows: int, columns: int) -> int:
        """What the buffers would take with so many rows more, of so many columns."""
        wide = max(self._columns, _rounded(columns))
        return (self.count + rows) * wide * self.core.bytes_per_position

    def join(self, made: Prefilled, new_tokens: Sequence[int]) -> None:
        """One row more for each of the prompts, in order, with room for as many tokens as its entry says."""
        tree, device = made.tree, self.core.device
        columns = [length + more for length, more in zip(tree.row_lengths, new_tokens, strict=True)]
        self._grow(made, len(columns), max(columns))
        for number, length in enumerate(tree.row_lengths):
            nodes = torch.from_numpy(tree.nodes(number)).to(device)
            slot = self.count + number
            for mine, theirs in ((self._keys, made.store.keys), (self._values, made.store.values)):
                for layer, table in theirs.items():
                    mine[layer][slot, :, :length] = table.index_select(1, nodes)
        fresh = torch.tensor(tree.row_lengths, dtype=torch.int64, device=device)
        self.lengths = torch.cat([self.lengths, fresh])
        self.count += len(columns)

    def forward(self, chosen: Tensor) -> Tensor:
        """Logits fp32 (count, V) after one more token a row; ``chosen`` int64 (count,)."""
        self._end = int(self.lengths.max()) + 1
        columns = torch.arange(self._end, device=self.core.device)
        seen = columns <= self.lengths.unsqueeze(-1)
        mask = torch.zeros(seen.shape, device=self.core.device).masked_fill_(~seen, float("-inf"))
        self._mask = mask[:, None, None, :]
        self._slots = torch.arange(self.count, device=self.core.device)
        return self.core.logits(self.core.rows_hidden(chosen, self.lengths, self))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See ``tree_attention.DecodingRows``."""
        keys, values = self._keys[layer], self._values[layer]
        count, heads, _, size = query.shape
        groups = key.shape[1]
        keys[self._slots, :, self.lengths] = key[:, :, 0].to(keys.dtype)
        values[self._slots, :, self.lengths] = value[:, :, 0].to(values.dtype)
        queries = (query * scale).to(keys.dtype).view(count, groups, heads // groups, size)
        scores = queries @ keys[:count, :, : self._end].transpose(-1, -2)
        shares = (scores.float() + self._mask).softmax(dim=-1).to(values.dtype)
        found = shares @ values[:count, :, : self._end]
        return found.reshape(count, 1, heads, size).to(query.dtype)

    def advance(self) -> None:
        """All layers have kept their token."""
        self.lengths = self.lengths + 1

    def keep(self, rows: Tensor, spans: list[Span], drop: int) -> None:
        """Not how these rows leave: see :meth:`leave`."""
        raise NotImplementedError

    def leave(self, places: Sequence[int]) -> list[int]:
        """Rows end. The last ones take their slots.

        Returns:
            For each row that is left, in its new order, its place before.
        """
        order = list(range(self.count))
        for place in sorted(places, reverse=True):
            last = order.pop()
            if place < len(order):
                order[place] = last
        for slot, before in enumerate(order):
            if slot == before:
                continue
            length = int(self.lengths[before])
            for table in (self._keys, self._values):
                for layer in table.values():
                    layer[slot, :, :length] = layer[before, :, :length]
        self.lengths = self.lengths[torch.tensor(order, dtype=torch.int64, device=self.core.device)]
        self.count = len(order)
        if not order:  # the next rows need not be as long
            self._keys, self._values, self._columns = {}, {}, 0
        return order

    def _grow(self, made: Prefilled, rows: int, columns: int) -> None:
        """Buffers with room for these rows. Zeros, not garbage: a masked column still enters the sums, with weight 0."""
        wide = max(self._columns, _rounded(columns))
        have = next(iter(self._keys.values())).shape[0] if self._keys else 0
        if self.count + rows <= have and wide == self._columns:
            return
        high = have if self.count + rows <= have else max(self.count + rows, min(2 * have, have + 16), 4)
        for mine, theirs in ((self._keys, made.store.keys), (self._values, made.store.values)):
            for layer, table in theirs.items():
                fresh = table.new_zeros((high, table.shape[0], wide, table.shape[2]))
                if layer in mine:
                    fresh[: self.count, :, : self._columns] = mine[layer][: self.count]
                mine[layer] = fresh
        self._columns = wide


def _rounded(columns: int) -> int:
    return -(-columns // COLUMNS_TOGETHER) * COLUMNS_TOGETHER


class PrefixMemory:
    """Keys and values of the latest prompts of one set of weights, so that the next ones compute only what is new.

    It belongs to one set of weights and goes with it: weights that are loaded under a known name get a memory of their own.

    Args:
        core: The model.
        tokens: Distinct positions that are kept.
        prefill_tokens: Of one forward pass.
    """

    def __init__(self, core: LanguageModel, *, tokens: int = 2048, prefill_tokens: int = 1536) -> None:
        self.core, self.tokens, self.prefill_tokens = core, tokens, prefill_tokens
        self._recent: list[tuple[int, ...]] = []
        self._past: Past | None = None

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        """Compute prompts, and keep them where that is worth it."""
        known = self._past if any(self._knows(prompt) for prompt in prompts) else None
        made = prefill(self.core, prompts, prefill_tokens=self.prefill_tokens, past=known)
        long = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) >= REMEMBERED_FROM]
        if long and made.computed > sum(map(len, long)) // 4:
            self._remember(long, made)
        return made

    def _knows(self, prompt: tuple[int, ...]) -> bool:
        if len(prompt) < REMEMBERED_FROM:
            return False
        return any(shared_length(prompt, other) >= REMEMBERED_FROM // 2 for other in self._recent)

    def _remember(self, prompts: Sequence[tuple[int, ...]], made: Prefilled) -> None:
        recent: list[tuple[int, ...]] = []
        for prompt in [*prompts, *(old for old in self._recent if old not in prompts)]:
            if distinct_prefixes([*recent, prompt]) > self.tokens:
                break
            recent.append(prompt)
        if recent:
            self._past = made.remembered(recent, self._past)
            self._recent = recent
