"""The package from Python: ``import sparring as sp`` and then these functions. The command line calls the same ones.

Settings are keywords: a field (``ticks=50``), a group as a mapping or as its own record (``gate={"rate": 0.1}``), or a
dotted name (``**{"gate.rate": 0.1}``). An environment or a reward may be given as the class or function itself, if it
can be found by its name; one that is defined in a script is found only while that script runs.
Heavy modules are loaded when a function is called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sparring.config import (
    CheckEnvConfig,
    EvalConfig,
    IndependentConfig,
    SelfplayConfig,
    SharedConfig,
    WarmupConfig,
    from_settings,
)
from sparring.errors import ConfigError

C = TypeVar("C")


def train_shared(config: SharedConfig | None = None, *, resume: str | Path | None = None, **settings: Any) -> Any:
    """Train one shared model (or an adapter per team) with many agents.

    Args:
        config: The configuration; ``settings`` change it. None begins from the defaults.
        resume: A run to continue, by directory or name; its own configuration is the one that ``settings`` change.
        settings: See the module.

    Returns:
        The run's report.

    Raises:
        SparringError: See ``sparring.errors``; the message says what to change.
    """
    return _train(SharedConfig, "sparring.loops.shared:train_shared", config, resume, settings)


def train_selfplay(config: SelfplayConfig | None = None, *, resume: str | Path | None = None, **settings: Any) -> Any:
    """Self-play on knowledge graphs: a generator sets tasks, an answerer solves them. Arguments as of ``train_shared``.

    Returns:
        The run's report.
    """
    return _train(SelfplayConfig, "sparring.loops.selfplay:train_selfplay", config, resume, settings)


def _train(
    cls: type[C], function: str, config: C | None, resume: str | Path | None, settings: Mapping[str, Any]
) -> Any:
    path: Path | None = None
    if resume is not None:
        from sparring.config import load_config
        from sparring.rundir import find_run

        if config is not None:
            raise ConfigError("resume goes on with the run's own configuration: leave config out")
        path = find_run(resume)
        config = load_config(cls, toml=path / "config.toml")
    return call(function, configured(cls, config, settings), resume=path)


def train_independent(
    config: IndependentConfig | None = None, *, resume: str | Path | None = None, **settings: Any
) -> Any:
    """Train a small policy for each agent of an environment, or for agents alike, by PPO; see ``IndependentConfig``.

    Arguments, result and errors are those of :func:`train_shared`.
    """
    return _train(IndependentConfig, "sparring.loops.independent:train_independent", config, resume, settings)


def warmup(config: WarmupConfig | None = None, **settings: Any) -> Any:
    """Give a model a supervised start, from bot play or a file of chats; see ``WarmupConfig``.

    Returns:
        The report.
    """
    return call("sparring.loops.warmup:warmup", configured(WarmupConfig, config, settings))


def evaluate(run: str | Path | None = None, *, config: EvalConfig | None = None, **settings: Any) -> Any:
    """Measure a run on its environment's held-out panel; see ``EvalConfig``.

    Args:
        run: Directory or name of the run.
        config: The configuration; ``run`` and ``settings`` change it.
        settings: See the module.

    Returns:
        The report.
    """
    named = {} if run is None else {"run": str(run)}
    chosen = configured(EvalConfig, config, {**settings, **named})
    return call("sparring.evaluation.evaluate:evaluate_run", chosen)


def load_policy(name: str | Path, *, policy: str | None = None, step: int | None = None, **options: Any) -> Any:
    """A policy to play with: of a run (its newest checkpoint, or that of ``step``), or a model by name or path.

    Returns:
        A ``sparring.policies.causal_lm.CausalLM``.
    """
    return call("sparring.runs:load_policy", name, policy=policy, step=step, **options)


def check_env(env: Any, *, env_settings: Mapping[str, object] | None = None, seed: int = 0) -> Any:
    """Test an environment against the contract (``sparring.envs.contract.Env``).

    Args:
        env: A name (``market``, ``package.module:Class``), a class, or an environment.
        env_settings: Keywords of its constructor, where it is made here.
        seed: Of the episodes that are played.

    Raises:
        EnvError: It breaks the contract; the message says where.
    """
    if isinstance(env, str | type):
        config = configured(CheckEnvConfig, None, {"env": env, "env_settings": env_settings or {}, "seed": seed})
        env = call("sparring.envs.load:load_env", config.env, settings=config.env_settings)
    return call("sparring.envs.contract:check_env", env, seed=seed)


def configured(cls: type[C], config: C | None, settings: Mapping[str, Any]) -> C:
    """``config`` (or the defaults) with settings from Python.

    Raises:
        ConfigError: A name or a value does not fit.
    """
    if config is not None and not isinstance(config, cls):
        raise ConfigError(f"config: expected a {cls.__name__}, got {type(config).__name__}")
    return from_settings(cls, {name: _named(name, value) for name, value in settings.items()}, config)


def call(place: str, *arguments: Any, **keywords: Any) -> Any:
    """Call ``module:function``, loading the module only now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments, **keywords)


def _named(name: str, value: Any) -> Any:
    """A class or function as the name that finds it again: a configuration is text, and so is repeatable."""
    if name in ("env", "reward") and (inspect.isclass(value) or inspect.isroutine(value)):
        module, path = value.__module__, value.__qualname__
        found: Any = inspect.getmodule(value)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not value:
            raise ConfigError(f"{name}: {path} cannot be found by its name: define it at the top level of a module")
        return f"{module}:{path}"
    return str(value) if isinstance(value, Path) else value
