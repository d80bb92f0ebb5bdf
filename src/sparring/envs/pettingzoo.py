"""PettingZoo: parallel and turn-based (AEC) environments as ``AgentEnv``; agents that die, join later, or differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparring.envs.agents import Array, Moment
from sparring.envs.gymnasium import Flatten, flattener, spaces_of, to_action
from sparring.errors import EnvError
from sparring.types import Spaces


class _Adapter:
    """What both kinds share. Observations may be ``{"observation": ..., "action_mask": ...}``, as PettingZoo's own
    turn-based games have them; a mask may be in the info too."""

    def __init__(self, env: Any) -> None:
        self.env = env
        found: dict[str, Spaces] = {}
        self._flatten: dict[str, Flatten] = {}
        self._action: dict[str, Any] = {}
        self._wrapped: dict[str, bool] = {}
        for agent in env.possible_agents:
            seen, done = env.observation_space(agent), env.action_space(agent)
            inside = getattr(seen, "spaces", None)
            self._wrapped[agent] = isinstance(inside, dict) and "action_mask" in inside and "observation" in inside
            seen = inside["observation"] if self._wrapped[agent] and inside is not None else seen
            found[agent] = spaces_of(seen, done)
            self._flatten[agent], self._action[agent] = flattener(seen), to_action(done)
        self.spaces: Mapping[str, Spaces] = found
        self.state_size = 0
        space = getattr(env, "state_space", None)
        if space is not None:
            self.state_size = int(np.prod(space.shape))

    def _seen(self, agent: str, raw: Any) -> Array:
        return self._flatten[agent](raw["observation"] if self._wrapped[agent] else raw)

    def _mask(self, agent: str, raw: Any, info: Mapping[str, Any]) -> Array | None:
        mask = raw["action_mask"] if self._wrapped[agent] else info.get("action_mask")
        return None if mask is None else np.asarray(mask, np.bool_).ravel()

    def _masks(self, seen: Mapping[str, Any], infos: Mapping[str, Any]) -> dict[str, Array]:
        found = {agent: self._mask(agent, raw, infos.get(agent, {})) for agent, raw in seen.items()}
        return {agent: mask for agent, mask in found.items() if mask is not None}

    def _state(self) -> Array | None:
        return np.asarray(self.env.state(), np.float32).ravel() if self.state_size else None


class ParallelEnv(_Adapter):
    """All living agents act at once."""

    def reset(self, seed: int) -> Moment:
        seen, infos = self.env.reset(seed=seed)
        living = {agent: seen[agent] for agent in self.env.agents}
        return Moment(
            observations={agent: self._seen(agent, raw) for agent, raw in living.items()},
            masks=self._masks(living, infos), state=self._state(),
        )  # fmt: skip

    def step(self, actions: Mapping[str, Array]) -> Moment:
        seen, rewards, terminated, truncated, infos = self.env.step(
            {agent: self._action[agent](action) for agent, action in actions.items()}
        )
        cut = frozenset(agent for agent, flag in truncated.items() if flag)
        over = frozenset(agent for agent, flag in terminated.items() if flag)
        living = {agent: seen[agent] for agent in self.env.agents if agent not in cut | over}
        return Moment(
            observations={agent: self._seen(agent, raw) for agent, raw in living.items()},
            rewards={agent: float(reward) for agent, reward in rewards.items()}, terminated=over, truncated=cut,
            finals={agent: self._seen(agent, seen[agent]) for agent in cut if agent in seen},
            masks=self._masks(living, infos), state=self._state(),
        )  # fmt: skip


class TurnEnv(_Adapter):
    """One agent acts at a time (AEC). What it earned between its turns comes with its next one, or its end."""

    def reset(self, seed: int) -> Moment:
        self.env.reset(seed=seed)
        return self._moment()

    def step(self, actions: Mapping[str, Array]) -> Moment:
        (agent,) = actions
        self.env.step(self._action[agent](actions[agent]))
        return self._moment()

    def _moment(self) -> Moment:
        """On to the next agent that must act; agents that have ended are led out on the way."""
        rewards: dict[str, float] = {}
        over, cut = set[str](), set[str]()
        finals: dict[str, Array] = {}
        while self.env.agents:
            agent = self.env.agent_selection
            raw, reward, terminated, truncated, info = self.env.last()
            rewards[agent] = rewards.get(agent, 0.0) + float(reward)
            if not (terminated or truncated):
                mask = self._mask(agent, raw, info)
                return Moment(
                    observations={agent: self._seen(agent, raw)}, rewards=rewards, terminated=frozenset(over),
                    truncated=frozenset(cut), finals=finals, masks={} if mask is None else {agent: mask},
                    state=self._state(),
                )  # fmt: skip
            (over if terminated else cut).add(agent)
            finals[agent] = self._seen(agent, raw)
            self.env.step(None)
        return Moment(
            observations={}, rewards=rewards, terminated=frozenset(over), truncated=frozenset(cut), finals=finals,
            state=self._state(),
        )  # fmt: skip


def adapt(env: Any) -> ParallelEnv | TurnEnv:
    """The adapter of a PettingZoo environment.

    Raises:
        EnvError: It is none.
    """
    if callable(getattr(env, "last", None)) and hasattr(env, "possible_agents"):
        return TurnEnv(env)
    if hasattr(env, "possible_agents"):
        return ParallelEnv(env)
    raise EnvError(f"{type(env).__name__} is no PettingZoo environment: it has no possible_agents")
