"""Finds a reward by name: built in, the environment's own, or a user's function.

A user's function that raises leaves its turn *unscored* (not trained, never 0) and the failure counted by kind; one
that returns what is no finite number stops the run, for such a number would poison the weights. An ``async`` function
is a *judge*: all turns that settle in a tick are judged at the same time, and one that takes too long is a failure too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from sparring.envs.market.records import TurnFacts
from sparring.errors import ConfigError, TrainingError, nearest
from sparring.rewards import classic as classic_rules
from sparring.rewards.market import DEFAULT_CONSTANTS, DEFAULT_WEIGHTS, OutcomeConstants, OutcomeWeights, outcome
from sparring.types import Outcome, Reward, Settlement, Turn

BUILT_IN = ("outcome", "classic", "env")
UNSCORED = Reward(total=None)
UserReward = Callable[[Turn, Outcome], object]
"""A user's own reward: a float, a Reward, or None for a turn that it cannot score; or an awaitable of one."""
JUDGE_SECONDS = 60.0
"""How long a judge may take for one turn."""
JUDGED_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """``(turn, outcome) -> Reward``, with what it failed on.

    Raises, when called:
        TrainingError: It returned a number that is not finite.
        ConfigError: It returned something else than a number, a Reward or None, or cannot read the facts.
    """

    name: str
    score: UserReward
    catches: bool
    """An exception from ``score`` leaves the turn unscored (a user's function); else it is passed on."""
    unscored: Counter[str] = field(default_factory=Counter)
    """How many turns had no score, by reason: the exception's type, or ``returned None``. For the report."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason, the first turn that it left unscored, and the message."""

    def __call__(self, turn: Turn, outcome: Outcome) -> Reward:
        if self.judge:
            return self.settle([(turn, outcome)])[0].reward
        try:
            value = self.score(turn, outcome)
        except Exception as error:
            value = error
        return self._accepted(value, turn)

    def _accepted(self, value: object, turn: Turn) -> Reward:
        """What a score, or the exception in its place, is taken for."""
        if isinstance(value, BaseException):
            if not (self.catches and isinstance(value, Exception)):
                raise value
            self._count(type(value).__name__, turn, _first_line(value))
            return UNSCORED
        if value is None or (isinstance(value, Reward) and value.total is None):
            self._count("returned None", turn, "")
            return UNSCORED if value is None else value
        return self._checked(value, turn)

    def settle(self, came: Sequence[tuple[Turn, Outcome]]) -> list[Settlement]:
        """Turns and their outcomes joined with their rewards, in the same order; a judge sees them all at once."""
        if self.judge and came:
            with ThreadPoolExecutor(1) as thread:  # where no event loop runs yet, as one does in a notebook
                rewards = thread.submit(lambda: asyncio.run(self._judged(came))).result()
        else:
            rewards = [self(turn, outcome) for turn, outcome in came]
        return [Settlement(turn=t, outcome=o, reward=r) for (t, o), r in zip(came, rewards, strict=True)]

    @property
    def judge(self) -> bool:
        """It is awaited."""
        return inspect.iscoroutinefunction(self.score)

    async def _judged(self, came: Sequence[tuple[Turn, Outcome]]) -> list[Reward]:
        gate = asyncio.Semaphore(JUDGED_AT_ONCE)

        async def one(turn: Turn, outcome: Outcome) -> object:
            async with gate, asyncio.timeout(JUDGE_SECONDS):
                return await cast(Awaitable[object], self.score(turn, outcome))

        found = await asyncio.gather(*(one(turn, outcome) for turn, outcome in came), return_exceptions=True)
        return [self._accepted(value, turn) for value, (turn, _) in zip(found, came, strict=True)]

    def _count(self, reason: str, turn: Turn, message: str) -> None:
        self.unscored[reason] += 1
        self.examples.setdefault(reason, f"turn {turn.id}: {message}" if message else f"turn {turn.id}")

    def _checked(self, value: object, turn: Turn) -> Reward:
        if isinstance(value, Reward):
            reward = value
        elif not isinstance(value, bool) and isinstance(value, numbers.Real):
            reward = Reward(total=float(value), parts={"reward": float(value)})
        else:
            raise ConfigError(
                f"reward {self.name!r} returned {type(value).__name__} for turn {turn.id}: return a float, a "
                "sparring.types.Reward, or None to leave the turn unscored"
            )
        for label, number in {"total": reward.total, **reward.parts}.items():
            if number is None or not math.isfinite(number):
                raise TrainingError(f"reward {self.name!r}: {label} of turn {turn.id} is {number}; it must be finite")
        return reward


def load_reward(
    name: str | UserReward,
    *,
    env: object = None,
    weights: OutcomeWeights = DEFAULT_WEIGHTS,
    constants: OutcomeConstants = DEFAULT_CONSTANTS,
) -> RewardFunction:
    """The reward of a run.

    Args:
        name: ``outcome`` or ``classic`` (both for the market's facts); ``env`` (the environment's own: its ``reward``
            member if it has one, a function or the name of a reward, else the number in ``facts.reward``);
            ``package.module:function``; or a function of (turn, outcome).
        env: Whose ``reward`` member ``env`` looks up.
        weights: Of ``outcome``.
        constants: Of ``outcome``.

    Raises:
        ConfigError: There is no such reward; the message says what to do.
    """
    if not isinstance(name, str):
        if not callable(name):
            raise ConfigError(f"reward: a name or a function of (turn, outcome), not {type(name).__name__}")
        return _user(getattr(name, "__qualname__", type(name).__name__), name)
    if name == "outcome":
        return RewardFunction(
            name=name, score=lambda _, settled: outcome(_market_facts(name, settled), weights, constants), catches=False
        )
    if name == "classic":
        return RewardFunction(
            name=name,
            score=lambda _, settled: classic_rules.classic(classic_rules.from_facts(_market_facts(name, settled))),
            catches=False,
        )
    if name == "env":
        own = getattr(env, "reward", None)
        if own is None:
            return RewardFunction(name=name, score=_facts_reward, catches=False)
        if own == "env":
            raise ConfigError("env.reward = 'env' names itself: name another reward, or leave it out (facts.reward)")
        return load_reward(own, env=env, weights=weights, constants=constants)
    if ":" in name:
        return _user(name, _import(name))
    raise ConfigError(
        f"reward: no {name!r}{nearest(name, BUILT_IN)}; a function of your own is package.module:function"
    )


def _market_facts(name: str, settled: Outcome) -> TurnFacts:
    if not isinstance(settled.facts, TurnFacts):
        raise ConfigError(
            f"reward {name!r} reads the market's facts, this environment gives {type(settled.facts).__name__}: set "
            "reward = 'env', or package.module:function"
        )
    return settled.facts


def _facts_reward(turn: Turn, settled: Outcome) -> object:
    missing = object()
    value = getattr(settled.facts, "reward", missing)
    if value is missing:
        raise ConfigError(
            f"reward 'env': {type(settled.facts).__name__} of turn {turn.id} has no attribute reward: add one (a "
            "float, or None for a turn without a score), or give the environment a member reward, or set reward = "
            "package.module:function"
        )
    return value


def _user(name: str, function: object) -> RewardFunction:
    if not callable(function):
        raise ConfigError(f"reward {name!r} is no function but {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # built without a signature: it shows when it is called
        pass
    except TypeError as error:
        raise ConfigError(f"reward {name!r} must take two arguments, (turn, outcome): {error}") from error
    return RewardFunction(name=name, score=function, catches=True)


def _import(name: str) -> object:
    """``package.module:function``, also from the folder one is in, as ``python -m`` would."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ConfigError(f"reward: {name!r} must read package.module:function")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises when it is run
        raise ConfigError(
            f"reward {name!r}: cannot import {module_name} ({type(error).__name__}: {_first_line(error)}); start from "
            "the folder it is in, or install it"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"reward {name!r}: {module_name} has no {attribute!r}{nearest(attribute, public)}")
        found = getattr(found, attribute)
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:120]
