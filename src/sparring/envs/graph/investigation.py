"""The synthetic investigation world: users, aliases, organisations, locations, posts, threads and events.

The graph is the truth. Noise is in what agents see: rumours, posts under somebody else's alias, invented profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Node, Triple
from sparring.envs.graph.views import Post, Profile, Thread, Views, World
from sparring.errors import ConfigError

ORGS = ("Apex Dynamics", "Helios Labs", "Northbridge", "Quarry Works", "Tidewater", "Vantage Group")
PLACES = ("Bengaluru", "Pune", "Hyderabad", "Delhi", "Kochi", "Mumbai", "Jaipur", "Surat")
TOPICS = ("security", "startup", "ai", "infra")
WORDS = {
    "works_at": "market", "located_in": "island", "based_in": "desk", "connected_to": "bridge", "alias_of": "mirror",
    "attended": "ticket", "held_in": "castle", "authored_post": "message", "references": "book", "mentions": "whistle",
    "authored_thread": "request", "discusses": "needle",
}  # fmt: skip
"""Relations of the numbered style: words that are one token of the embedded model's, where ``authored_post`` is six."""
NUMBERED = 90
"""Ids of the numbered style: #10 to #99."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvestigationSettings:
    """How large and how noisy a world is. The defaults are for the embedded model; the published one had 40 users and
    typed ids.

    >>> InvestigationSettings().users
    12
    """

    users: int = 12
    orgs: int = 3
    places: int = 4
    posts: int = 6
    threads: int = 3
    events: int = 3
    alias_density: float = 0.35
    """Chance that a user has an alias."""
    noise_level: float = 0.15
    """Chance that a post is worded as a rumour."""
    red_herring_rate: float = 0.1
    """Invented profiles a user."""
    alias_noise: float = 0.45
    """Chance that a post appears under a random alias."""
    ids: Literal["typed", "numbered"] = "numbered"
    """``user_3 works_at org_1``; or ``#47 market #12``: numbers in an order that tells nothing, and words, which small models
    copy as one token each (at most 90 nodes)."""

    def __post_init__(self) -> None:
        for name in ("users", "orgs", "places"):
            if getattr(self, name) < 2:
                raise ConfigError(f"world_settings.{name} is {getattr(self, name)}: give at least 2")
        for name in ("posts", "threads", "events"):
            if getattr(self, name) < 0:
                raise ConfigError(f"world_settings.{name} is {getattr(self, name)}: give 0 or more")
        for name in ("alias_density", "noise_level", "red_herring_rate", "alias_noise"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"world_settings.{name} is {getattr(self, name)}: give a share from 0 to 1")
        if self.orgs > len(ORGS) or self.places > len(PLACES):
            raise ConfigError(f"world_settings: at most {len(ORGS)} orgs and {len(PLACES)} places")
        if self.ids not in ("typed", "numbered"):
            raise ConfigError(f"world_settings.ids is {self.ids!r}: choose typed or numbered")


def investigation(settings: InvestigationSettings, seed: str) -> World:
    """One world; the same seed and settings make the same.

    Raises:
        ConfigError: It has more than 90 nodes and numbered ids.
    """
    rng = Random(f"investigation/{seed}")
    users = [f"user_{i}" for i in range(settings.users)]
    orgs = {f"org_{name.lower().replace(' ', '_')}": name for name in ORGS[: settings.orgs]}
    places = {f"loc_{name.lower()}": name for name in PLACES[: settings.places]}
    nodes = [Node(id=user, type="user", name=f"Person {i}") for i, user in enumerate(users)]
    nodes += [Node(id=id, type="org", name=name) for id, name in orgs.items()]
    nodes += [Node(id=id, type="location", name=name) for id, name in places.items()]
    edges: set[Triple] = set()
    owners: dict[str, str] = {}
    for org in orgs:
        edges.add(Triple(org, "based_in", rng.choice(list(places))))
    for i, user in enumerate(users):
        edges.add(Triple(user, "works_at", rng.choice(list(orgs))))
        edges.add(Triple(user, "located_in", rng.choice(list(places))))
        if rng.random() < settings.alias_density:
            alias = f"alias_{i}_{rng.randint(100, 999)}"
            owners[alias] = user
            edges.add(Triple(alias, "alias_of", user))
    for _ in range(max(1, len(users) // 2)):
        edges.add(Triple(*_between(rng, users, "connected_to")))
    for i in range(settings.events):
        edges.add(Triple(f"event_{i}", "held_in", rng.choice(list(places))))
        for user in rng.sample(users, min(2, len(users))):
            edges.add(Triple(user, "attended", f"event_{i}"))
    writers = [*users, *owners]
    things = [*orgs, *places, *(f"event_{i}" for i in range(settings.events))]
    for i in range(settings.posts):
        edges.add(Triple(rng.choice(writers), "authored_post", f"post_{i}"))
        edges.add(Triple(f"post_{i}", "references", rng.choice(things)))
        if rng.random() < 0.5:
            edges.add(Triple(f"post_{i}", "mentions", rng.choice(users)))
    for i in range(settings.threads):
        edges.add(Triple(rng.choice(users), "authored_thread", f"thread_{i}"))
        edges.add(Triple(f"thread_{i}", "discusses", rng.choice(things)))
    graph = KnowledgeGraph(edges, nodes)
    named = {relation: relation for relation in WORDS}
    if settings.ids == "numbered":
        graph, owners = _numbered(graph, owners, rng)
        named = WORDS
    return World(name="investigation", graph=graph, views=_views(graph, owners, settings, rng, named))


def _between(rng: Random, users: list[str], relation: str) -> tuple[str, str, str]:
    one, other = rng.sample(users, 2)
    return one, relation, other


def _numbered(graph: KnowledgeGraph, owners: dict[str, str], rng: Random) -> tuple[KnowledgeGraph, dict[str, str]]:
    if len(graph.nodes) > NUMBERED:
        raise ConfigError(
            f"world_settings.ids is 'numbered' and the world has {len(graph.nodes)} nodes: at most {NUMBERED}; "
            "lower world_settings.users or posts"
        )
    numbers = rng.sample(range(10, 100), len(graph.nodes))
    new = {old: f"#{number}" for old, number in zip(graph.nodes, numbers, strict=True)}
    nodes = [Node(id=new[node.id], type=node.type, name=node.name) for node in graph.nodes.values()]
    edges = [Triple(new[edge.src], WORDS[edge.rel], new[edge.dst]) for edge in graph.triples]
    return KnowledgeGraph(edges, nodes), {new[alias]: new[user] for alias, user in owners.items()}


def _views(
    graph: KnowledgeGraph, owners: dict[str, str], settings: InvestigationSettings, rng: Random, named: dict[str, str]
) -> Views:
    """``named``: what the graph calls each relation."""

    def one(node: str, relation: str) -> str:
        return next((edge.dst for edge in graph.out_edges(node) if edge.rel == named[relation]), "")

    def name(node: str) -> str:
        return graph.nodes[node].name or node if node else ""

    of_type = {kind: [n.id for n in graph.nodes.values() if n.type == kind] for kind in ("user", "post", "thread")}
    aliases = sorted(owners)
    posts: dict[str, Post] = {}

    def post(id: str, poster: str, text: str, references: tuple[str, ...], when: int) -> None:
        if rng.random() < settings.noise_level:
            text = f"Rumor: {text} maybe fake"
        if aliases and rng.random() < settings.alias_noise:
            poster = rng.choice(aliases)
        mentions = (rng.choice(of_type["user"]),)
        posts[id] = Post(
            post_id=id, user_id=poster, text=text, references=references, mentions=mentions, timestamp=when
        )

    for i, user in enumerate(of_type["user"]):
        org, place = one(user, "works_at"), one(user, "located_in")
        post(f"note_{i}", user, f"{name(user)} of {name(org)} is in {name(place)}", (user, org, place), 1000 + i)
    for i, node in enumerate(of_type["post"]):
        writer = next(edge.src for edge in graph.in_edges(node) if edge.rel == named["authored_post"])
        about = tuple(edge.dst for edge in graph.out_edges(node))
        post(node, writer, f"On {', '.join(f'{name(other)} ({other})' for other in about)}", about, 5000 + i)
    threads = {}
    for node in of_type["thread"]:
        writer = next(edge.src for edge in graph.in_edges(node) if edge.rel == named["authored_thread"])
        about = tuple(edge.dst for edge in graph.out_edges(node))
        threads[node] = Thread(
            thread_id=node, title=f"About {', '.join(map(name, about))}", topic=rng.choice(TOPICS), author=writer,
            references=about, comments=tuple(f"{name(other)} is {other}" for other in about),
        )  # fmt: skip
    profiles = {
        user: Profile(
            user_id=user, name=name(user), org=one(user, "works_at"), location=one(user, "located_in"),
            alias_ids=tuple(alias for alias in aliases if owners[alias] == user),
            connections=tuple(edge.dst for edge in graph.out_edges(user) if edge.rel == named["connected_to"])[:5],
        )
        for user in of_type["user"]
    }  # fmt: skip
    for i in range(int(settings.users * settings.red_herring_rate)):
        profiles[f"noise_{i}"] = Profile(
            user_id=f"noise_{i}", name=f"Person {rng.randrange(settings.users)}",
            org=rng.choice(("Stealth Co", "Unknown Ventures")), location=rng.choice(("Remote", "Unknown")),
        )  # fmt: skip
    return Views(posts=posts, threads=threads, profiles=profiles, owners=owners)
