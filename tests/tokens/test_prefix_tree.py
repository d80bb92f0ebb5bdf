"""Merging rows into a tree loses nothing and keeps every distinct prefix once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.tokens.prefix_tree import (
    Segment,
    corresponding,
    cut,
    distinct_prefixes,
    expand,
    merge,
    packs,
    shared_length,
)

ROWS = st.lists(st.lists(st.integers(0, 3), max_size=9).map(tuple), max_size=12)


def prefixes(rows: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {row[:length] for row in rows for length in range(1, len(row) + 1)}


def test_the_tree_of_the_docstring() -> None:
    tree = merge([(10, 11, 12, 13), (10, 11, 12, 14), (10, 11, 15)])
    assert tree.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 2]
    assert tree.segments == (
        Segment(start=0, stop=2, parent=None, depth=0),
        Segment(start=2, stop=3, parent=0, depth=2),
        Segment(start=3, stop=4, parent=1, depth=3),
        Segment(start=4, stop=5, parent=1, depth=3),
        Segment(start=5, stop=6, parent=0, depth=2),
    )
    assert tree.ancestors(3) == [0, 1] and tree.nodes(1).tolist() == [0, 1, 2, 4]


@given(ROWS)
@settings(max_examples=400)
def test_every_distinct_prefix_once_and_all_rows_back(rows: list[tuple[int, ...]]) -> None:
    tree = merge(rows)
    assert expand(tree) == rows
    assert tree.size == len(prefixes(rows)) == distinct_prefixes(rows)
    found = {}
    for row in range(len(rows)):
        for depth, node in enumerate(tree.nodes(row).tolist()):
            assert tree.depths[node] == depth
            assert found.setdefault(node, rows[row][: depth + 1]) == rows[row][: depth + 1]
    assert len(found) == tree.size


@given(ROWS)
@settings(max_examples=400)
def test_segments_are_runs_without_a_branch(rows: list[tuple[int, ...]]) -> None:
    tree = merge(rows)
    stops = 0
    children: dict[int | None, list[int]] = {}
    for number, segment in enumerate(tree.segments):
        assert segment.start == stops and segment.length > 0
        stops = segment.stop
        assert tree.depths[segment.start : segment.stop].tolist() == list(
            range(segment.depth, segment.depth + segment.length)
        )
        children.setdefault(segment.parent, []).append(number)
        if segment.parent is not None:
            above = tree.segments[segment.parent]
            assert segment.parent < number and above.depth + above.length == segment.depth
    assert stops == tree.size
    for parent, below in children.items():
        assert len({int(tree.token_ids[tree.segments[s].start]) for s in below}) == len(below)
        assert parent is None or len(below) >= 2  # else it would be one segment


@given(ROWS, st.integers(1, 20))
@settings(max_examples=300)
def test_packs_hold_every_row_once_within_the_budget(rows: list[tuple[int, ...]], budget: int) -> None:
    found = packs(rows, budget)
    assert sorted(index for pack in found for index in pack) == list(range(len(rows)))
    for pack in found:
        assert merge([rows[i] for i in pack]).size <= budget or len(pack) == 1
    assert [i for pack in found for i in pack] == sorted(range(len(rows)), key=lambda i: rows[i])


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_shared_length(a: list[int], b: list[int]) -> None:
    length = shared_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_the_tick_of_thirty_agents() -> None:
    """30 agents of a tick: rules, team, private part, reply."""
    rows = [
        (*range(250), *(1000 + agent % 3,) * 60, *(2000 + agent,) * 120, *(3000 + agent,) * 40) for agent in range(30)
    ]
    tree = merge(rows)
    assert tree.size == 250 + 3 * 60 + 30 * 160
    assert len(tree.segments) == 1 + 3 + 30


@pytest.mark.parametrize("rows", [[], [()], [(), (1,), ()]])
def test_empty_rows(rows: list[tuple[int, ...]]) -> None:
    assert expand(merge(rows)) == rows


@given(ROWS, ROWS)
@settings(max_examples=300)
def test_corresponding_nodes_stand_for_the_same_prefix(
    rows: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> None:
    tree, other = merge(rows), merge(others)
    found = corresponding(tree, other)
    prefix = {int(other.nodes(r)[d]): row[: d + 1] for r, row in enumerate(others) for d in range(len(row))}
    for number, row in enumerate(rows):
        for depth, node in enumerate(tree.nodes(number).tolist()):
            assert prefix.get(int(found[node])) == (row[: depth + 1] if row[: depth + 1] in prefixes(others) else None)


@given(ROWS, st.data())
@settings(max_examples=300)
def test_a_cut_tree_is_the_same_with_segments_that_begin_there(
    rows: list[tuple[int, ...]], data: st.DataObject
) -> None:
    tree = merge(rows)
    places = data.draw(st.lists(st.integers(0, tree.size - 1), max_size=5)) if tree.size else []
    after = cut(tree, places)
    starts = {segment.start for segment in after.segments}
    assert expand(after) == rows and starts == {segment.start for segment in tree.segments} | set(places)
    for number, segment in enumerate(after.segments):
        assert segment.depth == after.depths[segment.start]
        assert segment.parent is None or segment.parent < number
