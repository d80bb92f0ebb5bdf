"""The replay validator: every claim of a completion against the graph, each fault with its own code and place.

What a task is: its query (said, or read off the edges), whose exact answer the solver knows. A trace, where one is given,
must be the canonical one, call by call, outputs included. Whether a task is *new* is no part of validity: the task pool
asks that (``TaskPool.admit``), the reward never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparring.envs.graph.completion import Call, Completion, read_completion
from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Code, Finding, Hop, Query, Task, Triple, canonical_text
from sparring.envs.graph.solver import MOST_HOPS, derivations, entities, evidence, solve
from sparring.envs.graph.text import comparable, occurrences, question_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How large a task may be.

    >>> Limits().max_hops
    6
    """

    max_hops: int = MOST_HOPS
    max_edges: int = 16
    """Supporting edges."""
    max_nodes: int = 64
    """Nodes of a canonical graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the validator found. Valid when there is a task.

    >>> Verdict(findings=(Finding(code=Code.NO_JSON, field=""),), stage=0).valid
    False
    """

    findings: tuple[Finding, ...]
    """In order of the checks."""
    stage: int
    """See ``GeneratorFacts.stage``."""
    task: Task | None = None
    completion: Completion | None = None
    unique_derivation: bool | None = None
    """Of a valid task: whether one way alone leads to its answer. Two ways to one answer are no fault."""

    @property
    def valid(self) -> bool:
        return self.task is not None

    @property
    def codes(self) -> tuple[str, ...]:
        """Sorted, each once."""
        return tuple(sorted({finding.code.value for finding in self.findings}))


def validate_text(text: str, graph: KnowledgeGraph, *, id: str, limits: Limits | None = None) -> Verdict:
    """A completion's text, read and validated. Never raises, on any text."""
    read = read_completion(text)
    if isinstance(read, tuple):
        return Verdict(findings=read, stage=int(read[0].code not in _UNREADABLE))
    return validate(read, graph, id=id, limits=limits)


_UNREADABLE = (Code.NO_JSON, Code.INVALID_JSON, Code.TRUNCATED_JSON)


def validate(completion: Completion, graph: KnowledgeGraph, *, id: str, limits: Limits | None = None) -> Verdict:
    """A completion against the graph; ``id`` names the task it becomes. Never raises."""
    limits = limits or Limits()
    findings = [*_size(completion, limits), *_edges_exist(completion, graph), *_own_graph(completion, graph)]
    stage, task, unique = 1, None, None
    exist = not any(finding.field == "supporting_edges" for finding in findings)
    query = completion.query or forward_query(completion)
    if exist:
        stage = 2
        shape = _shape(completion, graph, query, limits)
        findings += shape
        if query is not None and not shape:
            stage = 3
            wrong = _answer_is_right(completion, graph, query)
            findings += wrong
            stage += not wrong
    if query is not None:
        findings += _question_is_right(completion, query)
        if completion.trace and stage >= 3:
            findings += _trace_replays(completion, graph, query)
    if not findings and query is not None:
        stage, unique = 5, derivations(graph, query) == len(entities(graph, query))
        task = Task(
            id=id, query=query, question=completion.question, answer=solve(graph, query), evidence=completion.edges
        )
    return Verdict(findings=tuple(findings), stage=stage, task=task, completion=completion, unique_derivation=unique)


# -------------------------------------------------------------------------------------------------------- the checks


def forward_query(completion: Completion) -> Query | None:
    """The query that edges alone tell: a path along them, forwards. Other kinds must say theirs."""
    if completion.task_type in ("set", "count", "intersection"):
        return None
    hops = tuple(Hop(relation=edge.rel) for edge in completion.edges)
    return Query(kind="path", start=completion.edges[0].src, hops=hops)


def _size(completion: Completion, limits: Limits) -> Iterable[Finding]:
    if len(completion.edges) > limits.max_edges:
        yield Finding(code=Code.TOO_MANY_EDGES, field="supporting_edges", index=limits.max_edges)
    if len(completion.graph_nodes) > limits.max_nodes:
        yield Finding(code=Code.TOO_MANY_NODES, field="canonical_graph", index=limits.max_nodes)
    seen: set[Triple] = set()
    for index, edge in enumerate(completion.edges):
        if edge in seen:
            yield Finding(code=Code.REPEATED_EDGE, field="supporting_edges", index=index)
        seen.add(edge)


def _edges_exist(completion: Completion, graph: KnowledgeGraph) -> Iterable[Finding]:
    for index, edge in enumerate(completion.edges):
        missing = [end for end in (edge.src, edge.dst) if end not in graph.nodes]
        if missing:
            yield Finding(code=Code.UNSEEN_NODE, field="supporting_edges", index=index, detail=missing[0])
        elif edge not in graph:
            yield Finding(code=Code.UNSEEN_EDGE, field="supporting_edges", index=index)


def _own_graph(completion: Completion, graph: KnowledgeGraph) -> Iterable[Finding]:
    """A canonical graph may leave out, but not invent; and it must hold the evidence."""
    for index, node in enumerate(completion.graph_nodes):
        if node not in graph.nodes:
            yield Finding(code=Code.FABRICATED_GRAPH, field="canonical_graph.nodes", index=index, detail=node)
    for index, edge in enumerate(completion.graph_edges):
        if edge not in graph:
            yield Finding(code=Code.FABRICATED_GRAPH, field="canonical_graph.edges", index=index)
    if completion.graph_edges:
        for index, edge in enumerate(completion.edges):
            if edge not in completion.graph_edges:
                yield Finding(code=Code.MISSING_EDGE, field="canonical_graph.edges", index=index)


def _shape(completion: Completion, graph: KnowledgeGraph, query: Query | None, limits: Limits) -> list[Finding]:
    """Whether the edges are the evidence of the query: a chain for a path, else all edges on a way to an answer."""
    if query is None:
        return [Finding(code=Code.QUERY_MISMATCH, field="query", detail=f"a {completion.task_type} must say its query")]
    if query.length > limits.max_hops:
        return [Finding(code=Code.TOO_MANY_HOPS, field="supporting_edges", index=limits.max_hops)]
    if query.kind != "path":
        wanted = evidence(graph, query)
        given = frozenset(completion.edges)
        extra = [i for i, edge in enumerate(completion.edges) if edge not in wanted]
        found = [Finding(code=Code.EXTRA_EDGE, field="supporting_edges", index=index) for index in extra]
        return found + [
            Finding(code=Code.MISSING_EDGE, field="supporting_edges", detail=" ".join(edge))
            for edge in sorted(wanted - given)
        ]
    return _chain(completion, query)


def _chain(completion: Completion, query: Query) -> list[Finding]:
    """Edge i must go on where edge i - 1 ended, along hop i."""
    here, nodes = query.start, [query.start]
    for index, edge in enumerate(completion.edges):
        if index == len(query.hops):
            return [Finding(code=Code.EXTRA_EDGE, field="supporting_edges", index=index)]
        hop = query.hops[index]
        begin, end = (edge.dst, edge.src) if hop.inverse else (edge.src, edge.dst)
        if begin != here:
            others = {e for i, other in enumerate(completion.edges) if i != index for e in (other.src, other.dst)}
            touches = bool(others & {edge.src, edge.dst})
            code = Code.NON_CONTIGUOUS if touches else Code.EXTRA_EDGE
            return [Finding(code=code, field="supporting_edges", index=index)]
        if edge.rel != hop.relation:
            return [Finding(code=Code.QUERY_MISMATCH, field="supporting_edges", index=index)]
        if end in nodes:
            return [Finding(code=Code.CYCLE, field="supporting_edges", index=index, detail=end)]
        here = end
        nodes.append(end)
    if len(completion.edges) < len(query.hops):
        return [Finding(code=Code.MISSING_EDGE, field="supporting_edges", index=len(completion.edges))]
    return []


def _answer_is_right(completion: Completion, graph: KnowledgeGraph, query: Query) -> list[Finding]:
    found = solve(graph, query)
    given = tuple(sorted(set(completion.answer)))
    if not found or found == ("0",):
        return [Finding(code=Code.NO_ANSWER, field="query")]
    if query.kind != "count" and {query.start, query.other_start} & set(found):
        return [Finding(code=Code.CYCLE, field="answer", detail="the question names its answer")]
    if query.kind == "path" and len(found) > 1:
        others = [node for node in found if node not in given]
        return [Finding(code=Code.AMBIGUOUS_ANSWER, field="answer", detail=" ".join(others[:3]))]
    if given != found:
        return [Finding(code=Code.WRONG_ANSWER, field="answer")]
    return []


def _question_is_right(completion: Completion, query: Query) -> Iterable[Finding]:
    wanted = [question_text(query, full=full) for full in (True, False)]
    if comparable(completion.question) not in map(comparable, wanted):
        yield Finding(code=Code.QUESTION_MISMATCH, field="question")
        for answer in completion.answer:
            if occurrences(answer, completion.question) > max(occurrences(answer, text) for text in wanted):
                yield Finding(code=Code.ANSWER_LEAKAGE, field="question", detail=answer)


# --------------------------------------------------------------------------------------------------------- the trace


def canonical_trace(graph: KnowledgeGraph, query: Query, edges: tuple[Triple, ...], question: str) -> tuple[Call, ...]:
    """The trace of spec 2.4: neighbours along each edge, the path replayed, the answer chosen, the question asked.

    For kinds that are no path, ``trace_path`` is left out and the neighbours come in the order of the edges.
    """
    calls = []
    for index, edge in enumerate(edges):
        node = edge.dst if query.kind == "path" and query.hops[index].inverse else edge.src
        near = sorted({*graph.out_edges(node), *graph.in_edges(node)} if node == edge.dst else graph.out_edges(node))
        calls.append(Call(
            tool_name="enumerate_neighbors", args={"node_id": node, "hop_index": index, "expected_edge": _json(edge)},
            output={"neighbors": [_json(other) for other in near]},
        ))  # fmt: skip
    if query.kind == "path":
        path = [_json(edge) for edge in edges]
        calls.append(Call(tool_name="trace_path", args={"path": path}, output={"path": path}))
    answer = solve(graph, query)
    strategy = "path_dst" if query.kind == "path" else query.kind
    chosen: Any = answer[0] if len(answer) == 1 else list(answer)
    calls.append(Call(tool_name="select_answer", args={"strategy": strategy}, output={"answer": chosen}))
    style = {"style": "relation_path_v1"}
    calls.append(Call(tool_name="emit_question", args=style, output={"question": question}))
    return tuple(calls)


TRACE_TOOLS = frozenset({"enumerate_neighbors", "trace_path", "select_answer", "emit_question"})


def _trace_replays(completion: Completion, graph: KnowledgeGraph, query: Query) -> Iterable[Finding]:
    claimed = completion.trace or ()
    wanted = canonical_trace(graph, query, completion.edges, completion.question)
    for index, (call, right) in enumerate(zip(claimed, wanted, strict=False)):
        code: Code | None = None
        if call.tool_name not in TRACE_TOOLS:
            code = Code.TRACE_UNKNOWN_TOOL
        elif call.tool_name != right.tool_name or plain(call.args) != plain(right.args):
            code = Code.TRACE_WRONG_CALL
        elif plain(call.output) != plain(right.output):
            code = Code.TRACE_WRONG_OUTPUT
        if code is not None:
            yield Finding(code=code, field="tool_trace", index=index, detail=f"expected {right.tool_name}")
    for index in range(len(wanted), len(claimed)):
        known = claimed[index].tool_name in TRACE_TOOLS
        yield Finding(
            code=Code.TRACE_WRONG_CALL if known else Code.TRACE_UNKNOWN_TOOL, field="tool_trace", index=index,
            detail="nothing more was expected",
        )  # fmt: skip
    if len(claimed) < len(wanted):
        missing = wanted[len(claimed)].tool_name
        yield Finding(code=Code.TRACE_INCOMPLETE, field="tool_trace", index=len(claimed), detail=f"expected {missing}")


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value as it is compared: text canonical, a number as its text, an edge's confidence left out. What is
    nested deeper than any call of ours equals nothing."""
    if depth > 8:
        return None
    if isinstance(value, Mapping):
        edge = {"src", "rel", "dst"} <= set(value)
        return {str(k): plain(v, depth + 1) for k, v in value.items() if not (edge and k == "confidence")}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return canonical_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return str(int(value)) if isinstance(value, int) or value.is_integer() else str(value)
        except (ValueError, OverflowError):  # thousands of digits: equal to nothing that we expect
            return None
    return value


def _json(edge: Triple) -> dict[str, str]:
    return {"src": edge.src, "rel": edge.rel, "dst": edge.dst}


class TaskPool:
    """The tasks of a run, each query once: a known one is not admitted again, whoever asks it and however it is worded."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self.tasks: dict[Query, Task] = {}
        for task in tasks:
            self.admit(task)

    def admit(self, task: Task) -> bool:
        """Whether the task is new; if so, it is in."""
        if task.query in self.tasks:
            return False
        self.tasks[task.query] = task
        return True
