"""The exact answer of a query, the evidence for it, and which tasks a graph holds.

Semantics: a path is relational composition. From the set {start}, each hop goes to all nodes that an edge of its relation
leads to (or comes from, for an inverse hop); walks may meet a node twice. A task's own derivation may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Hop, Kind, Query, Task, Triple
from sparring.envs.graph.text import question_text

MOST_HOPS = 6


def follow(graph: KnowledgeGraph, node: str, hop: Hop) -> list[tuple[str, Triple]]:
    """(next node, edge) of every edge that a hop may take from a node."""
    if hop.inverse:
        return [(edge.src, edge) for edge in graph.in_edges(node) if edge.rel == hop.relation]
    return [(edge.dst, edge) for edge in graph.out_edges(node) if edge.rel == hop.relation]


def layers(graph: KnowledgeGraph, start: str, hops: Sequence[Hop]) -> list[frozenset[str]]:
    """The nodes reached after 0, 1, ... hops."""
    found = [frozenset({start} if start in graph.nodes else ())]
    for hop in hops:
        found.append(frozenset(after for node in found[-1] for after, _ in follow(graph, node, hop)))
    return found


def reached(graph: KnowledgeGraph, start: str, hops: Sequence[Hop]) -> frozenset[str]:
    """The nodes at the end of a path."""
    return layers(graph, start, hops)[-1]


def entities(graph: KnowledgeGraph, query: Query) -> frozenset[str]:
    """What a query finds, before it is counted."""
    found = reached(graph, query.start, query.hops)
    if query.kind == "intersection":
        found &= reached(graph, query.other_start, query.other_hops)
    return found


def solve(graph: KnowledgeGraph, query: Query) -> tuple[str, ...]:
    """The exact answer: the entities, sorted; or their number as text."""
    found = entities(graph, query)
    return (str(len(found)),) if query.kind == "count" else tuple(sorted(found))


def edges_to(graph: KnowledgeGraph, start: str, hops: Sequence[Hop], targets: frozenset[str]) -> frozenset[Triple]:
    """Every edge that lies on a walk along the hops from the start to a target."""
    forward = layers(graph, start, hops)
    wanted, edges = targets & forward[-1], set[Triple]()
    for before, hop in zip(reversed(forward[:-1]), reversed(hops), strict=True):
        steps = [(node, edge) for node in before for after, edge in follow(graph, node, hop) if after in wanted]
        edges |= {edge for _, edge in steps}
        wanted = frozenset(node for node, _ in steps)
    return frozenset(edges)


def evidence(graph: KnowledgeGraph, query: Query) -> frozenset[Triple]:
    """Every edge on a way to an answer."""
    targets = entities(graph, query)
    found = edges_to(graph, query.start, query.hops, targets)
    if query.kind == "intersection":
        found |= edges_to(graph, query.other_start, query.other_hops, targets)
    return found


def derivation(graph: KnowledgeGraph, query: Query, target: str) -> tuple[Triple, ...] | None:
    """The first way (in sorted order) to a target that meets no node twice, in order; None where there is none."""

    def walk(node: str, at: int, met: frozenset[str]) -> tuple[Triple, ...] | None:
        if at == len(query.hops):
            return () if node == target else None
        for after, edge in sorted(follow(graph, node, query.hops[at])):
            if after not in met and (rest := walk(after, at + 1, met | {after})) is not None:
                return (edge, *rest)
        return None

    return walk(query.start, 0, frozenset({query.start}))


def derivations(graph: KnowledgeGraph, query: Query) -> int:
    """In how many ways the entities are reached (walks along the first path)."""
    counts = Counter({query.start: 1})
    for hop in query.hops:
        further: Counter[str] = Counter()
        for node, ways in counts.items():
            for after, _ in follow(graph, node, hop):
                further[after] += ways
        counts = further
    found = entities(graph, query)
    return sum(ways for node, ways in counts.items() if node in found)


def guess_chance(graph: KnowledgeGraph, query: Query) -> float:
    """How often the best fixed guess is right, over all starts from which the same relations lead anywhere.

    It stands for a reader who knows the question's relations and no edge. Never below 1 / (number of such starts).
    """
    starts = [query.start]
    if query.kind != "intersection":
        starts = [node for node in graph.nodes if reached(graph, node, query.hops)]
        answers = Counter(solve(graph, _from(query, node)) for node in starts)
    else:
        # Only the first start is varied: the question names the second.
        starts = [node for node in graph.nodes if entities(graph, _from(query, node))]
        answers = Counter(solve(graph, _from(query, node)) for node in starts)
    return max(answers.values()) / len(starts) if starts else 1.0


def _from(query: Query, start: str) -> Query:
    return Query(
        kind=query.kind, start=start, hops=query.hops, other_start=query.other_start, other_hops=query.other_hops
    )


# --------------------------------------------------------------------------------------------------------------- tasks


def make_task(graph: KnowledgeGraph, query: Query, *, id: str, full: bool = True) -> Task | None:
    """The task of a query, or None where it has no answer, an ambiguous one, or one that its question tells."""
    found = entities(graph, query)
    if not found or (query.kind == "path" and len(found) != 1) or (query.kind == "set" and len(found) < 2):
        return None
    if query.kind == "path":
        way = derivation(graph, query, next(iter(found)))
        if way is None:
            return None
        edges = way
    else:
        edges = tuple(sorted(evidence(graph, query)))
        if {query.start, query.other_start} & found:
            return None
    return Task(
        id=id, query=query, question=question_text(query, full=full), answer=solve(graph, query), evidence=edges
    )


def random_query(graph: KnowledgeGraph, rng: Random, *, kind: Kind, hops: int, inverse: bool = True) -> Query | None:
    """A query along a random walk that meets no node twice, or None where the walk got stuck."""
    way = _random_walk(graph, rng, rng.choice(list(graph.nodes)), hops, inverse=inverse)
    if way is None:
        return None
    steps, nodes = way
    if kind != "intersection":
        return Query(kind=kind, start=nodes[0], hops=steps)
    back = _random_walk(graph, rng, nodes[-1], rng.randint(1, hops), inverse=True)
    if back is None:
        return None
    against = tuple(Hop(relation=hop.relation, inverse=not hop.inverse) for hop in reversed(back[0]))
    other = Query(kind="intersection", start=nodes[0], hops=steps, other_start=back[1][-1], other_hops=against)
    return None if other.other_start == other.start else other


def _random_walk(
    graph: KnowledgeGraph, rng: Random, start: str, hops: int, *, inverse: bool
) -> tuple[tuple[Hop, ...], list[str]] | None:
    nodes, steps = [start], list[Hop]()
    for _ in range(hops):
        here = nodes[-1]
        onward = [(Hop(relation=edge.rel), edge.dst) for edge in graph.out_edges(here)]
        if inverse:
            onward += [(Hop(relation=edge.rel, inverse=True), edge.src) for edge in graph.in_edges(here)]
        onward = [(hop, after) for hop, after in onward if after not in nodes]
        if not onward:
            return None
        hop, after = rng.choice(onward)
        steps.append(hop)
        nodes.append(after)
    return tuple(steps), nodes


def random_tasks(
    graph: KnowledgeGraph, rng: Random, count: int, *, kinds: Sequence[Kind] = ("path",), hops: Sequence[int],
    inverse: bool = False, full: bool = True, prefix: str = "task", attempts: int = 200,
) -> list[Task]:  # fmt: skip
    """Up to ``count`` distinct tasks at random, hop counts and kinds in turn; fewer where the graph holds no more."""
    found: dict[Query, Task] = {}
    for number in range(count):
        for _ in range(attempts):
            kind, length = kinds[number % len(kinds)], hops[(number // len(kinds)) % len(hops)]
            query = random_query(graph, rng, kind=kind, hops=length, inverse=inverse)
            if query is None or query in found:
                continue
            task = make_task(graph, query, id=f"{prefix}_{len(found)}", full=full)
            if task is not None:
                found[query] = task
                break
    return list(found.values())


def path_queries(graph: KnowledgeGraph, max_hops: int, *, inverse: bool = False) -> Iterator[Query]:
    """Every (start, relations) with exactly one answer and a derivation that meets no node twice, of 1 to
    ``max_hops`` hops."""
    for start in graph.nodes:
        stack: list[tuple[Hop, ...]] = [()]
        while stack:
            hops = stack.pop()
            ends = reached(graph, start, hops)
            if hops and len(ends) == 1:
                query = Query(kind="path", start=start, hops=hops)
                if derivation(graph, query, next(iter(ends))) is not None:
                    yield query
            if len(hops) < max_hops:
                onward = {Hop(relation=edge.rel) for node in ends for edge in graph.out_edges(node)}
                if inverse:
                    onward |= {Hop(relation=edge.rel, inverse=True) for node in ends for edge in graph.in_edges(node)}
                stack += [(*hops, hop) for hop in sorted(onward)]


def task_budget(graph: KnowledgeGraph, max_hops: int, *, inverse: bool = False, most: int = 100_000) -> dict[int, int]:
    """Distinct unambiguous path tasks by number of hops; counting stops at ``most`` in all."""
    counts: Counter[int] = Counter(dict.fromkeys(range(1, max_hops + 1), 0))
    for number, query in enumerate(path_queries(graph, max_hops, inverse=inverse)):
        if number == most:
            break
        counts[query.length] += 1
    return dict(counts)


def is_simple(start: str, edges: Sequence[Triple]) -> bool:
    """Whether edges that chain forward from ``start`` meet no node twice."""
    nodes = [start, *(edge.dst for edge in edges)]
    return all(a.dst == b.src for a, b in pairwise(edges)) and len(set(nodes)) == len(nodes)
