"""What the two roles are shown, as text; brief for models that were warmed up on it, full for all others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Query, Task, Triple
from sparring.envs.graph.text import edge_line

ANSWERER_FULL = (
    "You answer questions about a knowledge graph. Each line is an edge: source, relation, target. A relation with ^ is "
    "followed backwards. Reply with one JSON object and nothing else: "
    '{"supporting_edges": [[source, relation, target], ...], "answer": the target you reach}. Name the edges that you '
    "follow, in order. Where several entities are right, answer with a list of all of them; where a number is asked, with "
    "the number."
)
GENERATOR_FULL = (
    "You set tasks about a knowledge graph. Each line is an edge: source, relation, target. Choose a path along the edges, "
    "of as many hops as you are asked for, that leads to exactly one entity, and ask for it. Reply with one JSON object and "
    'nothing else: {"supporting_edges": [[source, relation, target], ...], "answer": last target, "question": "If you '
    'start at SOURCE and follow the relation path RELATION -> RELATION, which entity do you reach after 2 hops?", '
    '"task_type": "path"}.'
)
GENERATOR_DRAWS_FULL = (
    ' Add "canonical_graph": {"nodes": [...], "edges": [[source, relation, target], ...]}: the edges that a solver is to '
    "see in any case, yours among them, and the nodes that they join; leave out what you like, add nothing."
)
ANSWERER_BRIEF, GENERATOR_BRIEF, GENERATOR_DRAWS_BRIEF = "Answer.", "Ask.", "Ask and draw."


def context_of(
    graph: KnowledgeGraph, task: Task, rng: Random, *, edges: int, also: Sequence[Triple] = ()
) -> tuple[Triple, ...]:
    """What an answerer is shown: all of the evidence among distractors, in an order that tells nothing.

    Up to half of the distractors end as the evidence does (its last relation), and half of the rest continue from its nodes
    or use its relations, so that neither a node nor a relation alone gives the answer away; and no place in the list is
    likelier than another. ``also`` are edges that are shown in any case (of a canonical graph that the generator drew).
    """
    last = task.evidence[-1].rel
    evidence = frozenset(task.evidence)
    ends = {end for edge in evidence for end in (edge.src, edge.dst)}
    relations = {edge.rel for edge in evidence}
    evidence |= frozenset(also)
    others = [edge for edge in graph.triples if edge not in evidence]
    near = [edge for edge in others if edge.rel in relations or edge.src in ends]
    room = max(0, edges - len(evidence))
    alike = [edge for edge in others if edge.rel == last]
    chosen = set(rng.sample(alike, min(len(alike), -(-room // 2))))
    near = [edge for edge in near if edge not in chosen]
    chosen |= set(rng.sample(near, min(len(near), (room - len(chosen)) // 2)))
    rest = [edge for edge in others if edge not in chosen]
    chosen |= set(rng.sample(rest, min(len(rest), room - len(chosen))))
    shown = sorted(evidence | chosen)
    rng.shuffle(shown)
    return tuple(shown)


def packet_of(
    graph: KnowledgeGraph, query: Query, way: Sequence[Triple], rng: Random, *, edges: int
) -> tuple[Triple, ...]:
    """What a generator is shown: a part of the graph that holds at least one task of the wanted length, shuffled."""
    nodes = [query.start, *(edge.dst for edge in way)]
    near = [e for node in nodes for e in (*graph.out_edges(node), *graph.in_edges(node)) if e not in way]
    near = list(dict.fromkeys(near))
    chosen = set(way) | set(rng.sample(near, min(len(near), max(0, edges - len(way)))))
    rest = [edge for edge in graph.triples if edge not in chosen]
    chosen |= set(rng.sample(rest, min(len(rest), max(0, edges - len(chosen)))))
    shown = sorted(chosen)
    rng.shuffle(shown)
    return tuple(shown)


def answerer_prompt(question: str, context: Sequence[Triple], *, full: bool) -> tuple[str, str]:
    """(system, user)."""
    lines = "\n".join(map(edge_line, context))
    return (ANSWERER_FULL if full else ANSWERER_BRIEF), f"{lines}\n{question}"


def generator_prompt(packet: Sequence[Triple], hops: int, *, full: bool, draws: bool) -> tuple[str, str]:
    """(system, user). ``draws`` asks for a canonical graph too."""
    lines = "\n".join(map(edge_line, packet))
    if full:
        return GENERATOR_FULL + (GENERATOR_DRAWS_FULL if draws else ""), f"{lines}\nHops: {hops}"
    return (GENERATOR_DRAWS_BRIEF if draws else GENERATOR_BRIEF), f"{lines}\n{hops}"


def answer_json(answer: Sequence[str], edges: Sequence[Triple]) -> str:
    """An answerer's reply: the evidence first, so that a model walks before it answers."""
    said = answer[0] if len(answer) == 1 else list(answer)
    return json.dumps(
        {"supporting_edges": [list(edge) for edge in edges], "answer": said}, ensure_ascii=False, separators=(",", ":")
    )


def completion_json(question: str, answer: str, edges: Sequence[Triple], drawn: Sequence[Triple] = ()) -> str:
    """A generator's reply for a path; ``drawn`` are the edges of a canonical graph."""
    said: dict[str, object] = {
        "supporting_edges": [list(edge) for edge in edges], "answer": answer, "question": question, "task_type": "path",
    }  # fmt: skip
    if drawn:
        nodes = sorted({end for edge in drawn for end in (edge.src, edge.dst)})
        said["canonical_graph"] = {"nodes": nodes, "edges": [list(edge) for edge in drawn]}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))
