"""A typed knowledge graph: a set of triples with indices both ways. Ids and relations are canonical text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparring.envs.graph.records import Node, Triple, canonical_text
from sparring.errors import EnvError

TYPES = ("user", "alias", "org", "location", "post", "thread", "event")
_PREFIXES = {"loc": "location", "thr": "thread", **{name: name for name in TYPES}}


def guessed_type(node_id: str) -> str:
    """The type that an id's beginning tells; ``user`` where it tells none.

    >>> guessed_type("thr_4"), guessed_type("東京")
    ('thread', 'user')
    """
    return _PREFIXES.get(node_id.partition("_")[0], "user")


class KnowledgeGraph:
    """Immutable after it was made.

    Attributes:
        nodes: Node by id, sorted by id.
        triples: The edges, each once, sorted.
        relations: Names of the relations, sorted.
    """

    def __init__(self, triples: Iterable[Triple], nodes: Iterable[Node] = ()) -> None:
        """Endpoints that ``nodes`` does not name get the type that their id tells.

        Raises:
            EnvError: An id or relation is empty.
        """
        known = {canonical_text(node.id): node for node in nodes}
        self.triples = tuple(sorted({Triple(*map(canonical_text, triple)) for triple in triples}))
        if not all(all(triple) for triple in self.triples) or "" in known:
            raise EnvError("a graph's ids and relations must not be empty")
        for triple in self.triples:
            for end in (triple.src, triple.dst):
                known.setdefault(end, Node(id=end, type=guessed_type(end), name=end))
        self.nodes: Mapping[str, Node] = dict(sorted(known.items()))
        self.relations = tuple(sorted({triple.rel for triple in self.triples}))
        self._set = frozenset(self.triples)
        self._out: dict[str, list[Triple]] = {}
        self._in: dict[str, list[Triple]] = {}
        for triple in self.triples:
            self._out.setdefault(triple.src, []).append(triple)
            self._in.setdefault(triple.dst, []).append(triple)

    def __contains__(self, triple: object) -> bool:
        return triple in self._set

    def out_edges(self, node: str) -> tuple[Triple, ...]:
        """Edges that begin at a node, sorted."""
        return tuple(self._out.get(node, ()))

    def in_edges(self, node: str) -> tuple[Triple, ...]:
        """Edges that end at a node, sorted."""
        return tuple(self._in.get(node, ()))
