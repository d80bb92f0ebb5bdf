"""What happens to many agents in many environments side by side, as arrays, cut into rollouts.

Every lane (agent, environment) is a path of its own. An agent need not act at every tick: rewards go to its last
action until it acts again or ends. A step whose successor is not known at a cut waits for the next cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.types import ActionKind, PolicyVersion, Rollout, Spaces

Array = NDArray[Any]


class Recorder:
    """Records A agents of equal spaces in E environments for at most so many ticks between cuts."""

    def __init__(
        self, agents: Sequence[str], environments: int, ticks: int, spaces: Spaces, *, masked: bool, state_size: int = 0
    ) -> None:
        self.agents, self.spaces, self.masked, self.state_size = tuple(agents), spaces, masked, state_size
        lanes = (len(agents), environments)
        rows = (ticks + 1, *lanes)  # row 0: the step that waited at the cut before
        self._rows: dict[str, Array] = {
            "observations": np.zeros((*rows, spaces.observation_size), np.float32),
            "actions": np.zeros(
                (*rows, spaces.action_size), np.int64 if spaces.action is ActionKind.DISCRETE else np.float32
            ),
            "log_probs": np.zeros(rows, np.float32),
            "rewards": np.zeros(rows, np.float32),
            "terminated": np.zeros(rows, np.bool_),
            "truncated": np.zeros(rows, np.bool_),
        }
        if masked:
            self._rows["masks"] = np.zeros((*rows, spaces.mask_size), np.bool_)
        if state_size:
            self._rows["states"] = np.zeros((*rows, state_size), np.float32)
        self._acted = np.zeros(rows, np.bool_)
        self._last = np.full(lanes, -1)  # row of the step that rewards go to
        self._episodes = np.zeros(lanes, np.int64)  # of the first row
        self._carried_versions: dict[tuple[int, int], PolicyVersion] = {}
        self._finals: dict[tuple[int, int, int], tuple[Array, Array | None]] = {}
        self._row = 0

    def act(
        self, observations: Array, acting: Array, actions: Array, log_probs: Array, masks: Array | None,
        states: Array | None,
    ) -> None:  # fmt: skip
        """A tick begins: the agents that act, shapes (A, E, ...). What others have is not looked at."""
        self._row += 1
        rows = self._rows
        rows["observations"][self._row] = observations
        rows["actions"][self._row] = actions
        rows["log_probs"][self._row] = log_probs
        if self.masked:
            rows["masks"][self._row] = True if masks is None else masks
        if self.state_size:
            rows["states"][self._row] = states
        for name in ("rewards", "terminated", "truncated"):
            rows[name][self._row] = 0
        self._acted[self._row] = acting
        self._last[acting] = self._row

    def settle(
        self, rewards: Array, terminated: Array, truncated: Array, finals: Array, final_states: Array | None
    ) -> None:
        """The tick ends: what it brought, (A, E); the successors of truncated steps, (A, E, D) and (A, E, S)."""
        if (self._last == self._row).all():
            self._rows["rewards"][self._row] += rewards
        else:
            agent, environment = np.nonzero(self._last >= 0)
            self._rows["rewards"][self._last[agent, environment], agent, environment] += rewards[agent, environment]
        ended = terminated | truncated
        if not ended.any():
            return
        for agent, environment in zip(*(i.tolist() for i in np.nonzero(ended & (self._last >= 0))), strict=True):
            row = int(self._last[agent, environment])
            self._rows["terminated"][row, agent, environment] = terminated[agent, environment]
            self._rows["truncated"][row, agent, environment] = truncated[agent, environment]
            state = None if final_states is None else final_states[agent, environment].copy()
            self._finals[row, agent, environment] = (finals[agent, environment].copy(), state)
            self._last[agent, environment] = -1

    def cut(
        self, versions: Sequence[PolicyVersion], observations: Array, acting: Array, states: Array | None
    ) -> list[Rollout]:
        """Rollouts of all lanes since the last cut; recording begins anew.

        Args:
            versions: Of the policies that acted, by agent.
            observations: What agents see now, (A, E, D): successors of the last steps.
            acting: (A, E): whose observation is of now. The last step of an agent that does not act now, and has not
                ended, waits.
            states: (A, E, S).
        """
        out: list[Rollout] = []
        waits = (self._last >= 0) & ~acting
        carried: dict[tuple[int, int], tuple[dict[str, Array], PolicyVersion]] = {}
        for agent, name in enumerate(self.agents):
            for environment in range(self._acted.shape[2]):
                own = np.flatnonzero(self._acted[: self._row + 1, agent, environment]).tolist()
                if waits[agent, environment]:
                    row = own.pop()
                    version = self._carried_versions.get((agent, environment)) if row == 0 else versions[agent]
                    assert version is not None
                    fields = {n: array[row, agent, environment].copy() for n, array in self._rows.items()}
                    carried[agent, environment] = fields, version
                now = observations[agent, environment], None if states is None else states[agent, environment]
                if own and own[0] == 0:
                    lone, own = own[:1], own[1:]
                    after = (
                        self._seen(own[0], agent, environment) if own else self._after(carried, agent, environment, now)
                    )
                    version = self._carried_versions[agent, environment]
                    out.append(self._rollout(name, agent, environment, lone, version, after))
                if own:
                    after = self._after(carried, agent, environment, now)
                    out.append(self._rollout(name, agent, environment, own, versions[agent], after))
        self._begin(carried)
        return out

    def _after(self, carried: Any, agent: int, environment: int, now: tuple[Array, Array | None]) -> Any:
        """What follows the last complete step: the step that waits, or now."""
        if (agent, environment) not in carried:
            return now
        fields, _ = carried[agent, environment]
        return fields["observations"], fields.get("states")

    def _seen(self, row: int, agent: int, environment: int) -> tuple[Array, Array | None]:
        states = self._rows["states"][row, agent, environment] if self.state_size else None
        return self._rows["observations"][row, agent, environment], states

    def _rollout(
        self, name: str, agent: int, environment: int, rows: list[int], version: PolicyVersion,
        after: tuple[Array, Array | None],
    ) -> Rollout:  # fmt: skip
        first, last = rows[0], rows[-1]
        pick: Any = slice(first, last + 1) if last - first + 1 == len(rows) else rows
        arrays = {n: array[pick, agent, environment].copy() for n, array in self._rows.items()}
        cut_off = arrays["truncated"] & ~arrays["terminated"]
        finals = [self._finals[rows[i], agent, environment] for i in np.flatnonzero(cut_off).tolist()]
        ends = int((arrays["terminated"] | arrays["truncated"]).sum())
        if not (arrays["terminated"][-1] or arrays["truncated"][-1]):
            finals.append(after)
        rollout = Rollout(
            agent=name, environment=environment, episode=int(self._episodes[agent, environment]), version=version,
            final_observations=_stack([each[0] for each in finals], self.spaces.observation_size),
            final_states=_stack([each[1] for each in finals], self.state_size) if self.state_size else None, **arrays,
        )  # fmt: skip
        self._episodes[agent, environment] += ends
        return rollout

    def _begin(self, carried: dict[tuple[int, int], tuple[dict[str, Array], PolicyVersion]]) -> None:
        self._acted[0] = False
        self._last[:] = -1
        self._finals.clear()
        self._carried_versions = {lane: version for lane, (_, version) in carried.items()}
        self._row = 0
        for lane, (fields, _) in carried.items():
            for name, value in fields.items():
                self._rows[name][(0, *lane)] = value
            self._acted[(0, *lane)] = True
            self._last[lane] = 0

    # Resume

    def snapshot(self) -> tuple[dict[str, Array], dict[str, list[int]]]:
        """What waits between two cuts: arrays, and versions as (incarnation, step) by ``agent/environment``."""
        arrays = {name: array[0].copy() for name, array in self._rows.items()}
        arrays |= {"acted": self._acted[0].copy(), "last": self._last.copy(), "episodes": self._episodes.copy()}
        versions = {f"{a}/{e}": [v.incarnation, v.step] for (a, e), v in self._carried_versions.items()}
        return arrays, versions

    def restore(self, arrays: dict[str, Array], versions: dict[str, list[int]]) -> None:
        """Back to a snapshot of a recorder of the same shape."""
        for name, array in self._rows.items():
            array[0] = arrays[name]
        self._acted[0], self._last, self._episodes = arrays["acted"], arrays["last"].copy(), arrays["episodes"].copy()
        self._row = 0
        self._carried_versions = {}
        for lane, (incarnation, step) in versions.items():
            agent, environment = map(int, lane.split("/"))
            self._carried_versions[agent, environment] = PolicyVersion(incarnation=incarnation, step=step)


def _stack(arrays: Sequence[Array | None], size: int) -> Array:
    there = [array for array in arrays if array is not None]
    return np.stack(there).astype(np.float32, copy=True) if there else np.zeros((0, size), np.float32)
