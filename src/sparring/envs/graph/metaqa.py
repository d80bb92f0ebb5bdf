"""MetaQA files (Zhang et al. 2018, github.com/yuyuz/MetaQA): the graph, and questions of which any listed answer is right.

::

    <root>/kb.txt                              subject|relation|object
    <root>/<1-hop|2-hop|3-hop>/vanilla/qa_<split>.txt    question with [topic] TAB answer|answer
    <root>/<hop>/qa_<split>_qtype.txt          a question type a line
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Hop, Query, Task, Triple, canonical_text
from sparring.envs.graph.solver import evidence, reached
from sparring.errors import EnvError

_TOPIC = re.compile(r"\[(.+?)\]")
_TYPES = {"movie": None, "director": "directed_by", "writer": "written_by", "actor": "starred_actors"} | {
    "year": "release_year", "language": "in_language", "genre": "has_genre", "tags": "has_tags",
    "imdbrating": "has_imdb_rating", "imdbvotes": "has_imdb_votes",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MetaQuestion:
    """A question as its file has it; any one of the answers is right, and so are all of them together."""

    question: str
    topic: str
    answers: tuple[str, ...]
    hops: int
    type: str


def read_graph(root: Path) -> KnowledgeGraph:
    """``kb.txt``.

    Raises:
        EnvError: The file is missing, or a line has not three parts.
    """
    triples = []
    for number, line in _lines(root / "kb.txt"):
        parts = line.split("|", 2)
        if len(parts) != 3:
            raise EnvError(f"{root / 'kb.txt'}:{number}: expected subject|relation|object")
        triples.append(Triple(*parts))
    return KnowledgeGraph(triples)


def read_questions(root: Path, split: str, hops: int, *, form: str = "vanilla") -> list[MetaQuestion]:
    """The questions of one split (train, dev, test) and number of hops (1 to 3).

    Raises:
        EnvError: A file is missing, a line has no [topic] or no answer, or the types are not as many as the questions.
    """
    file = root / f"{hops}-hop" / form / f"qa_{split}.txt"
    types_file = root / f"{hops}-hop" / f"qa_{split}_qtype.txt"
    types = [line.strip() for _, line in _lines(types_file)] if types_file.exists() else None
    found: list[MetaQuestion] = []
    for number, line in _lines(file):
        question, _, answers = line.partition("\t")
        topic = _TOPIC.search(question)
        listed = tuple(sorted({canonical_text(answer) for answer in answers.split("|")} - {""}))
        if topic is None or not listed:
            raise EnvError(f"{file}:{number}: expected a question with a [topic], a tab, and answers joined by |")
        found.append(MetaQuestion(
            question=question, topic=canonical_text(topic[1]), answers=listed, hops=hops,
            type=types[len(found)] if types is not None and len(found) < len(types) else "",
        ))  # fmt: skip
    if types is not None and len(types) != len(found):
        raise EnvError(f"{types_file}: {len(types)} types for {len(found)} questions")
    return found


def question_query(question: MetaQuestion) -> Query | None:
    """The directed query of a question type (``movie_to_director_to_movie``); None for a type that is not known."""
    words = question.type.split("_to_")
    if len(words) != question.hops + 1 or not all(word in _TYPES for word in words):
        return None
    hops = []
    for before, after in pairwise(words):
        relation = _TYPES[after] if before == "movie" else _TYPES[before]
        if relation is None or (before == "movie") == (after == "movie"):
            return None
        hops.append(Hop(relation=relation, inverse=before != "movie"))
    return Query(kind="set", start=question.topic, hops=tuple(hops))


def task_of(graph: KnowledgeGraph, question: MetaQuestion, *, id: str) -> Task | None:
    """A task that accepts any listed answer, or all of them; evidence along the type's relations and their directions.
    None for a question whose type does not lead to every listed answer."""
    query = question_query(question)
    if query is None or not set(question.answers) <= reached(graph, query.start, query.hops):
        return None
    return Task(
        id=id, query=query, question=question.question, answer=question.answers,
        evidence=tuple(sorted(evidence(graph, query))), alternatives=tuple((answer,) for answer in question.answers),
    )  # fmt: skip


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"cannot read {file}: {error}; give the directory of the MetaQA files") from error
    return [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
