"""The base graph of the black-box cases, completions for it, and graphs drawn by hypothesis."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Hop, Query, Triple
from sparring.envs.graph.text import question_text
from sparring.envs.graph.validate import canonical_trace

BASE = [
    Triple("a_1", "r", "b_1"),
    Triple("b_1", "s", "c_1"),
    Triple("c_1", "t", "d_1"),
    Triple("x", "y", "z"),
]


def graph(*more: tuple[str, str, str], base: Sequence[Triple] = BASE) -> KnowledgeGraph:
    return KnowledgeGraph([*base, *(Triple(*triple) for triple in more)])


def path(start: str, *relations: str) -> Query:
    hops = tuple(Hop(relation=r.removeprefix("^"), inverse=r.startswith("^")) for r in relations)
    return Query(kind="path", start=start, hops=hops)


def document(edges: Sequence[tuple[str, str, str]] | None = None, answer: Any = None, **other: Any) -> dict[str, Any]:
    """The completion of a forward path along ``edges`` (the base task's by default); ``other`` replaces fields."""
    edges = [tuple(e) for e in (edges if edges is not None else [("a_1", "r", "b_1"), ("b_1", "s", "c_1")])]
    query = path(edges[0][0], *(rel for _, rel, _ in edges))
    made = {
        "question": question_text(query, full=True),
        "answer": edges[-1][2] if answer is None else answer,
        "task_type": "path",
        "supporting_edges": [{"src": s, "rel": r, "dst": d, "confidence": 1.0} for s, r, d in edges],
    }
    return {**made, **other}


def text(**other: Any) -> str:
    return json.dumps(document(**other), ensure_ascii=False)


def trace(g: KnowledgeGraph, edges: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    triples = tuple(Triple(*edge) for edge in edges)
    query = path(edges[0][0], *(rel for _, rel, _ in edges))
    calls = canonical_trace(g, query, triples, question_text(query, full=True))
    return [{"tool_name": c.tool_name, "args": c.args, "output": c.output} for c in calls]


def nfd(value: str) -> str:
    return unicodedata.normalize("NFD", value)


names = st.sampled_from([f"n_{i}" for i in range(7)])
relations = st.sampled_from(["r", "s", "t"])
triples = st.builds(Triple, names, relations, names)
graphs = st.lists(triples, min_size=1, max_size=18).map(KnowledgeGraph)
hop_lists = st.lists(
    st.builds(lambda r, i: Hop(relation=r, inverse=i), relations, st.booleans()), min_size=1, max_size=5
)
