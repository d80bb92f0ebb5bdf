"""Sparring: reinforcement learning for language-model agents that meet other agents.

>>> import sparring as sp
>>> sp.SharedConfig(ticks=3).ticks
3

Loading this package loads nothing heavy: each name comes from where it lives when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "IndependentConfig",
    "SelfplayConfig",
    "SharedConfig",
    "__version__",
    "check_env",
    "evaluate",
    "load_policy",
    "train_independent",
    "train_selfplay",
    "train_shared",
    "warmup",
]

if TYPE_CHECKING:
    from sparring.api import check_env, evaluate, load_policy, train_independent, train_selfplay, train_shared, warmup
    from sparring.config import IndependentConfig, SelfplayConfig, SharedConfig

_HOMES = {
    "IndependentConfig": "sparring.config",
    "SelfplayConfig": "sparring.config",
    "SharedConfig": "sparring.config",
    "check_env": "sparring.api",
    "evaluate": "sparring.api",
    "load_policy": "sparring.api",
    "train_independent": "sparring.api",
    "train_selfplay": "sparring.api",
    "train_shared": "sparring.api",
    "warmup": "sparring.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
