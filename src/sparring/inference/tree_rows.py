"""Rows that share beginnings: the prompts' tree is prefilled once, and what rows share is attended to once for all.

A segment that several rows have above them stays in the tree's store, where all of them attend to it in one product.
What is a row's own is copied into its buffer, right-aligned, where its reply is appended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparring.inference.kv_cache import CodedRows, before_window, record_bytes
from sparring.inference.padded_rows import Prompt
from sparring.policies.language_model import LanguageModel
from sparring.policies.tree_attention import FullRows, NodeStore, Span, chunk_plan
from sparring.tokens.prefix_tree import PrefixTree, Segment, corresponding, cut, merge, shared_length
from sparring.types import KeyValueSettings

WORTH_SHARING = 256
"""Tokens that a shared segment must save a step: below that, a product of its own costs more than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What rows shared, with its keys and values: rows to come need not compute it again under the same weights."""

    tree: PrefixTree
    store: NodeStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """Prompts that were computed, what they share once."""

    tree: PrefixTree
    store: NodeStore
    """Keys and values of all nodes."""
    hidden: Tensor
    """(P, H): of each prompt's last position, in the order of the prompts."""
    computed: int
    """Token positions that were not known before."""

    def remembered(self, recent: Sequence[tuple[int, ...]], past: Past | None) -> Past:
        """Keys and values of these prompts, out of what was computed now and of an earlier past."""
        tree = merge(recent)
        there = NodeStore(tree.size)
        here = corresponding(tree, self.tree)
        there.copy(self.store, np.flatnonzero(here >= 0), here[here >= 0])
        if past is not None:
            old = np.where(here < 0, corresponding(tree, past.tree), -1)
            there.copy(past.store, np.flatnonzero(old >= 0), old[old >= 0])
        return Past(tree=tree, store=there)


def prefill(
    core: LanguageModel, prompts: Sequence[tuple[int, ...]], *, prefill_tokens: int, past: Past | None = None
) -> Prefilled:
    """Compute prompts: each distinct prefix once, and none that ``past`` knows (but every prompt's last position)."""
    tree = merge(prompts)
    store = NodeStore(tree.size)
    last = [int(tree.nodes(number)[-1]) for number in range(len(prompts))]
    fresh = np.ones(tree.size, dtype=bool)
    if past is not None:
        known = corresponding(tree, past.tree)
        known[last] = -1  # its hidden state is wanted, and only keys and values were kept
        fresh = known < 0
        store.copy(past.store, np.flatnonzero(~fresh), known[~fresh])
    tree = split_long(cut(tree, (np.flatnonzero(fresh[1:] != fresh[:-1]) + 1).tolist()), prefill_tokens)
    place: dict[int, Tensor] = {}
    asked = set(last)
    for chunk in chunks(tree.segments, prefill_tokens, fresh=[bool(fresh[s.start]) for s in tree.segments]):
        first, stop = tree.segments[chunk.start].start, tree.segments[chunk[-1]].stop
        states = core.tree_hidden(chunk_plan(tree, chunk, store, core.device))
        place |= {node: states[node - first] for node in asked if first <= node < stop}
    hidden = torch.stack([place[node] for node in last])
    return Prefilled(tree=tree, store=store, hidden=hidden, computed=int(fresh.sum()))


class TreeRows:
    """Rows decoded together; see ``padded_rows.PaddedRows`` for the other kind.

    Attributes:
        prompts: The prompts of the rows, in the order of the rows (a prompt has one row for each request).
        logits: fp32 (R, V), after the prompts.
        lengths: int64 (R,): prompt tokens of each row.
        prefilled: Token positions computed for the prompts.
    """

    def __init__(
        self, core: LanguageModel, waiting: Sequence[Prompt], *, prefill_tokens: int, cache_bytes: int, new_tokens: int,
        kv: KeyValueSettings, past: Past | None = None,
    ) -> None:  # fmt: skip
        self.core, self.new_tokens, self.kv = core, new_tokens, kv
        started = time.perf_counter()
        node = row = core.bytes_per_position
        if kv.coded:
            row = core.vectors_per_position * record_bytes(core.head_size, kv)
        self.prompts = _admitted(waiting, cache_bytes, new_tokens, node_bytes=node, row_bytes=row)
        made = prefill(core, [prompt.ids for prompt in self.prompts], prefill_tokens=prefill_tokens, past=past)
        tree, store = made.tree, made.store
        repeats = [number for number, prompt in enumerate(self.prompts) for _ in prompt.requests]
        self.logits = core.logits(made.hidden[torch.tensor(repeats, device=core.device)])
        self.lengths = torch.tensor([len(self.prompts[number].ids) for number in repeats], device=core.device)
        self.prefilled = made.computed
        self._own, self._rows = self._lay_out(tree, store, repeats)
        self._tree, self._store, self._repeats = tree, store, repeats
        self.prefill_seconds = time.perf_counter() - started

    def past(self) -> Past | None:
        """What they share, copied; None where keys and values are coded."""
        if self.kv.coded:
            return None
        tree, spans = self._tree, self._rows.spans
        return _past(tree, self._store, [tree.nodes(self._repeats[s.start])[: s.column + s.length] for s in spans])

    def forward(self, chosen: Tensor, step: int) -> Tensor:
        """Hidden states (R, H) after one more token a row; ``step`` counts from 0."""
        return self.core.rows_hidden(chosen, self.lengths + step, self._rows)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, ascending; columns that are padding in all of them go too."""
        kept = rows.tolist()
        longest = int(self._own.max())
        self._own, self.lengths = self._own[rows], self.lengths[rows]
        spans = []
        for span in self._rows.spans:
            start, stop = (int(np.searchsorted(kept, edge)) for edge in (span.start, span.stop))
            if stop > start:
                spans.append(replace(span, start=start, stop=stop))
        self._rows.keep(rows, spans, longest - int(self._own.max()))

    def _lay_out(
        self, tree: PrefixTree, store: NodeStore, repeats: Sequence[int]
    ) -> tuple[Tensor, FullRows | CodedRows]:
        """Which segments are shared, and buffers with what is not."""
        device = self.core.device
        spans = shared_spans(tree, repeats)
        if self.kv.coded:
            spans = before_window(spans, [tree.row_lengths[prompt] for prompt in repeats], self.kv.window)
        shared = max((span.column + span.length for span in spans), default=0)
        own: list[np.ndarray] = []
        covered = np.zeros((len(repeats), shared), dtype=bool)
        for row, prompt in enumerate(repeats):
            nodes = tree.nodes(prompt)
            mine = np.ones(len(nodes), dtype=bool)
            for span in spans:
                if span.start <= row < span.stop:
                    mine[span.column : span.column + span.length] = False
                    covered[row, span.column : span.column + span.length] = True
            own.append(nodes[mine])
        width = max(len(nodes) for nodes in own)
        index = np.zeros((len(own), width), dtype=np.int64)
        for row, nodes in enumerate(own):
            index[row, width - len(nodes) :] = nodes
        lengths = torch.tensor([len(nodes) for nodes in own])
        seen = torch.cat(
            [
                torch.from_numpy(covered),
                torch.arange(width + self.new_tokens) >= (width - lengths).unsqueeze(-1),
            ],
            dim=1,
        )
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None, None, :].to(device)
        if self.kv.coded:
            coded = CodedRows(
                store,
                spans,
                shared,
                torch.from_numpy(index).to(device),
                mask,
                new_tokens=self.new_tokens,
                settings=self.kv,
            )
            return lengths.to(device), coded
        flat = torch.from_numpy(index.reshape(-1)).to(device)

        def buffer(table: Tensor) -> Tensor:
            heads, _, size = table.shape
            made = table.new_zeros((len(own), heads, width + self.new_tokens, size))
            made[:, :, :width] = table.index_select(1, flat).view(heads, len(own), width, size).transpose(0, 1)
            return made

        full = FullRows(
            store=store, spans=spans, shared=shared, keys={n: buffer(t) for n, t in store.keys.items()},
            values={n: buffer(t) for n, t in store.values.items()}, mask=mask, length=width,
        )  # fmt: skip
        return lengths.to(device), full


def _admitted(
    waiting: Sequence[Prompt], cache_bytes: int, new_tokens: int, *, node_bytes: int, row_bytes: int
) -> list[Prompt]:
    """The first of the prompts, in the order of their tokens, whose tree and rows fit; bytes are those of a position."""
    taken: list[Prompt] = []
    nodes = rows = longest = 0
    before: tuple[int, ...] = ()
    for prompt in sorted(waiting, key=lambda prompt: prompt.ids):
        nodes += len(prompt.ids) - shared_length(before, prompt.ids)
        rows, longest = rows + len(prompt.requests), max(longest, len(prompt.ids))
        if taken and nodes * node_bytes + rows * (longest + new_tokens) * row_bytes > cache_bytes:
            break
        taken.append(prompt)
        before = prompt.ids
    return taken


def split_long(tree: PrefixTree, budget: int) -> PrefixTree:
    """The same tree with segments of at most ``budget`` nodes."""
    return cut(tree, [node for s in tree.segments for node in range(s.start + budget, s.stop, budget)])


def chunks(segments: Sequence[Segment], budget: int, *, fresh: Sequence[bool]) -> list[range]:
    """Runs of fresh segments of at most ``budget`` nodes together, each segment within it."""
    found: list[range] = []
    size = 0
    for number, segment in enumerate(segments):
        if not fresh[number]:
            continue
        if found and found[-1].stop == number and size + segment.length <= budget:
            found[-1] = range(found[-1].start, number + 1)
            size += segment.length
        else:
            found.append(range(number, number + 1))
            size = segment.length
    return found


def _past(tree: PrefixTree, store: NodeStore, paths: Sequence[np.ndarray]) -> Past:
    """The nodes of these paths, copied out of the store."""
    kept = merge([tuple(tree.token_ids[path].tolist()) for path in paths])
    there = NodeStore(kept.size)
    there.copy(store, np.arange(kept.size), corresponding(kept, tree))
    return Past(tree=kept, store=there)


def shared_spans(tree: PrefixTree, repeats: Sequence[int]) -> list[Span]:
    """Segments worth attending to together, with the rows below them; ``repeats`` names the prompt of each row.

    Rows are in depth-first order, so those that hold the whole of a segment are neighbours (one that ends within it
    comes before them).
    """
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(repeats):
        end = tree.row_ends[prompt]
        whole = tree.row_lengths[prompt] == tree.segments[end].depth + tree.segments[end].length
        for segment in [*tree.ancestors(end), *([end] if whole else [])]:
            rows_of.setdefault(segment, []).append(row)
    spans = []
    for number, rows in sorted(rows_of.items()):
        held = tree.segments[number]
        if (len(rows) - 1) * held.length >= WORTH_SHARING:
            spans.append(Span(
                start=rows[0], stop=rows[-1] + 1, first_node=held.start, column=held.depth, length=held.length
            ))  # fmt: skip
    return spans
