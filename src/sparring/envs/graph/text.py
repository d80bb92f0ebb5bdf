"""Questions as text. Both forms say all of a query, and none is ever parsed back: ids may hold any characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from sparring.envs.graph.records import Hop, Query, Triple, canonical_text


def question_text(query: Query, *, full: bool) -> str:
    """The one question that asks a query.

    >>> q = Query(kind="path", start="a_1", hops=(Hop(relation="r"), Hop(relation="s", inverse=True)))
    >>> question_text(q, full=True)
    'If you start at a_1 and follow the relation path r -> ^s, which entity do you reach after 2 hops?'
    >>> question_text(q, full=False)
    'path a_1 r ^s'
    """
    if not full:
        words = [query.kind, query.start, *map(str, query.hops)]
        if query.kind == "intersection":
            words += ["&", query.other_start, *map(str, query.other_hops)]
        return " ".join(words)
    if query.kind == "intersection":
        return (
            f"Which entities do you reach both if you start at {query.start} and follow the relation path "
            f"{_path(query.hops)}, and if you start at {query.other_start} and follow the relation path "
            f"{_path(query.other_hops)}?"
        )
    asked = {
        "path": "which entity do you reach",
        "set": "which entities do you reach",
        "count": "how many different entities do you reach",
    }[query.kind]
    hops = f"{len(query.hops)} hop{'s' if len(query.hops) != 1 else ''}"
    return f"If you start at {query.start} and follow the relation path {_path(query.hops)}, {asked} after {hops}?"


def _path(hops: Sequence[Hop]) -> str:
    return " -> ".join(map(str, hops))


def comparable(text: str) -> str:
    """A question as it is compared: NFC, white space collapsed, case folded.

    >>> comparable("If  YOU\\u00a0start") == comparable("if you start")
    True
    """
    return unicodedata.normalize("NFC", canonical_text(text).casefold())


def occurrences(term: str, text: str) -> int:
    """How often a term stands in a text as a whole word (ids hold letters, digits and ``_``), case folded.

    >>> occurrences("user_1", "start at user_12"), occurrences("has", "has_genre has"), occurrences("c", "to c?")
    (0, 1, 1)
    """
    term, text = comparable(term), comparable(text)
    if not term:
        return 0
    found, at = 0, text.find(term)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(term) : at + len(term) + 1]
        if not _goes_on(before, term[0]) and not _goes_on(term[-1], after):
            found += 1
        at = text.find(term, at + 1)
    return found


def _goes_on(left: str, right: str) -> bool:
    """Whether two neighbours belong to one word."""
    return bool(left) and bool(right) and _in_word(left) and _in_word(right)


def _in_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def edge_line(edge: Triple) -> str:
    """An edge as a prompt shows it.

    >>> edge_line(Triple("a", "r", "b"))
    'a r b'
    """
    return f"{edge.src} {edge.rel} {edge.dst}"
