"""A generator's completion, and an answerer's answer, as text: read without ever raising, with what was wrong and where.

The text may be fenced, wrapped in a list, or stand among prose with braces. Repair is not attempted: a trailing comma is
``invalid_json``, a cut object ``truncated_json``, and the raw text never becomes an answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparring.envs.graph.records import KINDS, Code, Finding, Hop, Query, Triple, canonical_text

MOST_CHARACTERS = 1 << 16
MOST_STARTS = 512
GENERATOR_KEYS = ("question", "answer", "supporting_edges", "task_type")
ANSWER_KEYS = ("answer",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a claimed tool trace. ``args`` and ``output`` are JSON values of any kind."""

    tool_name: str
    args: Any
    output: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a generator claims; canonical text throughout."""

    question: str
    answer: tuple[str, ...]
    """As given, in order; a bare value is a set of one. A number is its text."""
    task_type: str
    edges: tuple[Triple, ...]
    query: Query | None
    """Where the completion says it itself; else it follows from the edges."""
    trace: tuple[Call, ...] | None
    graph_nodes: tuple[str, ...]
    graph_edges: tuple[Triple, ...]
    """Of a canonical graph of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an answerer says.

    >>> Answer(answer=("b",), edges=()).answer
    ('b',)
    """

    answer: tuple[str, ...]
    """Sorted, each once."""
    edges: tuple[Triple, ...]


class _FormError(ValueError):
    """Carries a finding out of the reading of one field; caught in this module."""

    def __init__(self, code: Code, field: str, index: int | None = None, detail: str = "") -> None:
        super().__init__(field)
        self.finding = Finding(code=code, field=field, index=index, detail=detail[:200])


def read_completion(text: str) -> Completion | tuple[Finding, ...]:
    """A completion, or all that keeps it from being one. Never raises."""
    document = find_object(text, GENERATOR_KEYS)
    if isinstance(document, Finding):
        return (document,)
    findings: list[Finding] = []

    def field(read: Any, name: str, default: Any) -> Any:
        value = document.get(name)
        if value is None:
            return default
        try:
            return read(value, name)
        except _FormError as error:
            findings.append(error.finding)
            return default

    question = field(_text, "question", "")
    answer = field(_answer, "answer", ())
    edges = field(_edges, "supporting_edges", ())
    task_type = field(_text, "task_type", "path")
    query = field(_query, "query", None)
    trace = field(_trace, "tool_trace", None)
    nodes, drawn = field(_graph, "canonical_graph", ((), ()))
    wrong = {finding.field.partition(".")[0] for finding in findings}
    for value, name, code in (
        (question, "question", Code.MISSING_QUESTION),
        (answer, "answer", Code.MISSING_ANSWER),
        (edges, "supporting_edges", Code.MISSING_EDGES),
    ):
        if not value and name not in wrong:
            findings.append(Finding(code=code, field=name))
    if findings:
        return tuple(findings)
    return Completion(
        question=question, answer=answer, task_type=task_type, edges=edges, query=query, trace=trace, graph_nodes=nodes,
        graph_edges=drawn,
    )  # fmt: skip


def read_answer(text: str) -> Answer | None:
    """An answer read strictly: the whole text is one JSON object with ``answer`` (and ``supporting_edges``)."""
    document = _decoded(text.strip(), text)
    return _as_answer(document) if isinstance(document, dict) else None


_VISIBLE = re.compile(r'"?\banswer\b"?\s*[:=]\s*("(?:[^"\\]|\\.)*"|[^\s,}\]]+)', re.IGNORECASE)


def read_answer_leniently(text: str) -> Answer | None:
    """As a patient reader would: the object wherever it stands, else the last visible ``answer: ...``, also in a reply
    that was cut."""
    document = find_object(text, ANSWER_KEYS)
    if isinstance(document, dict) and (found := _as_answer(document)) is not None:
        return found
    shown = _VISIBLE.findall(text[:MOST_CHARACTERS])
    if not shown:
        return None
    answer = canonical_text(shown[-1].strip('"'))
    return Answer(answer=(answer,), edges=()) if answer and _is_text(answer) else None


def _as_answer(document: Mapping[str, Any]) -> Answer | None:
    try:
        answer = _answer(document.get("answer"), "answer")
        edges = document.get("supporting_edges")
        named = () if edges is None else _edges(edges, "supporting_edges")
    except _FormError:
        return None
    return Answer(answer=tuple(sorted(set(answer))), edges=named) if answer else None


# ------------------------------------------------------------------------------------------------- objects in a text


class _NotFiniteError(ValueError):
    """NaN or an infinity."""


class _DuplicateKeyError(ValueError):
    """An object names a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _DuplicateKeyError("an object names a key twice")
    return made


def _no_constant(name: str) -> Any:
    raise _NotFiniteError(name)


_HALF_WORD = re.compile(r"[-+.\w]{0,9}")
"""What may be left of a text that was cut in a number, a word or an escape."""
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def find_object(text: str, keys: Sequence[str]) -> dict[str, Any] | Finding:
    """The JSON object of a text with the most of ``keys``, the last of equals; or why there is none."""
    text = text[:MOST_CHARACTERS]
    best: dict[str, Any] | None = None
    failure: Finding | None = None
    most, at = 0, text.find("{")
    for _ in range(MOST_STARTS):
        if at < 0:
            break
        found = _from(text, at)
        if isinstance(found, Finding):
            failure = _worse(failure, found)
            at = text.find("{", at + 1)
            continue
        document, end = found
        score = sum(key in document for key in keys)
        if score >= max(most, 1):
            best, most = document, score
        at = text.find("{", end)
    if best is not None:
        return best
    if failure is not None:
        return failure
    missing = "no '{' in the text" if "{" not in text else f"no object with any of {', '.join(keys)}"
    return Finding(code=Code.NO_JSON, field="", detail=missing)


def _worse(old: Finding | None, new: Finding) -> Finding:
    """The finding that tells most: not finite, truncated, then the first."""
    order = {Code.NOT_FINITE: 2, Code.TRUNCATED_JSON: 1}
    return new if old is None or order.get(new.code, 0) > order.get(old.code, 0) else old


def _from(text: str, at: int) -> tuple[dict[str, Any], int] | Finding:
    try:
        document, end = _DECODER.raw_decode(text, at)
    except _NotFiniteError as error:
        return Finding(code=Code.NOT_FINITE, field="", detail=f"{error} is no JSON number")
    except json.JSONDecodeError as error:
        cut = (
            error.msg.startswith("Unterminated string") or _HALF_WORD.fullmatch(text[error.pos :].rstrip()) is not None
        )
        return Finding(code=Code.TRUNCATED_JSON if cut else Code.INVALID_JSON, field="", detail=error.msg)
    except (ValueError, RecursionError, MemoryError) as error:
        return Finding(code=Code.INVALID_JSON, field="", detail=str(error)[:200])
    assert isinstance(document, dict)
    return document, end


def _decoded(body: str, text: str) -> Any:
    if not body.startswith("{") or len(text) > MOST_CHARACTERS:
        return None
    found = _from(body, 0)
    return found[0] if not isinstance(found, Finding) and found[1] == len(body) else None


# ----------------------------------------------------------------------------------------------------------- fields


def _is_text(text: str) -> bool:
    """No lone surrogate: it can be written."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(value: Any, field: str, index: int | None = None) -> str:
    """Canonical text of a string or a number (2002 is "2002"); booleans, lists and objects are none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _FormError(Code.SCHEMA, field, index, f"expected text, got {type(value).__name__}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _FormError(Code.NOT_FINITE, field, index)
        value = int(value) if value.is_integer() and abs(value) < 2**53 else value
    try:
        text = str(value)
    except ValueError as error:  # an integer of thousands of digits
        raise _FormError(Code.SCHEMA, field, index, "the number is too long") from error
    if not _is_text(text):
        raise _FormError(Code.NOT_TEXT, field, index, "a lone surrogate")
    return canonical_text(text)


def _answer(value: Any, field: str) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    found = tuple(_text(item, field, index if len(items) > 1 else None) for index, item in enumerate(items))
    return found if all(found) else ()


def _edges(value: Any, field: str) -> tuple[Triple, ...]:
    if not isinstance(value, list):
        raise _FormError(Code.SCHEMA, field, None, f"expected a list, got {type(value).__name__}")
    return tuple(_edge(item, field, index) for index, item in enumerate(value))


def _edge(value: Any, field: str, index: int) -> Triple:
    """An object with src, rel and dst, or a list of the three."""
    if isinstance(value, list) and len(value) == 3:
        value = dict(zip(("src", "rel", "dst"), value, strict=True))
    if not isinstance(value, dict):
        raise _FormError(Code.SCHEMA, field, index, f"expected an object, got {type(value).__name__}")
    parts = [_text(value.get(name), f"{field}.{name}", index) for name in ("src", "rel", "dst")]
    if not all(parts):
        raise _FormError(Code.SCHEMA, field, index, "src, rel and dst must not be empty")
    confidence = value.get("confidence", 1.0)
    if isinstance(confidence, bool) or not isinstance(confidence, int | float):
        raise _FormError(Code.SCHEMA, f"{field}.confidence", index, "expected a number")
    if isinstance(confidence, float) and not math.isfinite(confidence):
        raise _FormError(Code.NOT_FINITE, f"{field}.confidence", index)
    return Triple(*parts)


def _hops(value: Any, field: str) -> tuple[Hop, ...]:
    if not isinstance(value, list) or not value:
        raise _FormError(Code.SCHEMA, field, None, "expected a list of relations")
    words = [_text(item, field, index) for index, item in enumerate(value)]
    if not all(word.removeprefix("^") for word in words):
        raise _FormError(Code.SCHEMA, field, None, "a relation must not be empty")
    return tuple(Hop(relation=word.removeprefix("^"), inverse=word.startswith("^")) for word in words)


def _query(value: Any, field: str) -> Query:
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        raise _FormError(Code.SCHEMA, field, None, f"expected an object with a kind of {', '.join(KINDS)}")
    kind = value["kind"]
    other = kind == "intersection"
    return Query(
        kind=kind, start=_text(value.get("start"), f"{field}.start"), hops=_hops(value.get("hops"), f"{field}.hops"),
        other_start=_text(value.get("other_start"), f"{field}.other_start") if other else "",
        other_hops=_hops(value.get("other_hops"), f"{field}.other_hops") if other else (),
    )  # fmt: skip


def _trace(value: Any, field: str) -> tuple[Call, ...]:
    if not isinstance(value, list):
        raise _FormError(Code.SCHEMA, field, None, "expected a list of calls")
    calls = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _FormError(Code.SCHEMA, field, index, "expected an object")
        name = item.get("tool_name", item.get("tool"))
        output = item.get("output", item.get("result"))
        calls.append(Call(tool_name=_text(name, f"{field}.tool_name", index), args=item.get("args"), output=output))
    return tuple(calls)


def _graph(value: Any, field: str) -> tuple[tuple[str, ...], tuple[Triple, ...]]:
    if not isinstance(value, dict):
        raise _FormError(Code.SCHEMA, field, None, "expected an object with nodes and edges")
    nodes, edges = value.get("nodes"), value.get("edges")
    if not isinstance(nodes, list) or not isinstance(edges, list):
        raise _FormError(Code.SCHEMA, field, None, "nodes and edges must be lists")
    ids = [item.get("id", item.get("node_id")) if isinstance(item, dict) else item for item in nodes]
    named = tuple(_text(item, f"{field}.nodes", index) for index, item in enumerate(ids))
    return named, _edges(edges, f"{field}.edges")
