"""Worlds by name, fresh ones by seed, and never the same for training and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from sparring.envs.graph.geonames import geonames
from sparring.envs.graph.graph import KnowledgeGraph
from sparring.envs.graph.investigation import InvestigationSettings, investigation
from sparring.envs.graph.metaqa import read_graph
from sparring.envs.graph.views import World, plain_views
from sparring.errors import ConfigError, nearest

Split = Literal["train", "test", "warmup"]
WORLDS = ("investigation", "geonames", "metaqa")
METAQA_TEST_SHARE = 0.3


def make_world(name: str, settings: Mapping[str, Any], *, split: Split, seed: int, number: int) -> World:
    """World ``number`` of a split. ``metaqa`` takes ``root`` (the directory of its files) and ``entities``.

    Raises:
        ConfigError: No such world, or a setting that it does not know.
        EnvError: Its data is not there.
    """
    return _made(name, tuple(sorted(settings.items())), split, seed, number)


@lru_cache(maxsize=128)
def _made(name: str, pairs: tuple[tuple[str, Any], ...], split: Split, seed: int, number: int) -> World:
    settings, key = dict(pairs), f"{split}/{seed}/{number}"
    if name == "investigation":
        return investigation(_settings(InvestigationSettings, settings), key)
    if name == "geonames":
        _known(settings, ("countries",))
        # The warm-up may see what training sees: it is the test that is held out.
        where = "test" if split == "test" else "train"
        return geonames(key, split=where, countries=int(settings.get("countries", 24)))
    if name == "metaqa":
        _known(settings, ("root", "entities"))
        if "root" not in settings:
            raise ConfigError("world_settings.root is missing: name the directory of the MetaQA files")
        graph = read_graph(Path(str(settings["root"])))
        return _part(graph, "test" if split == "test" else "train", key, int(settings.get("entities", 40)))
    raise ConfigError(f"world is {name!r}{nearest(name, WORLDS)}")


def _part(graph: KnowledgeGraph, split: str, key: str, count: int) -> World:
    """A random part of a large graph: some subjects of the split with all that is said of them."""
    subjects = sorted({edge.src for edge in graph.triples})
    own = [s for s in subjects if (Random(f"metaqa/{s}").random() < METAQA_TEST_SHARE) == (split == "test")]
    chosen = Random(f"metaqa/{key}").sample(own, min(count, len(own)))
    part = KnowledgeGraph([edge for subject in chosen for edge in graph.out_edges(subject)])
    return World(name="metaqa", graph=part, views=plain_views(part))


def _settings(cls: type[InvestigationSettings], settings: Mapping[str, Any]) -> InvestigationSettings:
    _known(settings, [field.name for field in dataclasses.fields(cls)])
    try:
        return msgspec.convert(dict(settings), cls)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        raise ConfigError(f"world_settings: {error}") from error


def _known(settings: Mapping[str, Any], names: Any) -> None:
    for name in settings:
        if name not in names:
            raise ConfigError(f"world_settings.{name} is unknown{nearest(name, names)}")
