"""Token sequences as a tree in which every distinct prefix stands once, and the tree cut into packs.

::

    rows          tree (nodes in depth-first order)       segments
    a b c d       0 a                                     0: a b      (nodes 0-1)
    a b c e       1   b                                   1:  c       (2), parent 0
    a b f         2     c                                 2:   d      (3), parent 1
                  3       d                               3:   e      (4), parent 1
                  4       e                               4:  f       (5), parent 0
                  5     f

A *node* is a distinct prefix; a *segment* is a run of nodes without a branch. What stands below a segment is one range
of nodes, because the order is depth-first. No torch in here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of nodes without a branch.

    >>> Segment(start=2, stop=5, parent=0, depth=2).length
    3
    """

    start: int
    """Its first node."""
    stop: int
    """One past its last node."""
    parent: int | None
    """Index of the segment it continues, always smaller than its own; None at a root."""
    depth: int
    """Position of its first token in every row that holds it, from 0."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """Rows merged; ``expand(merge(rows)) == rows``.

    >>> tree = merge([(1, 2, 3), (1, 2, 4)])
    >>> tree.size, [segment.length for segment in tree.segments]
    (4, [2, 1, 1])
    """

    token_ids: NDArray[np.int64]
    """Shape (N,): the token of each node."""
    depths: NDArray[np.int64]
    """Shape (N,): its position in its rows."""
    segments: tuple[Segment, ...]
    """In order of nodes, parents before children."""
    row_ends: tuple[int, ...]
    """For each row, the segment that its last token lies in; -1 for an empty row."""
    row_lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Distinct prefixes."""
        return len(self.token_ids)

    def ancestors(self, segment: int) -> list[int]:
        """Indices of the segments above, root first."""
        found = []
        above = self.segments[segment].parent
        while above is not None:
            found.append(above)
            above = self.segments[above].parent
        return found[::-1]

    def nodes(self, row: int) -> NDArray[np.int64]:
        """Shape (length of the row,): the node of each of its positions."""
        end = self.row_ends[row]
        if end < 0:
            return np.zeros(0, dtype=np.int64)
        path = [*self.ancestors(end), end]
        runs = [np.arange(self.segments[s].start, self.segments[s].stop) for s in path]
        return np.concatenate(runs)[: self.row_lengths[row]]


def shared_length(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix.

    >>> shared_length((1, 2, 3), (1, 2, 4, 5))
    2
    """
    length = min(len(a), len(b))
    if tuple(a[:length]) == tuple(b[:length]):
        return length
    low, high = 0, length  # a[:low] is shared, a[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if tuple(a[low:middle]) == tuple(b[low:middle]):
            low = middle
        else:
            high = middle
    return low


def merge(rows: Sequence[Tokens]) -> PrefixTree:
    """The tree of rows; linear in their tokens, but for sorting them. Rows may repeat, and be prefixes of one another."""
    order = sorted(range(len(rows)), key=lambda i: tuple(rows[i]))
    tokens: list[int] = []
    depths: list[int] = []
    path: list[int] = []  # node at each depth of the row before
    cuts: dict[int, int | None] = {}  # first node of a segment -> the node it continues
    last_nodes = [-1] * len(rows)
    before: Tokens = ()
    for index in order:
        row = rows[index]
        shared = shared_length(before, row)
        before = row
        if shared < len(row):
            start = len(tokens)
            above = path[shared - 1] if shared else None
            if above is None or above + 1 < start:  # else the row goes on where the last one ended: no branch
                cuts[start] = above
            if above is not None and above + 1 < start:
                cuts.setdefault(above + 1, above)  # what went on there before is a child too
            del path[shared:]
            path.extend(range(start, start + len(row) - shared))
            tokens.extend(row[shared:])
            depths.extend(range(shared, len(row)))
        if row:
            last_nodes[index] = path[len(row) - 1]
    starts = sorted(cuts)
    segment_of = np.zeros(len(tokens), dtype=np.int64)
    segments: list[Segment] = []
    for number, (start, stop) in enumerate(pairwise([*starts, len(tokens)])):
        segment_of[start:stop] = number
        above = cuts[start]
        parent = None if above is None else int(segment_of[above])
        segments.append(Segment(start=start, stop=stop, parent=parent, depth=depths[start]))
    return PrefixTree(
        token_ids=np.array(tokens, dtype=np.int64), depths=np.array(depths, dtype=np.int64), segments=tuple(segments),
        row_ends=tuple(int(segment_of[node]) if node >= 0 else -1 for node in last_nodes),
        row_lengths=tuple(len(row) for row in rows),
    )  # fmt: skip


def expand(tree: PrefixTree) -> list[tuple[int, ...]]:
    """The rows a tree was made of."""
    return [tuple(tree.token_ids[tree.nodes(row)].tolist()) for row in range(len(tree.row_lengths))]


def distinct_prefixes(rows: Sequence[Tokens]) -> int:
    """Nodes of the rows' tree, without making it.

    >>> distinct_prefixes([(1, 2, 3), (1, 2, 4), (1, 2)])
    4
    """
    ordered = sorted(tuple(row) for row in rows)
    return sum(len(row) - shared_length(before, row) for before, row in pairwise([(), *ordered]))


def corresponding(tree: PrefixTree, other: PrefixTree) -> NDArray[np.int64]:
    """Shape (N,): the node of ``other`` that stands for the same prefix as each node of ``tree``, or -1; linear.

    >>> corresponding(merge([(1, 2, 3)]), merge([(1, 2), (5,)])).tolist()
    [0, 1, -1]
    """
    known: dict[tuple[int, int], int] = {}
    for node, (above, token) in enumerate(zip(_parents(other), other.token_ids.tolist(), strict=True)):
        known[above, token] = node
    found = [-1] * tree.size
    for node, (above, token) in enumerate(zip(_parents(tree), tree.token_ids.tolist(), strict=True)):
        mine = found[above] if above >= 0 else -1
        if above < 0 or mine >= 0:
            found[node] = known.get((mine, token), -1)
    return np.array(found, dtype=np.int64)


def _parents(tree: PrefixTree) -> list[int]:
    """The node that each node continues; -1 at a root."""
    above = list(range(-1, tree.size - 1))
    for segment in tree.segments:
        above[segment.start] = -1 if segment.parent is None else tree.segments[segment.parent].stop - 1
    return above


def cut(tree: PrefixTree, places: Sequence[int]) -> PrefixTree:
    """The same tree with a segment that begins at each of these nodes.

    >>> [segment.length for segment in cut(merge([(1, 2, 3, 4)]), [1]).segments]
    [1, 3]
    """
    wanted = sorted(set(places) - {segment.start for segment in tree.segments})
    if not wanted:
        return tree
    made: list[Segment] = []
    last_part: dict[int, int] = {}
    for number, segment in enumerate(tree.segments):
        parent = None if segment.parent is None else last_part[segment.parent]
        within = wanted[bisect_left(wanted, segment.start) : bisect_left(wanted, segment.stop)]
        for start, stop in pairwise([segment.start, *within, segment.stop]):
            made.append(Segment(start=start, stop=stop, parent=parent, depth=segment.depth + start - segment.start))
            parent = len(made) - 1
        last_part[number] = len(made) - 1
    starts = [segment.start for segment in made]
    ends = []
    for row, end in enumerate(tree.row_ends):
        segment = tree.segments[end]
        node = segment.start + tree.row_lengths[row] - segment.depth - 1
        ends.append(end if end < 0 else bisect_right(starts, node) - 1)
    return PrefixTree(
        token_ids=tree.token_ids, depths=tree.depths, segments=tuple(made), row_ends=tuple(ends),
        row_lengths=tree.row_lengths,
    )  # fmt: skip


def packs(rows: Sequence[Tokens], max_nodes: int) -> list[list[int]]:
    """Indices of rows, in the order of their tokens, cut so that the tree of each pack has at most ``max_nodes`` nodes.

    What packs share is computed in each of them. A row longer than the budget is a pack of its own.

    >>> packs([(1, 2, 3), (4, 5), (1, 2, 4)], 4)
    [[0, 2], [1]]
    """
    found: list[list[int]] = []
    size = 0
    before: Tokens = ()
    for index in sorted(range(len(rows)), key=lambda i: tuple(rows[i])):
        row = rows[index]
        added = len(row) - shared_length(before, row)
        if not found or size + added > max_nodes:
            found.append([])
            size, added = 0, len(row)
        found[-1].append(index)
        size += added
        before = row
    return found
