"""Gymnasium: its spaces as flat arrays, its environments as one agent, its vector environments as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from sparring.envs.agents import Array, GroupArrays, Moment
from sparring.errors import EnvError
from sparring.types import ActionKind, ObservationPart, Spaces

AGENT = "agent"
"""Name of the one agent of a Gymnasium environment."""
_EVERYBODY = frozenset({AGENT})
Flatten = Callable[[Any], NDArray[np.float32]]


# Spaces


def spaces_of(observation: Any, action: Any) -> Spaces:
    """Gymnasium's spaces as ours.

    Raises:
        EnvError: A space of this kind is not supported; the message names it.
    """
    parts: tuple[ObservationPart, ...] = ()
    if isinstance(observation, gym_spaces.Dict):
        start, found = 0, []
        for name, each in observation.spaces.items():
            found.append(ObservationPart(name=name, start=start, size=_size(each)))
            start += found[-1].size
        parts = tuple(found)
    size = _size(observation)
    if isinstance(action, gym_spaces.Discrete):
        return Spaces(observation_size=size, action=ActionKind.DISCRETE, choices=(int(action.n),), parts=parts)
    if isinstance(action, gym_spaces.MultiDiscrete):
        choices = tuple(int(n) for n in np.ravel(action.nvec))
        return Spaces(observation_size=size, action=ActionKind.DISCRETE, choices=choices, parts=parts)
    if isinstance(action, gym_spaces.MultiBinary):
        choices = (2,) * int(np.prod(action.shape))
        return Spaces(observation_size=size, action=ActionKind.DISCRETE, choices=choices, parts=parts)
    if isinstance(action, gym_spaces.Box) and action.dtype.kind == "f":
        low, high = (tuple(map(float, np.ravel(bound))) for bound in (action.low, action.high))
        return Spaces(observation_size=size, action=ActionKind.CONTINUOUS, low=low, high=high, parts=parts)
    raise EnvError(f"action space {action}: only Discrete, MultiDiscrete, MultiBinary and Box of floats are supported")


def _size(space: Any) -> int:
    if isinstance(space, gym_spaces.Box | gym_spaces.MultiBinary):
        return int(math.prod(space.shape))
    if isinstance(space, gym_spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym_spaces.MultiDiscrete):
        return int(np.sum(space.nvec))
    if isinstance(space, gym_spaces.Dict):
        return sum(_size(each) for each in space.spaces.values())
    if isinstance(space, gym_spaces.Tuple):
        return sum(_size(each) for each in space.spaces)
    raise EnvError(
        f"observation space {space}: only Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple are supported"
    )


def flattener(space: Any) -> Flatten:
    """A function from an observation of the space to (D,) float32; whole numbers become one-hot."""
    if isinstance(space, gym_spaces.Box | gym_spaces.MultiBinary):
        return lambda seen: np.asarray(seen, np.float32).ravel()
    if isinstance(space, gym_spaces.Discrete):
        eye, begin = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return lambda seen: eye[int(seen) - begin]
    if isinstance(space, gym_spaces.MultiDiscrete):
        eyes = [np.eye(int(n), dtype=np.float32) for n in np.ravel(space.nvec)]
        begins = np.ravel(space.start).tolist()
        return lambda seen: np.concatenate(
            [eye[int(x) - begin] for eye, x, begin in zip(eyes, np.ravel(seen), begins, strict=True)]
        )
    if isinstance(space, gym_spaces.Dict):
        own = {name: flattener(each) for name, each in space.spaces.items()}
        return lambda seen: np.concatenate([flatten(seen[name]) for name, flatten in own.items()])
    if isinstance(space, gym_spaces.Tuple):
        all_of = [flattener(each) for each in space.spaces]
        return lambda seen: np.concatenate([flatten(x) for flatten, x in zip(all_of, seen, strict=True)])
    raise EnvError(f"observation space {space} is not supported")


def to_action(space: Any) -> Callable[[Array], Any]:
    """A function from our action, shape (K,), to one of the space."""
    if isinstance(space, gym_spaces.Discrete):
        begin = int(space.start)
        return lambda action: int(action[0]) + begin
    if isinstance(space, gym_spaces.MultiDiscrete):
        start = np.asarray(space.start)
        return lambda action: action.reshape(start.shape).astype(space.dtype) + start
    return lambda action: action.reshape(space.shape).astype(space.dtype)


# One environment


class GymnasiumEnv:
    """A Gymnasium environment as an ``AgentEnv`` of one agent, ``agent``. Masks come from ``info["action_mask"]``."""

    state_size = 0

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.spaces: Mapping[str, Spaces] = {AGENT: spaces_of(env.observation_space, env.action_space)}
        self._flatten, self._action = flattener(env.observation_space), to_action(env.action_space)

    def reset(self, seed: int) -> Moment:
        seen, info = self.env.reset(seed=seed)
        return Moment(observations={AGENT: self._flatten(seen)}, masks=_mask(info))

    def step(self, actions: Mapping[str, Array]) -> Moment:
        seen, reward, terminated, truncated, info = self.env.step(self._action(actions[AGENT]))
        flat, rewards = {AGENT: self._flatten(seen)}, {AGENT: float(reward)}
        if not (terminated or truncated):
            return Moment(observations=flat, rewards=rewards, masks=_mask(info))
        return Moment(
            observations={}, rewards=rewards, terminated=_EVERYBODY if terminated else frozenset(),
            truncated=_EVERYBODY if truncated else frozenset(), finals=flat,
        )  # fmt: skip


def _mask(info: Mapping[str, Any]) -> dict[str, Array]:
    mask = info.get("action_mask")
    return {} if mask is None else {AGENT: np.asarray(mask, np.bool_).ravel()}


def make(name: str, settings: Mapping[str, Any]) -> GymnasiumEnv:
    """An environment by its registered name.

    Raises:
        EnvError: Gymnasium does not know it, or cannot make it; its own message is in ours.
    """
    try:
        return GymnasiumEnv(gymnasium.make(name, disable_env_checker=True, **settings))
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise EnvError(f"env is {name!r}: Gymnasium cannot make it: {error}") from error


# Vector environments


class VectorCopies:
    """A Gymnasium vector environment as an ``ArrayEnv``; its own copies, its own way to begin anew.

    ``NEXT_STEP`` (Gymnasium's default): the step after an end only begins anew; its action is not the agent's, so the
    agent does not act there. ``SAME_STEP``: the step that ends begins anew; the last observation is in
    ``info["final_obs"]``. ``DISABLED``: ended copies are reset here.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], *, seed: int) -> None:
        self.env, self.copies, self.seed = env, env.num_envs, seed
        spaces = spaces_of(env.single_observation_space, env.single_action_space)
        self.groups: Sequence[GroupArrays] = [GroupArrays.empty([AGENT], spaces, self.copies)]
        self.masked = False
        self.states, self.final_states = (np.zeros((self.copies, 0), np.float32) for _ in range(2))
        self.episodes = np.zeros(self.copies, np.int64)
        self._one = flattener(env.single_observation_space)
        self._plain = isinstance(env.single_observation_space, gym_spaces.Box)
        self._action = to_action(env.single_action_space)
        mode = (env.metadata or {}).get("autoreset_mode")
        if mode is None:
            raise EnvError("the vector environment does not say its autoreset_mode in its metadata: set it there")
        self._mode = AutoresetMode(mode)
        self._begins = np.zeros(self.copies, np.bool_)  # NEXT_STEP: copies whose next step begins anew

    def _flat(self, seen: Any) -> Array:
        if self._plain:
            return np.asarray(seen, np.float32).reshape(self.copies, -1)
        from gymnasium.vector.utils import iterate

        return np.stack([self._one(each) for each in iterate(self.env.observation_space, seen)])

    def reset(self) -> None:
        seen, info = self.env.reset(seed=self.seed)
        self.groups[0].observations[0] = self._flat(seen)
        self.groups[0].acting[0] = True
        self._masks(info)

    def step(self, actions: Sequence[Array]) -> None:
        group, own = self.groups[0], actions[0][0]
        batch = np.stack([np.asarray(self._action(action)) for action in own])
        seen, rewards, terminated, truncated, info = self.env.step(batch)
        now, ended = self._flat(seen), terminated | truncated
        begun = self._begins
        group.rewards[0] = np.where(begun, 0.0, rewards)
        group.terminated[0], group.truncated[0] = terminated & ~begun, truncated & ~begun
        if self._mode is AutoresetMode.SAME_STEP:
            for copy in np.flatnonzero(ended).tolist():
                group.finals[0, copy] = self._one(info["final_obs"][copy])
            self.episodes += ended
        else:
            group.finals[0] = now
        if self._mode is AutoresetMode.NEXT_STEP:
            self.episodes += begun
            self._begins = ended & ~begun
            group.acting[0] = ~self._begins
        elif self._mode is AutoresetMode.DISABLED and ended.any():
            self.episodes += ended
            seen, info = self.env.reset(options={"reset_mask": ended})
            now = self._flat(seen)
        group.observations[0] = now
        self._masks(info)

    def _masks(self, info: Mapping[str, Any]) -> None:
        if "action_mask" in info:
            self.masked = True
            self.groups[0].masks[0] = np.stack([np.asarray(mask, np.bool_).ravel() for mask in info["action_mask"]])

    def snapshot(self) -> None:
        """Gymnasium's vector environments cannot be put back: a resumed run begins new episodes, and says so."""

    def restore(self, saved: list[dict[str, Any]]) -> None:
        raise EnvError("a vector environment cannot be restored")


def make_vector(name: str, copies: int, settings: Mapping[str, Any], *, seed: int) -> VectorCopies:
    """Gymnasium's own vectorised form of an environment (``vector_entry_point``).

    Raises:
        EnvError: There is none.
    """
    try:
        env = gymnasium.make_vec(name, num_envs=copies, vectorization_mode="vector_entry_point", **settings)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise EnvError(f"env is {name!r}: Gymnasium cannot make it as a vector environment: {error}") from error
    return VectorCopies(env, seed=seed)
