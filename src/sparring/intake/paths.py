"""Single steps into rollouts: one open path for each agent in each environment, so that none is glued to another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import SparringError
from sparring.types import Rollout, Transition


class PathError(SparringError):
    """A transition does not continue its path; the path is left as it was."""


class OpenPaths:
    """The paths that transitions continue, by (agent, environment).

    A rollout is cut at ``max_steps``, and where the version changes; the observation of the next step is then the
    successor of its last. An episode's end (also inside a rollout) never joins what follows to what came before.
    """

    def __init__(self, *, max_steps: int = 1000) -> None:
        """
        Args:
            max_steps: Most steps in a rollout; memory grows with what is there, not with this.
        """
        self.max_steps = max_steps
        self._paths: dict[tuple[str, int], list[Transition]] = {}

    def add(self, transition: Transition) -> Rollout | None:
        """Continue a path.

        Returns:
            The rollout that is thereby complete, if one is.

        Raises:
            PathError: A truncated step without its final observation, or an episode that goes on without an end or
                ends without a new number.
        """
        if transition.truncated and not transition.terminated and transition.final_observation is None:
            raise PathError("final_observation is missing: a truncated step needs the observation after it")
        key = transition.agent, transition.environment
        path = self._paths.setdefault(key, [])
        if path and transition.episode != path[-1].episode + _ended(path[-1]):
            raise PathError(
                f"episode is {transition.episode} after {path[-1].episode}, which "
                f"{'ended' if _ended(path[-1]) else 'has not ended'}: call close() for a path that breaks off"
            )
        out = None
        if path and (len(path) >= self.max_steps or transition.version != path[-1].version):
            out = _rollout(path, transition.observation, transition.state)
            path.clear()
        path.append(transition)
        if out is None and len(path) >= self.max_steps and _ended(transition):
            out = _rollout(path, None, None)
            path.clear()
        return out

    def close(
        self, agent: str, environment: int, observation: NDArray[Any] | None = None, state: NDArray[Any] | None = None
    ) -> Rollout | None:
        """End a path here: what it holds, with the observation after its last step; or None if it holds nothing.

        Raises:
            PathError: The last step ended no episode, and no observation is given.
        """
        path = self._paths.get((agent, environment), [])
        if not path:
            self._paths.pop((agent, environment), None)
            return None
        if not _ended(path[-1]) and observation is None:
            raise PathError("observation is missing: the last step of this path is open, so give what came after it")
        out = _rollout(path, observation, state)
        del self._paths[agent, environment]
        return out

    def open_steps(self) -> dict[tuple[str, int], int]:
        """How many steps wait in each path."""
        return {key: len(path) for key, path in self._paths.items() if path}


def _ended(transition: Transition) -> bool:
    return transition.terminated or transition.truncated


def _rollout(path: Sequence[Transition], after: NDArray[Any] | None, state: NDArray[Any] | None) -> Rollout:
    """Steps of one path; ``after`` and ``state`` are what the agent and the critic saw after the last one."""
    first, last = path[0], path[-1]
    ends: list[tuple[Any, Any]] = [
        (step.final_observation, step.final_state) for step in path if step.truncated and not step.terminated
    ]
    if not _ended(last):
        ends.append((after, state))
    size = np.shape(first.observation)
    return Rollout(
        agent=first.agent, environment=first.environment, episode=first.episode, version=first.version,
        observations=np.stack([step.observation for step in path]), actions=np.stack([step.action for step in path]),
        log_probs=np.array([step.log_prob for step in path], np.float32),
        rewards=np.array([step.reward for step in path], np.float32),
        terminated=np.array([step.terminated for step in path], np.bool_),
        truncated=np.array([step.truncated for step in path], np.bool_),
        final_observations=np.stack([end[0] for end in ends]) if ends else np.zeros((0, *size), np.float32),
        masks=_stacked([step.mask for step in path]), states=_stacked([step.state for step in path]),
        final_states=None if first.state is None else (
            np.stack([end[1] for end in ends]) if ends else np.zeros((0, *np.shape(first.state)), np.float32)
        ),
    )  # fmt: skip


def _stacked(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """None where no step has one."""
    there = [array for array in arrays if array is not None]
    if there and len(there) < len(arrays):
        raise PathError("some steps of one path have a mask or a state and others none: give it at every step")
    return np.stack(there) if there else None
