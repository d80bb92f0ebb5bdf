"""Environments of small policies: arrays in, arrays out, many agents, many copies side by side.

A user's own environment is a class with the members of ``AgentEnv``: one copy, dictionaries by agent. ``Copies`` plays
several of them and hands the loop arrays, one set for each *group* of agents with equal spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sparring.errors import EnvError
from sparring.types import Spaces

Array = NDArray[Any]
NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where one copy stands: who must act on what, and what the step before brought.

    >>> Moment(observations={"a": np.zeros(2)}).rewards
    {}
    """

    observations: Mapping[str, Array]
    """Of the agents that must act now, shape (D,). When nobody must, the episode is over."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Since the moment before; they go to each agent's last action."""
    terminated: frozenset[str] = NOBODY
    """Agents for whom the episode has just ended by its own rules."""
    truncated: frozenset[str] = NOBODY
    """Agents for whom a limit has just cut it."""
    finals: Mapping[str, Array] = field(default_factory=dict)
    """What truncated agents saw last, shape (D,)."""
    masks: Mapping[str, Array] = field(default_factory=dict)
    """Shape (M,), bool: what each agent that must act may choose. For all of them, or empty."""
    state: Array | None = None
    """Shape (S,): the environment's own state for a centralised critic, where it has one."""


@runtime_checkable
class AgentEnv(Protocol):
    """One copy of an environment for small policies; a user's own, or an adapter.

    Attributes:
        spaces: Of every agent that may ever act, in a fixed order.
        state_size: Numbers in ``Moment.state``; 0 where there is none.

    Optional: ``snapshot() -> bytes`` and ``restore(bytes) -> Moment``. Without them a resumed run plays the open episode
    again from its seed, so the same seed and actions must give the same episode.
    """

    spaces: Mapping[str, Spaces]
    state_size: int

    def reset(self, seed: int) -> Moment:
        """Begin an episode."""
        ...

    def step(self, actions: Mapping[str, Array]) -> Moment:
        """One action, shape (K,), of every agent that the moment before named."""
        ...


@dataclass(kw_only=True, slots=True)
class GroupArrays:
    """Agents of equal spaces in all copies: ``Moment`` as arrays, written over by every step. A agents, E copies."""

    agents: tuple[str, ...]
    spaces: Spaces
    observations: Array
    """Shape (A, E, D), float32."""
    acting: Array
    """Shape (A, E), bool: who must act now."""
    masks: Array
    """Shape (A, E, M), bool; all true for who need not act."""
    rewards: Array
    """Shape (A, E), float32."""
    terminated: Array
    truncated: Array
    finals: Array
    """Shape (A, E, D)."""

    @classmethod
    def empty(cls, agents: Sequence[str], spaces: Spaces, copies: int) -> GroupArrays:
        lanes = (len(agents), copies)
        return cls(
            agents=tuple(agents), spaces=spaces,
            observations=np.zeros((*lanes, spaces.observation_size), np.float32), acting=np.zeros(lanes, np.bool_),
            masks=np.ones((*lanes, spaces.mask_size), np.bool_), rewards=np.zeros(lanes, np.float32),
            terminated=np.zeros(lanes, np.bool_), truncated=np.zeros(lanes, np.bool_),
            finals=np.zeros((*lanes, spaces.observation_size), np.float32),
        )  # fmt: skip


class ArrayEnv(Protocol):
    """What the loop plays: ``Copies``, or Gymnasium's own vector environments.

    Attributes:
        groups: Agents by equal spaces, with their arrays.
        masked: Whether it has action masks.
        states: Shape (E, S): the environment's state now; (E, 0) where it has none.
        final_states: Shape (E, S): the state before a copy began anew in the last step.
        episodes: Shape (E,): number of each copy's episode.
    """

    groups: Sequence[GroupArrays]
    copies: int
    masked: bool
    states: Array
    final_states: Array
    episodes: Array

    def reset(self) -> None:
        """Begin the first episode of every copy."""
        ...

    def step(self, actions: Sequence[Array]) -> None:
        """One action of every agent that must act: (A, E, K) for each group. Copies that end begin anew."""
        ...

    def snapshot(self) -> list[dict[str, Any]] | None:
        """What :meth:`restore` needs, as plain data; None where it cannot be done."""
        ...

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Back to a snapshot.

        Raises:
            EnvError: The environment does not come back to where it was.
        """
        ...


class Copies:
    """E copies of an ``AgentEnv``, one after the other in this process."""

    def __init__(self, make: Callable[[], AgentEnv], copies: int, *, seed: int) -> None:
        """
        Args:
            make: Makes one copy.
            copies: How many.
            seed: Episode n of copy e begins from a seed made of this, e and n: no two are alike.
        """
        self.copies, self.seed = copies, seed
        self._envs = [make() for _ in range(copies)]
        spaces = self._envs[0].spaces
        kinds = list(dict.fromkeys(spaces.values()))
        self.groups: Sequence[GroupArrays] = [
            GroupArrays.empty([name for name, own in spaces.items() if own == kind], kind, copies) for kind in kinds
        ]
        self._place = {name: (g, a) for g, group in enumerate(self.groups) for a, name in enumerate(group.agents)}
        size = self._envs[0].state_size
        self.states, self.final_states = np.zeros((copies, size), np.float32), np.zeros((copies, size), np.float32)
        self.episodes = np.zeros(copies, np.int64)
        self.masked = False
        self._played: list[list[dict[str, list[float]]]] = [[] for _ in range(copies)]

    def reset(self) -> None:
        for copy in range(self.copies):
            self._enter(copy, self._begin(copy))

    def step(self, actions: Sequence[Array]) -> None:
        for group in self.groups:
            group.rewards.fill(0.0)
            group.terminated.fill(False)
            group.truncated.fill(False)
        acting = [(g, a, e) for g, group in enumerate(self.groups) for a, e in np.argwhere(group.acting).tolist()]
        chosen: list[dict[str, Array]] = [{} for _ in range(self.copies)]
        for g, a, e in acting:
            chosen[e][self.groups[g].agents[a]] = actions[g][a, e]
        for copy, env in enumerate(self._envs):
            own = chosen[copy]
            moment = env.step(own)
            self._played[copy].append({name: action.tolist() for name, action in own.items()})
            self._bring(copy, moment)
            if not moment.observations:
                self.final_states[copy] = 0.0 if moment.state is None else moment.state
                self.episodes[copy] += 1
                moment = self._begin(copy)
            self._enter(copy, moment)

    def _begin(self, copy: int) -> Moment:
        self._played[copy] = []
        moment = self._envs[copy].reset(self._seed(copy))
        if not moment.observations:
            raise EnvError("reset: nobody must act at the beginning of an episode")
        return moment

    def _seed(self, copy: int) -> int:
        words = np.random.SeedSequence([self.seed, copy, int(self.episodes[copy])]).generate_state(1)
        return int(words[0]) >> 1  # 31 bits: what every environment takes

    def _bring(self, copy: int, moment: Moment) -> None:
        """What a step brought, before anything begins anew."""
        for name, reward in moment.rewards.items():
            g, a = self._place[name]
            self.groups[g].rewards[a, copy] = reward
        for name in moment.terminated:
            g, a = self._place[name]
            self.groups[g].terminated[a, copy] = True
        for name in moment.truncated:
            g, a = self._place[name]
            self.groups[g].truncated[a, copy] = True
            if name in moment.finals:
                self.groups[g].finals[a, copy] = moment.finals[name]
            elif name not in moment.terminated:
                raise EnvError(f"step: {name} was truncated, but finals has no last observation of it")

    def _enter(self, copy: int, moment: Moment) -> None:
        """Who must act now, on what."""
        for group in self.groups:
            group.acting[:, copy] = False
            if self.masked:
                group.masks[:, copy] = True
        for name, observation in moment.observations.items():
            g, a = self._place[name]
            self.groups[g].observations[a, copy] = observation
            self.groups[g].acting[a, copy] = True
        for name, mask in moment.masks.items():
            self.masked = True
            g, a = self._place[name]
            self.groups[g].masks[a, copy] = mask
        if moment.state is not None:
            self.states[copy] = moment.state

    def snapshot(self) -> list[dict[str, Any]] | None:
        """By copy: the episode's number, the actions that were played in it (or the copy's own snapshot), and where it
        stands, to be compared."""
        saved = []
        for copy, env in enumerate(self._envs):
            own = getattr(env, "snapshot", None)
            place = {"episode": int(self.episodes[copy]), "stands": self._stands(copy)}
            saved.append(place | ({"snapshot": own()} if own else {"played": self._played[copy]}))
        return saved

    def restore(self, saved: list[dict[str, Any]]) -> None:
        for copy, (env, own) in enumerate(zip(self._envs, saved, strict=True)):
            self.episodes[copy] = own["episode"]
            if "snapshot" in own:
                moment = env.restore(own["snapshot"])  # type: ignore[attr-defined]
            else:
                moment = self._begin(copy)
                for actions in own["played"]:
                    moment = env.step({
                        name: np.array(action, np.int64 if self._kind(name) else np.float32)
                        for name, action in actions.items()
                    })  # fmt: skip
                self._played[copy] = list(own["played"])
            self._enter(copy, moment)
            if self._stands(copy) != own["stands"]:
                raise EnvError(
                    f"copy {copy} does not come back to where it was: the same seed and actions gave another episode. "
                    "Give the environment snapshot() and restore(), or start a new run"
                )

    def _kind(self, name: str) -> bool:
        return bool(self.groups[self._place[name][0]].spaces.choices)

    def _stands(self, copy: int) -> list[str]:
        """What the agents that must act see, to the bit."""
        return [
            f"{group.agents[a]}:{group.observations[a, copy].tobytes().hex()}"
            for group in self.groups
            for a in np.flatnonzero(group.acting[:, copy]).tolist()
        ]


class JointState:
    """What a centralised critic sees: the observations of all agents, each with a bit that says it is in the game, and
    which agent asks. Agents that are not in the game are zeros.

    Attributes:
        now: Shape (A, E, S) for each group.
        final: The same at the end of the last step, before anything began anew: the successor of truncated steps.
        alive: (A, E) for each group: who is in the game.
    """

    def __init__(self, env: ArrayEnv, *, own_state: bool) -> None:
        """
        Args:
            env: Begun already.
            own_state: Take the environment's state in place of the joint observation.
        """
        self._own_state = own_state
        self.alive = [group.acting.copy() for group in env.groups]
        self._seen = [group.observations.copy() for group in env.groups]
        self._episodes = env.episodes.copy()
        if own_state and not env.states.shape[1]:
            raise EnvError("critic is 'state', but the environment has no state: write critic = 'joint'")
        self.now = self._for_agents(env, env.states if own_state else self._joined(self._seen, self.alive))
        self.final = [array.copy() for array in self.now]

    def restore(self, env: ArrayEnv, alive: Sequence[Array]) -> None:
        """Back to a checkpoint, the environment being there."""
        self.alive = [array.copy() for array in alive]
        self._seen = [group.observations.copy() for group in env.groups]
        self._episodes = env.episodes.copy()
        self.now = self._for_agents(env, env.states if self._own_state else self._joined(self._seen, self.alive))

    def advance(self, env: ArrayEnv) -> None:
        """After every step of the environment."""
        begun = env.episodes != self._episodes
        self._episodes = env.episodes.copy()
        ended = [group.terminated | group.truncated for group in env.groups]
        if any(each.any() for each in ended):
            last = [
                np.where(group.truncated[..., None], group.finals, np.where(begun[:, None], seen, group.observations))
                for group, seen in zip(env.groups, self._seen, strict=True)
            ]
            living = [alive & ~group.terminated for group, alive in zip(env.groups, self.alive, strict=True)]
            state = np.where(begun[:, None], env.final_states, env.states) if self._own_state else None
            self.final = self._for_agents(env, self._joined(last, living) if state is None else state)
        for alive, group, over in zip(self.alive, env.groups, ended, strict=True):
            alive &= ~over & ~begun
            alive |= group.acting
        self._seen = [group.observations.copy() for group in env.groups]
        self.now = self._for_agents(env, env.states if self._own_state else self._joined(self._seen, self.alive))

    def _joined(self, seen: Sequence[Array], alive: Sequence[Array]) -> Array:
        parts = []
        for observations, living in zip(seen, alive, strict=True):
            for agent in range(len(observations)):
                here = living[agent][:, None].astype(np.float32)
                parts += [observations[agent] * here, here]
        joined: Array = np.concatenate(parts, axis=1)
        return joined

    def _for_agents(self, env: ArrayEnv, state: Array) -> list[Array]:
        """The state, and the number of the agent that asks as one-hot: agents may share a critic."""
        total, first, out = sum(len(group.agents) for group in env.groups), 0, []
        for group in env.groups:
            count = len(group.agents)
            asks = np.zeros((count, env.copies, total), np.float32)
            asks[np.arange(count), :, first + np.arange(count)] = 1.0
            out.append(np.concatenate([np.broadcast_to(state, (count, *state.shape)), asks], axis=2))
            first += count
        return out
