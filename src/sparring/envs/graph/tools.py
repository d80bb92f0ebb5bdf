"""The tools of an episode: twelve lookups, ``add_edge`` and ``submit_answer``, dispatched from one table.

Whatever arguments come, a call returns a ``ToolResult``; a bad call is an error in it. Nothing but the table can be called.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sparring.envs.graph.records import Triple, canonical_text
from sparring.envs.graph.text import edge_line
from sparring.envs.graph.views import Views, record
from sparring.errors import nearest

MOST_RESULTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call returned.

    >>> ToolResult(error="no tool 'x'").ok
    False
    """

    output: Any = None
    """A JSON value."""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(kw_only=True)
class Desk:
    """What the tools of one episode work on, and what they change.

    Attributes:
        views: what the world shows.
        context: edges that the task's agents share, in shuffled order; they are no answer key.
        memory: text of the earlier results of this episode.
        edges: what ``add_edge`` noted, each once, in order.
        answer: what ``submit_answer`` said; None while it has not been called.
    """

    views: Views
    context: tuple[Triple, ...] = ()
    memory: list[str] = field(default_factory=list)
    edges: list[Triple] = field(default_factory=list)
    answer: tuple[str, ...] | None = None


class SearchPosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    query: str
    time_range: tuple[int, int] | None = None


class PostId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    post_id: str


class UserId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str


class ThreadId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    thread_id: str


class SearchPeople(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str | None = None
    org: str | None = None


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    query: str
    k: int = 5


class AddEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    src: str
    rel: str
    dst: str
    confidence: float = 1.0


class SubmitAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    answer: str | int | list[str | int]


def _has(query: str, *texts: str) -> bool:
    wanted = canonical_text(query).casefold()
    return bool(wanted) and any(wanted in canonical_text(text).casefold() for text in texts)


def _search_posts(desk: Desk, args: SearchPosts) -> Any:
    found = [
        post
        for post in desk.views.posts.values()
        if _has(args.query, post.text, post.post_id, post.user_id, *post.references)
        and (args.time_range is None or args.time_range[0] <= post.timestamp <= args.time_range[1])
    ]
    return _limited(map(record, found))


def _get_post(desk: Desk, args: PostId) -> Any:
    return record(desk.views.posts[args.post_id])


def _same_person(desk: Desk, user: str) -> set[str]:
    """A user, and the aliases or the owner that belong to the same one."""
    owner = desk.views.owners.get(user, user)
    return {owner, *(alias for alias, of in desk.views.owners.items() if of == owner)}


def _get_user_posts(desk: Desk, args: UserId) -> Any:
    who = _same_person(desk, args.user_id)
    return _limited(record(post) for post in desk.views.posts.values() if post.user_id in who)


def _get_mentions(desk: Desk, args: UserId) -> Any:
    who = _same_person(desk, args.user_id)
    return _limited(record(post) for post in desk.views.posts.values() if who & {*post.mentions, *post.references})


def _search_threads(desk: Desk, args: Topic) -> Any:
    topic = canonical_text(args.topic)
    threads = desk.views.threads.values()
    return _limited(record(t) for t in threads if t.topic == topic or _has(topic, t.thread_id, t.title))


def _get_thread(desk: Desk, args: ThreadId) -> Any:
    return record(desk.views.threads[args.thread_id])


def _get_user_activity(desk: Desk, args: UserId) -> Any:
    who = _same_person(desk, args.user_id)
    return {
        "posts": [post.post_id for post in desk.views.posts.values() if post.user_id in who][:MOST_RESULTS],
        "threads": [t.thread_id for t in desk.views.threads.values() if t.author in who][:MOST_RESULTS],
    }


def _get_profile(desk: Desk, args: UserId) -> Any:
    return record(desk.views.profiles[desk.views.owners.get(args.user_id, args.user_id)])


def _search_people(desk: Desk, args: SearchPeople) -> Any:
    people = desk.views.profiles.values()
    wanted = [(args.name, "name"), (args.org, "org")]
    asked = [(text, at) for text, at in wanted if text]
    return _limited(record(p) for p in people if asked and all(_has(text, getattr(p, at)) for text, at in asked))


def _get_connections(desk: Desk, args: UserId) -> Any:
    return list(desk.views.profiles[desk.views.owners.get(args.user_id, args.user_id)].connections)


def _search_memory(desk: Desk, args: Search) -> Any:
    """The earlier results nearest to the query by cosine of their bags of words."""
    wanted = Counter(canonical_text(args.query).casefold().split())
    scored = [(_cosine(wanted, Counter(text.casefold().split())), -i, text) for i, text in enumerate(desk.memory)]
    return [text for score, _, text in sorted(scored, reverse=True)[: max(0, min(args.k, MOST_RESULTS))] if score > 0]


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    product = sum(count * other[word] for word, count in one.items())
    norms = math.sqrt(sum(c * c for c in one.values()) * sum(c * c for c in other.values()))
    return product / norms if norms else 0.0


def _search_shared_context(desk: Desk, args: Search) -> Any:
    """Edges of the shared context that hold the query. An empty query finds nothing: it must not list them all."""
    found = [edge_line(edge) for edge in desk.context if _has(args.query, edge_line(edge))]
    return found[: max(0, min(args.k, MOST_RESULTS))]


def _add_edge(desk: Desk, args: AddEdge) -> Any:
    edge = Triple(*map(canonical_text, (args.src, args.rel, args.dst)))
    if not all(edge) or not math.isfinite(args.confidence):
        raise ValueError("src, rel and dst must not be empty, and confidence is a finite number")
    if edge in desk.edges:
        return {"added": False}
    desk.edges.append(edge)
    return {"added": True}


def _submit_answer(desk: Desk, args: SubmitAnswer) -> Any:
    items = args.answer if isinstance(args.answer, list) else [args.answer]
    said = tuple(sorted({canonical_text(str(item)) for item in items} - {""}))
    if not said:
        raise ValueError("the answer must not be empty")
    desk.answer = said
    return {"submitted": True}


def _limited(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    listed = list(found)
    return {"count": len(listed), "results": listed[:MOST_RESULTS]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A row of the table."""

    about: str
    arguments: type[msgspec.Struct]
    run: Callable[[Desk, Any], Any]


TOOLS: Mapping[str, Tool] = {
    "search_posts": Tool(about="Posts that hold a text, at most 20.", arguments=SearchPosts, run=_search_posts),
    "get_post": Tool(about="One post.", arguments=PostId, run=_get_post),
    "get_user_posts": Tool(about="Posts of a user and of his aliases.", arguments=UserId, run=_get_user_posts),
    "get_mentions": Tool(about="Posts that mention a user.", arguments=UserId, run=_get_mentions),
    "search_threads": Tool(about="Threads on a topic.", arguments=Topic, run=_search_threads),
    "get_thread": Tool(about="One thread with its comments.", arguments=ThreadId, run=_get_thread),
    "get_user_activity": Tool(about="Ids of a user's posts and threads.", arguments=UserId, run=_get_user_activity),
    "get_profile": Tool(about="The profile of a user or of an alias's owner.", arguments=UserId, run=_get_profile),
    "search_people": Tool(about="Profiles by name or organisation.", arguments=SearchPeople, run=_search_people),
    "get_connections": Tool(about="Whom a user is connected to.", arguments=UserId, run=_get_connections),
    "search_memory": Tool(about="Earlier results of this episode.", arguments=Search, run=_search_memory),
    "search_shared_context": Tool(
        about="Edges of the shared context that hold a text.", arguments=Search, run=_search_shared_context
    ),
    "add_edge": Tool(about="Note an edge as evidence.", arguments=AddEdge, run=_add_edge),
    "submit_answer": Tool(about="Give the answer; this ends the episode.", arguments=SubmitAnswer, run=_submit_answer),
}
LOOKUPS = tuple(name for name in TOOLS if name not in ("add_edge", "submit_answer"))


def call_tool(desk: Desk, name: Any, args: Any) -> ToolResult:
    """One call. Never raises, whatever the name and the arguments are."""
    if not isinstance(name, str) or name not in TOOLS:
        return ToolResult(error=f"no tool {str(name)[:60]!r}{nearest(str(name)[:60], TOOLS)}")
    tool = TOOLS[name]
    try:
        parsed = msgspec.convert({} if args is None else args, tool.arguments)
    except (msgspec.ValidationError, OverflowError) as error:
        return ToolResult(error=f"{name}: {error}")
    try:
        output = tool.run(desk, parsed)
    except KeyError as error:
        return ToolResult(error=f"{name}: there is no {str(error)[:80]}")
    except ValueError as error:
        return ToolResult(error=f"{name}: {error}")
    if name in LOOKUPS:
        desk.memory.append(f"{name} {args} {output}")
    return ToolResult(output=output)


def tool_schemas() -> list[dict[str, Any]]:
    """JSON-schema descriptions of all tools, in the form that chat APIs take for functions."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": tool.about, "parameters": _schema(tool.arguments)},
        }
        for name, tool in TOOLS.items()
    ]


def _schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([arguments])
    return dict(parts[str(schema["$ref"]).rpartition("/")[2]] if "$ref" in schema else schema)
