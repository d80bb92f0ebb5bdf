"""Environments of small policies for tests: found as ``agent_toys:Name``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparring.envs.agents import Moment
from sparring.types import ActionKind, Spaces


class Match:
    """One agent sees one of three signs and earns 1 for naming it; eight steps an episode, then truncated."""

    spaces = {"agent": Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(3,))}  # noqa: RUF012
    state_size = 0

    def reset(self, seed: int) -> Moment:
        self.rng, self.t = np.random.default_rng(seed), 0
        return Moment(observations={"agent": self._next()})

    def _next(self) -> Any:
        self.sign = int(self.rng.integers(3))
        return np.eye(3, dtype=np.float32)[self.sign]

    def step(self, actions: Mapping[str, Any]) -> Moment:
        rewards = {"agent": float(int(actions["agent"][0]) == self.sign)}
        self.t += 1
        seen = {"agent": self._next()}
        if self.t < 8:
            return Moment(observations=seen, rewards=rewards)
        return Moment(observations={}, rewards=rewards, truncated=frozenset({"agent"}), finals=seen)


class Crowd:
    """Four agents with three kinds of spaces, masks for some, numbers for one: ``a`` and ``b`` match signs; ``b`` dies
    after three to six steps, ``c`` (which names the number 0.5) joins at the third; ``d`` acts only every other step.
    Nine steps an episode; ``a`` is then truncated, the others terminate."""

    spaces = {  # noqa: RUF012
        "a": Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(3,)),
        "b": Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(3,)),
        "c": Spaces(observation_size=1, action=ActionKind.CONTINUOUS, low=(-1.0,), high=(1.0,)),
        "d": Spaces(observation_size=2, action=ActionKind.DISCRETE, choices=(2, 2)),
    }
    state_size = 1

    def reset(self, seed: int) -> Moment:
        self.rng, self.t = np.random.default_rng(seed), 0
        self.death = 3 + int(self.rng.integers(4))
        return self._moment({}, frozenset(), frozenset(), {})

    def _acts(self, agent: str) -> bool:
        return {"a": True, "b": self.t < self.death, "c": self.t >= 2, "d": self.t % 2 == 0}[agent]

    def _moment(self, rewards: Any, over: Any, cut: Any, finals: Any) -> Moment:
        seen: dict[str, Any] = {}
        if not cut:
            self.signs = {agent: int(self.rng.integers(3)) for agent in "ab"}
            seen = {agent: np.eye(3, dtype=np.float32)[self.signs[agent]] for agent in "ab"}
            seen |= {"c": np.array([self.t / 9], np.float32), "d": np.array([self.t % 2, 1.0], np.float32)}
            seen = {agent: each for agent, each in seen.items() if self._acts(agent)}
        masks = {agent: np.ones(sum(self.spaces[agent].choices), np.bool_) for agent in seen if agent != "c"}
        for agent in masks:
            if agent != "d":
                masks[agent][(self.signs[agent] + 1) % 3] = False
        return Moment(
            observations=seen, rewards=rewards, terminated=over, truncated=cut, finals=finals, masks=masks,
            state=np.array([self.t], np.float32),
        )  # fmt: skip

    def step(self, actions: Mapping[str, Any]) -> Moment:
        assert set(actions) == {agent for agent in "abcd" if self._acts(agent)}
        rewards = {agent: float(int(actions[agent][0]) == self.signs[agent]) for agent in "ab" if agent in actions}
        if "c" in actions:
            rewards["c"] = -abs(float(actions["c"][0]) - 0.5)
        rewards["d"] = 0.25  # at every step, also those at which it does not act
        dead = "b" in actions and self.t + 1 >= self.death
        self.t += 1
        over = frozenset({"b"}) if dead else frozenset()
        if self.t < 9:
            return self._moment(rewards, over, frozenset(), {})
        over |= {"c", "d"}
        return self._moment(rewards, over, frozenset({"a"}), {"a": np.zeros(3, np.float32)})


class Duel:
    """Two agents of equal spaces name a number at once; the higher wins 1 from the other, once an episode."""

    spaces = {  # noqa: RUF012
        name: Spaces(observation_size=1, action=ActionKind.DISCRETE, choices=(4,)) for name in ("one", "two")
    }
    state_size = 0

    def reset(self, seed: int) -> Moment:
        return Moment(observations={name: np.ones(1, np.float32) for name in self.spaces})

    def step(self, actions: Mapping[str, Any]) -> Moment:
        gap = float(np.sign(int(actions["one"][0]) - int(actions["two"][0])))
        return Moment(observations={}, rewards={"one": gap, "two": -gap}, terminated=frozenset({"one", "two"}))


class Forgetful(Match):
    """Does not repeat itself: no seed is used."""

    def reset(self, seed: int) -> Moment:
        return super().reset(int(np.random.default_rng().integers(2**31)))


class Nothing:
    """No environment."""
