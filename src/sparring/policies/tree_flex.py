"""Attention over a whole prefix tree in one fused kernel, for GPUs: the learner's pass there.

Nodes are in depth-first order, so what stands below a node is one range, and node k is an ancestor of node q (or q itself)
exactly if ``k <= q < end[k]``. FlexAttention turns that into blocks of 128 x 128, skips the empty ones and never writes
the scores down. torch gives no gradients for it on a CPU, where blocks of segments (``tree_attention``) do the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sparring.tokens.prefix_tree import PrefixTree


def subtree_ends(tree: PrefixTree) -> NDArray[np.int64]:
    """Shape (N,): one past the last node that stands below each node.

    >>> from sparring.tokens.prefix_tree import merge
    >>> subtree_ends(merge([(1, 2, 3), (1, 2, 4)])).tolist()
    [4, 4, 3, 4]
    """
    ends = [segment.stop for segment in tree.segments]
    for number in reversed(range(len(ends))):
        parent = tree.segments[number].parent
        if parent is not None:
            ends[parent] = max(ends[parent], ends[number])
    return np.repeat(np.array(ends, dtype=np.int64), [segment.length for segment in tree.segments])


def block_mask(tree: PrefixTree, device: torch.device) -> BlockMask:
    """Who attends to whom, as FlexAttention takes it."""
    ends = torch.from_numpy(subtree_ends(tree)).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return create_block_mask(sees, None, None, tree.size, tree.size, device=device)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Query (1, heads, N, d), key and value with their own heads; returns (1, heads, N, d)."""
    kernel = _compiled() if query.device.type == "cuda" else flex_attention
    found: Tensor = kernel(query, key, value, block_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1])
    return found


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
