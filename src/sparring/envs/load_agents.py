"""Finding an environment of small policies by name: Gymnasium's, PettingZoo's, or a user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.envs.agents import AgentEnv, ArrayEnv, Copies
from sparring.errors import ConfigError, EnvError, nearest

PETTINGZOO = "pettingzoo:"


def load_array_env(
    name: str, copies: int, *, seed: int, settings: Mapping[str, Any] | None = None, vector: bool = False
) -> ArrayEnv:
    """Copies of an environment.

    Args:
        name: ``CartPole-v1`` (Gymnasium), ``pettingzoo:mpe2.simple_spread_v3`` (a module with ``parallel_env`` or
            ``env``; ``#aec`` asks for the turn-based one), or ``package.module:Class`` (an ``AgentEnv``, or a
            Gymnasium or PettingZoo environment).
        copies: How many.
        seed: Of the run.
        settings: Keywords of its constructor.
        vector: Take Gymnasium's own vectorised form.

    Raises:
        ConfigError: There is no such environment, or what it needs is not installed.
        EnvError: It cannot be made, or its spaces are not supported.
    """
    keywords = dict(settings or {})
    if name.startswith(PETTINGZOO):
        return Copies(lambda: _pettingzoo(name, keywords), copies, seed=seed)
    if ":" in name and not name.partition(":")[2][:1].islower():
        return Copies(lambda: _own(name, keywords), copies, seed=seed)
    _needs("gymnasium", name)
    from sparring.envs import gymnasium

    if vector:
        return gymnasium.make_vector(name, copies, keywords, seed=seed)
    return Copies(lambda: gymnasium.make(name, keywords), copies, seed=seed)


def _needs(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"env is {name!r}: {package} is not installed; pip install 'sparring[agents]'")


def _module(name: str, module: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"env is {name!r}: there is no module {error.name} (looked in {Path.cwd()} too)") from error


def _pettingzoo(name: str, settings: Mapping[str, Any]) -> AgentEnv:
    _needs("pettingzoo", name)
    place, _, kind = name.removeprefix(PETTINGZOO).partition("#")
    if kind not in ("", "aec", "parallel"):
        raise ConfigError(f"env is {name!r}: after # write aec or parallel")
    module = _module(name, place)
    maker = getattr(module, "env" if kind == "aec" else "parallel_env", None) or getattr(module, "env", None)
    if maker is None:
        raise ConfigError(f"env is {name!r}: {place} has neither parallel_env nor env")
    from sparring.envs.pettingzoo import adapt

    return adapt(_made(name, maker, settings))


def _own(name: str, settings: Mapping[str, Any]) -> AgentEnv:
    place, _, attribute = name.partition(":")
    module = _module(name, place)
    maker = getattr(module, attribute, None)
    if maker is None:
        raise ConfigError(f"env is {name!r}: {place} has no {attribute}{nearest(attribute, vars(module))}")
    env = _made(name, maker, settings)
    if isinstance(env, AgentEnv):
        return env
    if hasattr(env, "possible_agents"):
        from sparring.envs.pettingzoo import adapt

        return adapt(env)
    if hasattr(env, "observation_space"):
        from sparring.envs.gymnasium import GymnasiumEnv

        return GymnasiumEnv(env)
    missing = [member for member in ("spaces", "state_size", "reset", "step") if not hasattr(env, member)]
    raise EnvError(f"{name} is no environment: it lacks {', '.join(missing)} (see sparring.envs.agents.AgentEnv)")


def _made(name: str, maker: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return maker(**settings)
    except TypeError as error:
        raise ConfigError(f"env_settings: {name} does not take them: {error}") from error
