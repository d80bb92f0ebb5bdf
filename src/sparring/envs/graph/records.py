"""The records of the graph room: nodes, triples, queries, tasks, and the facts that rewards are computed from."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Kind = Literal["path", "set", "count", "intersection"]
"""One entity at the end of a path; all of them; how many; those at the end of two paths."""
KINDS: tuple[Kind, ...] = ("path", "set", "count", "intersection")


def canonical_text(text: str) -> str:
    """An id, a relation or an answer as it is compared: NFC, white space (also NBSP) collapsed. Case and dots stay.

    >>> canonical_text("  Apex\\u00a0 Inc. ")
    'Apex Inc.'
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


class Triple(NamedTuple):
    """An edge; two edges with the same triple are one."""

    src: str
    rel: str
    dst: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node. ``name`` is for people; tasks go by ``id``.

    >>> Node(id="user_3", type="user", name="Person 3").type
    'user'
    """

    id: str
    type: str
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Hop:
    """One step along a relation, or against it.

    >>> str(Hop(relation="works_at", inverse=True))
    '^works_at'
    """

    relation: str
    inverse: bool = False

    def __str__(self) -> str:
        return f"^{self.relation}" if self.inverse else self.relation


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A question in symbols; two queries that are equal are the same task.

    >>> Query(kind="path", start="a", hops=(Hop(relation="r"),)).length
    1
    """

    kind: Kind
    start: str
    hops: tuple[Hop, ...]
    """1 to 6."""
    other_start: str = ""
    """intersection: where the second path begins."""
    other_hops: tuple[Hop, ...] = ()

    @property
    def length(self) -> int:
        """Hops of the longer path."""
        return max(len(self.hops), len(self.other_hops))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A question with its exact answer and the evidence for it. The answer is in no observation.

    >>> Task(id="t", query=Query(kind="path", start="a", hops=(Hop(relation="r"),)), question="a r",
    ...     answer=("b",), evidence=(Triple("a", "r", "b"),)).answer
    ('b',)
    """

    id: str
    query: Query
    question: str
    answer: tuple[str, ...]
    """Sorted; for a count the number as text."""
    evidence: tuple[Triple, ...]
    """path: one derivation, in order; else every edge on a way to an answer, sorted."""
    alternatives: tuple[tuple[str, ...], ...] = ()
    """Answers that are right too, each a whole set: MetaQA accepts any one of those that it lists."""

    def accepts(self, answer: tuple[str, ...] | None) -> bool:
        """Whether the set of answers is exactly right."""
        if answer is None:
            return False
        given = tuple(sorted(set(answer)))
        return given == self.answer or given in self.alternatives


class Code(StrEnum):
    """What can be wrong with a generator's completion."""

    NO_JSON = "no_json"
    INVALID_JSON = "invalid_json"
    TRUNCATED_JSON = "truncated_json"
    SCHEMA = "schema"
    NOT_FINITE = "not_finite"
    NOT_TEXT = "not_text"
    MISSING_QUESTION = "missing_question"
    MISSING_ANSWER = "missing_answer"
    MISSING_EDGES = "missing_edges"
    TOO_MANY_EDGES = "too_many_edges"
    TOO_MANY_HOPS = "too_many_hops"
    TOO_MANY_NODES = "too_many_nodes"
    REPEATED_EDGE = "repeated_edge"
    UNSEEN_NODE = "unseen_node"
    UNSEEN_EDGE = "unseen_edge"
    NON_CONTIGUOUS = "non_contiguous"
    EXTRA_EDGE = "extra_edge"
    MISSING_EDGE = "missing_edge"
    QUERY_MISMATCH = "query_mismatch"
    CYCLE = "cycle"
    NO_ANSWER = "no_answer"
    WRONG_ANSWER = "wrong_answer"
    AMBIGUOUS_ANSWER = "ambiguous_answer"
    QUESTION_MISMATCH = "question_mismatch"
    ANSWER_LEAKAGE = "answer_leakage"
    TRACE_UNKNOWN_TOOL = "trace_unknown_tool"
    TRACE_WRONG_CALL = "trace_wrong_call"
    TRACE_WRONG_OUTPUT = "trace_wrong_output"
    TRACE_INCOMPLETE = "trace_incomplete"
    FABRICATED_GRAPH = "fabricated_graph"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, and where.

    >>> Finding(code=Code.UNSEEN_EDGE, index=1, field="supporting_edges").code.value
    'unseen_edge'
    """

    code: Code
    field: str
    """The key of the completion."""
    index: int | None = None
    """Of the offending call or edge, from 0."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """Work of sub-agents as the runtime measured it; what a reply says of itself is never in here.

    >>> Telemetry(spawned=2, finished=1, critical_steps=3, breadth=2, depth=1).finished
    1
    """

    spawned: int
    finished: int
    critical_steps: int
    breadth: int
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFacts:
    """What came of one attempt at a task."""

    parsed: bool
    """The reply was read strictly as an answer."""
    correct: bool
    """The set of answers is exactly right."""
    evidence_f1: float
    """Of all edges that the reply named against the evidence, in [0, 1]; edges that do not exist count as wrong."""
    steps: int
    """Turns used, from 1."""
    max_steps: int
    telemetry: Telemetry | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorFacts:
    """What came of one completion of the generator. Nothing in here depends on what earlier steps have seen."""

    query: Query | None
    """None when it is not valid."""
    stage: int
    """How far it got: 0 no JSON, 1 readable, 2 its edges exist, 3 they chain, 4 the answer is right, 5 valid."""
    solved: int
    """Attempts of the answerer, under its own prompt and with the evidence, that were right."""
    attempts: int
    guess_chance: float
    """Chance of the best guess that knows the question's relations alone, in [0, 1]."""


STAGES = 5
"""``GeneratorFacts.stage`` of a valid completion."""
