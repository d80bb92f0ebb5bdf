"""What agents can look at: posts, threads and profiles, with whatever noise a world put in. The graph itself is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.text import edge_line

MOST_THREADS = 200
THREAD_EDGES = 10
PROFILE_NEIGHBOURS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """A post; ``user_id`` may be an alias, and the text may be a rumour."""

    post_id: str
    user_id: str
    text: str
    references: tuple[str, ...] = ()
    """Ids of nodes."""
    mentions: tuple[str, ...] = ()
    timestamp: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """A forum thread."""

    thread_id: str
    title: str
    topic: str
    author: str = ""
    references: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What is said of a node; a red herring's is invented."""

    user_id: str
    name: str
    org: str = ""
    location: str = ""
    alias_ids: tuple[str, ...] = ()
    connections: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Views:
    """All that the lookup tools read.

    Attributes:
        posts, threads, profiles: by id.
        owners: the user behind each alias.
    """

    posts: dict[str, Post]
    threads: dict[str, Thread]
    profiles: dict[str, Profile]
    owners: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class World:
    """A graph, which is the truth, and the views on it."""

    name: str
    graph: KnowledgeGraph
    views: Views


def plain_views(graph: KnowledgeGraph) -> Views:
    """Views of a graph without platforms of its own (MetaQA, geonames): a post an edge, threads by relation, a profile
    a node."""
    posts = {
        f"post_{number}": Post(
            post_id=f"post_{number}", user_id=edge.src, text=edge_line(edge), references=(edge.src, edge.dst),
            timestamp=1000 + number,
        )
        for number, edge in enumerate(graph.triples)
    }  # fmt: skip
    threads: dict[str, Thread] = {}
    for relation in graph.relations:
        edges = [edge for edge in graph.triples if edge.rel == relation]
        for begin in range(0, len(edges), THREAD_EDGES):
            if len(threads) < MOST_THREADS:
                part = edges[begin : begin + THREAD_EDGES]
                name = f"thread_{len(threads)}"
                threads[name] = Thread(
                    thread_id=name, title=f"{relation} {begin // THREAD_EDGES}", topic=relation,
                    references=tuple(dict.fromkeys(end for edge in part for end in (edge.src, edge.dst))),
                    comments=tuple(map(edge_line, part)),
                )  # fmt: skip
    profiles = {
        node.id: Profile(user_id=node.id, name=node.name or node.id, connections=_neighbours(graph, node.id))
        for node in graph.nodes.values()
    }
    owners = {edge.src: edge.dst for edge in graph.triples if edge.rel == "alias_of"}
    return Views(posts=posts, threads=threads, profiles=profiles, owners=owners)


def _neighbours(graph: KnowledgeGraph, node: str) -> tuple[str, ...]:
    near = [*(edge.dst for edge in graph.out_edges(node)), *(edge.src for edge in graph.in_edges(node))]
    return tuple(dict.fromkeys(near))[:PROFILE_NEIGHBOURS]


def record(value: Post | Thread | Profile) -> dict[str, Any]:
    """A view as JSON."""
    return {name: getattr(value, name) for name in value.__slots__}
