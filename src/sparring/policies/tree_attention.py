"""Attention over a prefix tree, plugged into transformers' attention interface: each position attends to its ancestors.

All nodes of a tree go through the model as one row. Queries attend in *blocks*: a segment, or sibling leaves together,
to the segments above in full and to their own part causally. A dense mask over the whole tree would cost more than the
sharing saves. Everything but attention is position by position, so nothing else of a model needs to know.

Three uses: ``tree`` alone (the learner: one pass with gradients), ``tree`` with a store (the sampler's prefill, in
chunks: keys and values of all nodes are kept), and ``rows`` (decoding: rows below a segment attend to it together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparring.policies import tree_flex
from sparring.tokens.prefix_tree import PrefixTree

NAME = "sparring_tree"
"""Of the implementation; without a tree it is the same as ``sdpa``."""
BLOCK_TOKENS = 256
"""Sibling leaves attend together up to this many tokens: fewer calls, at the price of their mutual blank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries that attend in one call."""

    own: range
    """Segments whose nodes are the queries; siblings if several."""
    ancestors: tuple[int, ...]
    """Segments above, root first."""
    mask: Tensor | None
    """Added to the scores, (own nodes, ancestors' and own nodes); bool off the CPU. None: plain causal, no ancestors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreePlan:
    """A tree as the model takes it."""

    token_ids: Tensor
    """int64 (1, N)."""
    positions: Tensor
    """int64 (1, N): depths."""
    lengths: tuple[int, ...]
    """Nodes of each segment."""
    block_lengths: tuple[int, ...]
    blocks: tuple[Block, ...]
    whole_mask: BlockMask | None = None
    """Of all nodes, in place of blocks: the learner's pass on a GPU."""
    store: NodeStore | None = None
    """Where keys and values of all nodes are kept, those of earlier chunks among them."""
    starts: tuple[int, ...] = ()
    """First node of every segment of the whole tree, and the number of nodes; with a store."""
    first: int = 0
    """First segment of this chunk."""


class NodeStore:
    """Keys and values of a tree's nodes, by layer, (key-value heads, N, head size) each."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes from ``start`` on, (heads, n, d) each; returns those of the whole tree."""
        if layer not in self.keys:
            self.keys[layer] = key.new_empty((key.shape[0], self.nodes, key.shape[2]))
            self.values[layer] = value.new_empty((value.shape[0], self.nodes, value.shape[2]))
        keys, values = self.keys[layer], self.values[layer]
        keys[:, start : start + key.shape[1]] = key
        values[:, start : start + value.shape[1]] = value
        return keys, values

    def copy(self, other: NodeStore, here: NDArray[np.int64], there: NDArray[np.int64]) -> None:
        """Take over nodes ``there`` of another store as nodes ``here``."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, table in theirs.items():
                if layer not in mine:
                    mine[layer] = table.new_empty((table.shape[0], self.nodes, table.shape[2]))
                mine[layer][:, torch.from_numpy(here).to(table.device)] = table[
                    :, torch.from_numpy(there).to(table.device)
                ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A shared segment and the rows that attend to it."""

    start: int
    stop: int
    """Rows ``start`` to ``stop``."""
    first_node: int
    column: int
    """Depth of its first node: the column of its scores."""
    length: int


class DecodingRows(Protocol):
    """Rows that are decoded together, as attention sees them."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Keep one more token's key and value a row, and attend to all of the row's.

        Query (R, heads, 1, d), key and value with their own heads; returns (R, 1, heads, d).
        """
        ...

    def advance(self) -> None:
        """All layers have kept their token."""
        ...

    def keep(self, rows: Tensor, spans: list[Span], drop: int) -> None:
        """Go on with these rows and spans, and without the ``drop`` first own columns."""
        ...


@dataclass(kw_only=True, slots=True)
class FullRows:
    """Rows whose keys and values are kept in full: what they share in the store, what is their own in buffers.

    Columns of the scores: ``shared`` for depths of shared segments, then the buffers' own.
    """

    store: NodeStore
    spans: list[Span]
    shared: int
    keys: dict[int, Tensor]
    """Of each layer, (rows, key-value heads, own columns and those to come, head size)."""
    values: dict[int, Tensor]
    mask: Tensor
    """Added to the scores, (rows, 1, 1, all columns): -inf where a row has nothing."""
    length: int = 0
    """Filled columns of the buffers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One softmax over shared and own columns; see ``DecodingRows``."""
        own_keys, own_values = self.keys[layer], self.values[layer]
        end = self.length + 1
        own_keys[:, :, self.length : end], own_values[:, :, self.length : end] = key, value
        count, heads, _, size = query.shape
        groups = key.shape[1]
        queries = (query * scale).view(count, groups, heads // groups, size)
        scores = queries.new_zeros((count, groups, heads // groups, self.shared + end))
        torch.matmul(queries, own_keys[:, :, :end].transpose(-1, -2), out=scores[..., self.shared :])
        score_spans(scores, queries, self.spans, self.store.keys[layer])
        shares = (scores + self.mask[..., : self.shared + end]).softmax(dim=-1)
        found = shares[..., self.shared :] @ own_values[:, :, :end]
        add_spans(found, shares, self.spans, self.store.values[layer])
        return found.reshape(count, 1, heads, size)

    def advance(self) -> None:
        self.length += 1

    def keep(self, rows: Tensor, spans: list[Span], drop: int) -> None:
        for table in (self.keys, self.values):
            for layer in list(table):
                table[layer] = table[layer][:, :, drop:].index_select(0, rows)
        self.mask = kept_mask(self.mask, rows, self.shared, drop)
        self.spans, self.length = spans, self.length - drop


def score_spans(scores: Tensor, queries: Tensor, spans: Sequence[Span], store_keys: Tensor) -> None:
    """Scores of shared segments, one product a segment for all rows below it, written into their columns.

    Scores (R, groups, heads a group, columns), queries (R, groups, heads a group, d), keys (groups, nodes, d).
    """
    for span in spans:
        nodes = slice(span.first_node, span.first_node + span.length)
        asked = queries[span.start : span.stop].transpose(0, 1).flatten(1, 2)
        answer = asked @ store_keys[:, nodes].transpose(-1, -2)
        scores[span.start : span.stop, :, :, span.column : span.column + span.length] = answer.view(
            answer.shape[0], span.stop - span.start, -1, span.length
        ).transpose(0, 1)


def add_spans(found: Tensor, shares: Tensor, spans: Sequence[Span], store_values: Tensor) -> None:
    """Adds what shared segments contribute to ``found``, (R, groups, heads a group, d)."""
    for span in spans:
        nodes = slice(span.first_node, span.first_node + span.length)
        part = shares[span.start : span.stop, :, :, span.column : span.column + span.length]
        answer = part.transpose(0, 1).flatten(1, 2) @ store_values[:, nodes]
        found[span.start : span.stop] += answer.view(
            answer.shape[0], span.stop - span.start, -1, answer.shape[-1]
        ).transpose(0, 1)


def kept_mask(mask: Tensor, rows: Tensor, shared: int, drop: int) -> Tensor:
    """The mask of these rows, without the ``drop`` first own columns."""
    chosen = mask[rows]
    return torch.cat([chosen[..., :shared], chosen[..., shared + drop :]], dim=-1)


def chunk_plan(
    tree: PrefixTree, segments: range, store: NodeStore, device: torch.device
) -> TreePlan:  # fmt: skip
    """A run of a tree's segments, to be computed when those before them are in the store."""
    whole = plan(tree, device, only=segments)
    nodes = slice(tree.segments[segments.start].start, tree.segments[segments[-1]].stop)
    starts = (*(segment.start for segment in tree.segments), tree.size)
    return replace(
        whole, token_ids=whole.token_ids[:, nodes], positions=whole.positions[:, nodes], store=store, starts=starts,
        first=segments.start,
    )  # fmt: skip


def whole_plan(tree: PrefixTree, device: torch.device) -> TreePlan:
    """A whole tree and one mask, made once for all layers; FlexAttention's kernel does the rest."""
    return TreePlan(
        token_ids=torch.from_numpy(tree.token_ids).unsqueeze(0).to(device),
        positions=torch.from_numpy(tree.depths).unsqueeze(0).to(device),
        lengths=(), block_lengths=(), blocks=(), whole_mask=tree_flex.block_mask(tree, device),
    )  # fmt: skip


def learner_plan(tree: PrefixTree, device: torch.device) -> TreePlan:
    """One pass over a whole tree with gradients: one kernel on a GPU, blocks elsewhere."""
    return whole_plan(tree, device) if device.type == "cuda" else plan(tree, device)


def plan(tree: PrefixTree, device: torch.device, *, only: range | None = None) -> TreePlan:
    """Blocks of a tree (or of these segments of it) and their masks, made once for all layers."""
    parents = {segment.parent for segment in tree.segments}
    chosen = range(len(tree.segments)) if only is None else only
    blocks: list[range] = []
    size = 0
    for number in chosen:
        segment = tree.segments[number]
        leaf = number not in parents
        last = blocks[-1] if blocks else range(0)
        joins = (
            leaf
            and bool(last)
            and last[-1] not in parents
            and segment.parent is not None
            and tree.segments[last[-1]].parent == segment.parent
            and size + segment.length <= BLOCK_TOKENS
        )
        if joins:
            blocks[-1] = range(last.start, number + 1)
            size += segment.length
        else:
            blocks.append(range(number, number + 1))
            size = segment.length
    made = tuple(_block(tree, own, device) for own in blocks)
    return TreePlan(
        token_ids=torch.from_numpy(tree.token_ids).unsqueeze(0).to(device),
        positions=torch.from_numpy(tree.depths).unsqueeze(0).to(device),
        lengths=tuple(tree.segments[s].length for s in chosen),
        block_lengths=tuple(sum(tree.segments[s].length for s in own) for own in blocks), blocks=made,
    )  # fmt: skip


def _block(tree: PrefixTree, own: range, device: torch.device) -> Block:
    ancestors = tuple(tree.ancestors(own[0]))
    if not ancestors and len(own) == 1:
        return Block(own=own, ancestors=(), mask=None)
    above = sum(tree.segments[s].length for s in ancestors)
    label = torch.cat([torch.full((tree.segments[s].length,), s) for s in own])
    order = torch.arange(len(label))
    within = (label[:, None] == label[None, :]) & (order[None, :] <= order[:, None])
    seen = torch.cat([torch.ones(len(label), above, dtype=torch.bool), within], dim=1)
    if device.type != "cpu":
        return Block(own=own, ancestors=ancestors, mask=seen.to(device))
    return Block(own=own, ancestors=ancestors, mask=torch.zeros(seen.shape).masked_fill(~seen, float("-inf")))


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    tree: TreePlan | None = None, rows: DecodingRows | None = None, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' contract of an attention function; query (1, heads, N, d), key and value with their own heads."""
    if rows is not None:
        return rows.attend(module.layer_idx, query, key, value, other["scaling"]), None
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **other)
    if tree.store is not None:
        return _prefill(module, query, key, value, tree, tree.store, other["scaling"]), None
    if tree.whole_mask is not None:
        found = tree_flex.attend(query, key, value, tree.whole_mask, other.get("scaling"))
        return found.transpose(1, 2).contiguous(), None
    keys, values = key.split(tree.lengths, dim=2), value.split(tree.lengths, dim=2)
    pieces = []
    for block, own in zip(tree.blocks, query.split(tree.block_lengths, dim=2), strict=True):
        seen = [*block.ancestors, *block.own]
        pieces.append(
            scaled_dot_product_attention(
                own, _joined(keys, seen), _joined(values, seen), attn_mask=block.mask, is_causal=block.mask is None,
                scale=other.get("scaling"), enable_gqa=key.shape[1] != query.shape[1],
            )
        )  # fmt: skip
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _prefill(
    module: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, store: NodeStore, scale: float
) -> Tensor:
    """A chunk attends to itself and to what the store holds; returns (1, n, heads, d)."""
    keys, values = store.write(module.layer_idx, tree.starts[tree.first], key[0], value[0])
    found = []
    for block, own in zip(tree.blocks, query.split(tree.block_lengths, dim=2), strict=True):
        runs = _runs(tree.starts, [*block.ancestors, *block.own])
        seen_keys, seen_values = (
            (table[:, runs[0]] if len(runs) == 1 else torch.cat([table[:, run] for run in runs], dim=1)).unsqueeze(0)
            for table in (keys, values)
        )
        found.append(
            scaled_dot_product_attention(
                own, seen_keys, seen_values, attn_mask=block.mask, is_causal=block.mask is None, scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        )  # fmt: skip
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


def _runs(starts: Sequence[int], segments: Sequence[int]) -> list[slice]:
    """The nodes of segments, neighbours joined."""
    runs: list[slice] = []
    for segment in segments:
        if runs and runs[-1].stop == starts[segment]:
            runs[-1] = slice(runs[-1].start, starts[segment + 1])
        else:
            runs.append(slice(starts[segment], starts[segment + 1]))
    return runs


def _joined(pieces: Sequence[Tensor], which: Sequence[int]) -> Tensor:
    return pieces[which[0]] if len(which) == 1 else torch.cat([pieces[s] for s in which], dim=2)


def why_not(model: Any) -> str | None:
    """Why a model must go row by row, or None: its attention, positions or dropout depend on more than ancestors."""
    config = model.config.get_text_config(decoder=True)
    if str(model.config._attn_implementation) != "sdpa":
        return f"its attention is {model.config._attn_implementation}, not sdpa"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"not all of its layers attend to the whole past ({', '.join(sorted(kinds))})"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"it attends through a window of {config.sliding_window} tokens"
    if getattr(config, "attention_dropout", 0.0):
        return "it has dropout in its attention"
    ropes = getattr(config, "rope_parameters", None) or {}
    kind = ropes.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"its positions ({kind}) depend on the length of the row"
    return None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
