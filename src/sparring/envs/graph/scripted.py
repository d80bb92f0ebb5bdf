"""Scripted players of both roles, and the baselines that an answerer must beat.

A player gets what a model is shown: edges in their order, the question's symbols, the wanted length. ``care`` is the share of
replies that are right; the others make the mistakes that models make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.prompts import answer_json, completion_json
from sparring.envs.graph.records import Hop, Query, Triple
from sparring.envs.graph.solver import derivation, entities, evidence, solve
from sparring.envs.graph.text import question_text


def scripted_answer(edges: Sequence[Triple], query: Query, rng: Random, *, care: float) -> str:
    """A reply of an answerer who sees these edges."""
    if rng.random() >= care:
        return _careless_answer(edges, query, rng)
    graph = KnowledgeGraph(edges)
    found = entities(graph, query)
    if query.kind != "path":
        return answer_json(solve(graph, query), sorted(evidence(graph, query)))
    way = derivation(graph, query, next(iter(found))) if len(found) == 1 else None
    return _careless_answer(edges, query, rng) if way is None else answer_json(tuple(found), way)


def _careless_answer(edges: Sequence[Triple], query: Query, rng: Random) -> str:
    """As many edges as hops, of which the first is right half of the time and the others are any."""
    way = [rng.choice(list(edges)) for _ in range(max(1, len(query.hops)))]
    first = [edge for edge in edges if edge.src == query.start and edge.rel == query.hops[0].relation]
    if first and rng.random() < 0.5:
        way[0] = first[0]
    return answer_json((way[-1].dst,), tuple(way))


def scripted_task(packet: Sequence[Triple], hops: int, rng: Random, *, care: float, full: bool, draws: bool) -> str:
    """A completion of a generator who sees this part of the graph; who draws shows some of it besides."""
    ways = [way for edge in packet for way in _chains(packet, (edge,), hops)]
    if not ways:
        ways = [(edge,) for edge in packet]
    way = rng.choice(ways)
    answer = way[-1].dst
    if rng.random() >= care:
        way, answer = _spoilt(packet, way, rng)
    query = Query(kind="path", start=way[0].src, hops=tuple(Hop(relation=edge.rel) for edge in way))
    drawn = sorted({*way, *rng.sample(list(packet), len(packet) // 2)}) if draws else ()
    return completion_json(question_text(query, full=full), answer, way, drawn)


def _chains(packet: Sequence[Triple], way: tuple[Triple, ...], hops: int) -> list[tuple[Triple, ...]]:
    if len(way) == hops:
        return [way]
    met = {way[0].src, *(edge.dst for edge in way)}
    onward = [edge for edge in packet if edge.src == way[-1].dst and edge.dst not in met]
    return [longer for edge in onward for longer in _chains(packet, (*way, edge), hops)]


def _spoilt(packet: Sequence[Triple], way: tuple[Triple, ...], rng: Random) -> tuple[tuple[Triple, ...], str]:
    """A chain that breaks, an edge that is not there, or the answer of another edge."""
    kind = rng.randrange(3)
    if kind == 0:
        way = (*way[:-1], rng.choice(list(packet)))
    elif kind == 1:
        last = way[-1]
        way = (*way[:-1], Triple(last.src, last.rel, rng.choice(list(packet)).dst))
    return way, rng.choice(list(packet)).dst if kind == 2 else way[-1].dst


# ------------------------------------------------------------------------------------------------------------ baselines


def second_edge(edges: Sequence[Triple], query: Query, rng: Random) -> tuple[str, ...]:
    """The target of the second edge shown: what the published model had learned."""
    return (edges[min(1, len(edges) - 1)].dst,)


def random_node(edges: Sequence[Triple], query: Query, rng: Random) -> tuple[str, ...]:
    """Any node shown."""
    return (rng.choice(sorted({end for edge in edges for end in (edge.src, edge.dst)})),)


def majority(edges: Sequence[Triple], query: Query, rng: Random) -> tuple[str, ...]:
    """The most frequent target of the question's last relation among the edges shown; of any, where there is none."""
    last = query.hops[-1].relation
    targets = [edge.dst for edge in edges if edge.rel == last] or [edge.dst for edge in edges]
    counts = Counter(targets)
    return (min(counts, key=lambda node: (-counts[node], node)),)


def symbolic(edges: Sequence[Triple], query: Query, rng: Random) -> tuple[str, ...]:
    """The solver on the edges shown: the ceiling."""
    return solve(KnowledgeGraph(edges), query)


BASELINES = {"random": random_node, "majority": majority, "second_edge": second_edge, "solver": symbolic}
