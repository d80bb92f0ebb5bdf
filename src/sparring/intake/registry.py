"""Which agent trains which policy, what has come in for it, and when there is enough.

An agent belongs to a *policy*: its own, that of all agents with equal spaces, or the one a mapping names. The policy's
learner comes from a factory when its first agent registers; agents may register and leave at any time. What cannot be
used is answered with a status and counted, never dropped in silence.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from sparring.errors import ConfigError
from sparring.intake.check import problem
from sparring.types import PolicyVersion, Rollout, Spaces

L = TypeVar("L")


class SubmitStatus(StrEnum):
    """What became of a rollout."""

    ACCEPTED = "accepted"
    READY = "ready"
    """Accepted, and with it there is enough for an update."""
    FULL = "full"
    """Not taken: the policy's buffer is full until its next update; send it again then."""
    STALE = "stale"
    """Not taken: its version is too old already."""
    INVALID = "invalid"
    """Not taken: see the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The answer to :meth:`Registry.submit`.

    >>> Submission(status=SubmitStatus.FULL, reason="4096 steps wait").status.value
    'full'
    """

    status: SubmitStatus
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """When there is enough for an update.

    >>> Readiness(min_steps=2048).quorum
    1.0
    """

    min_steps: int | None = None
    """Steps that a policy waits for."""
    trajectories: int | None = None
    """Rollouts that a policy waits for; with both, it waits for both, with neither for anything."""
    together: bool = False
    """Policies update together, when a quorum of them has enough; else each as soon as it has."""
    quorum: float = 1.0
    """Share of the registered policies that suffices."""
    timeout: float | None = None
    """After so long with one policy ready, those that are go without the others; in units of ``now``."""


@dataclass(kw_only=True, slots=True)
class _Slot(Generic[L]):
    learner: L
    agents: dict[str, Spaces] = field(default_factory=dict)
    waiting: deque[Rollout] = field(default_factory=deque)
    steps: int = 0
    training: bool = False


class Registry(Generic[L]):
    """Agents, their policies, and what waits to be trained.

    Attributes:
        counts: How often each status was answered, by ``policy/status``; ``policy/dropped`` counts rollouts that
            became too old while they waited.
    """

    def __init__(
        self, factory: Callable[[str, Spaces], L], *, version: Callable[[str], PolicyVersion], share: str = "none",
        policies: Mapping[str, str] | None = None, readiness: Readiness | None = None, capacity: int = 1 << 20,
        max_version_lag: int = 1, state_size: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            factory: Makes the learner of a policy, once, from its name and spaces.
            version: The learner's current version, by policy.
            share: ``none``: a policy for every agent; ``spaces``: one for all agents of equal spaces.
            policies: Agent to policy; wins over ``share``.
            readiness: When there is enough.
            capacity: Steps that may wait for one policy.
            max_version_lag: Updates that a rollout may be behind.
            state_size: Numbers that a centralised critic sees.
        """
        self._factory, self._version, self._share = factory, version, share
        self._policies, self.readiness = dict(policies or {}), readiness or Readiness()
        self._capacity, self._lag, self._state_size = capacity, max_version_lag, state_size
        self._slots: dict[str, _Slot[L]] = {}
        self._policy: dict[str, str] = {}
        self._ready_since: float | None = None
        self.counts: Counter[str] = Counter()

    # Who is there

    def register(self, agent: str, spaces: Spaces) -> str:
        """An agent joins (again); its policy is made if it is the first.

        Returns:
            The policy's name.

        Raises:
            ConfigError: A mapping puts agents of different spaces into one policy.
        """
        name = self._policies.get(agent) or (agent if self._share == "none" else self._of_spaces(agent, spaces))
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = _Slot(learner=self._factory(name, spaces))
        for other, theirs in slot.agents.items():
            if theirs != spaces:
                raise ConfigError(
                    f"policies.{agent} is {name!r}, which {other} plays too, but their spaces differ: give them two"
                )
        slot.agents[agent] = spaces
        self._policy[agent] = name
        return name

    def _of_spaces(self, agent: str, spaces: Spaces) -> str:
        for name, slot in self._slots.items():
            if spaces in slot.agents.values() and name not in self._policies.values():
                return name
        return f"like-{agent}"

    def leave(self, agent: str) -> bool:
        """An agent leaves; what it sent stays. True when nobody plays its policy any more."""
        name = self._policy.pop(agent)
        self._slots[name].agents.pop(agent)
        return not self._slots[name].agents

    def forget(self, policy: str) -> L:
        """Take a policy out, with all that waits for it; returns its learner."""
        return self._slots.pop(policy).learner

    def policy(self, agent: str) -> str:
        """Which policy an agent plays."""
        return self._policy[agent]

    def agents(self, policy: str) -> tuple[str, ...]:
        """Who plays a policy, in order of joining."""
        return tuple(self._slots[policy].agents)

    def learner(self, policy: str) -> L:
        return self._slots[policy].learner

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self._slots)

    # What comes in

    def submit(self, rollout: Rollout, *, now: float = 0.0) -> Submission:
        """Take a rollout, or say why not.

        Args:
            rollout: Of a registered agent.
            now: Any clock that does not go back: seconds, or ticks of a loop.
        """
        name = self._policy.get(rollout.agent)
        if name is None:
            return self._answer("", SubmitStatus.INVALID, f"agent {rollout.agent!r} is not registered")
        slot = self._slots[name]
        if reason := problem(rollout, slot.agents[rollout.agent], state_size=self._state_size):
            return self._answer(name, SubmitStatus.INVALID, reason)
        current = self._version(name)
        if rollout.version > current:
            return self._answer(name, SubmitStatus.INVALID, f"version {rollout.version} is not made yet ({current})")
        if self._is_stale(rollout, current):
            return self._answer(
                name, SubmitStatus.STALE, f"version {rollout.version} is not of the last ones before {current}"
            )
        if slot.steps + len(rollout) > self._capacity:
            return self._answer(name, SubmitStatus.FULL, f"{slot.steps} steps wait")
        before = bool(self.ready(now=now))
        slot.waiting.append(rollout)
        slot.steps += len(rollout)
        after = bool(self.ready(now=now))
        return self._answer(name, SubmitStatus.READY if after and not before else SubmitStatus.ACCEPTED, "")

    def _answer(self, policy: str, status: SubmitStatus, reason: str) -> Submission:
        self.counts[f"{policy or '?'}/{status}"] += 1
        return Submission(status=status, reason=reason)

    def _is_stale(self, rollout: Rollout, current: PolicyVersion) -> bool:
        # A step beyond the learner's is of weights that a kill threw away: an older incarnation's.
        return not 0 <= current.step - rollout.version.step <= self._lag

    # When there is enough

    def _enough(self, slot: _Slot[L]) -> bool:
        ready = self.readiness
        return (
            not slot.training
            and bool(slot.waiting)
            and slot.steps >= (ready.min_steps or 0)
            and len(slot.waiting) >= (ready.trajectories or 0)
        )

    def ready(self, *, now: float = 0.0) -> tuple[str, ...]:
        """Policies that should update now."""
        have = tuple(name for name, slot in self._slots.items() if self._enough(slot))
        self._ready_since = None if not have else now if self._ready_since is None else self._ready_since
        if not self.readiness.together or len(have) >= self.readiness.quorum * len(self._slots):
            return have
        waited = now - self._ready_since if self._ready_since is not None else 0.0
        return have if self.readiness.timeout is not None and waited >= self.readiness.timeout else ()

    def take(self, policies: Sequence[str]) -> dict[str, list[Rollout]]:
        """What waits for these policies, by policy, which now count as training until :meth:`done`.

        Age is judged here, by the actor's own stamp; what is too old is counted and left out.
        """
        taken: dict[str, list[Rollout]] = {}
        for name in policies:
            slot, current = self._slots[name], self._version(name)
            fresh = [rollout for rollout in slot.waiting if not self._is_stale(rollout, current)]
            self.counts[f"{name}/dropped"] += len(slot.waiting) - len(fresh)
            slot.waiting.clear()
            slot.steps = 0
            if fresh:
                taken[name] = fresh
                slot.training = True
        self._ready_since = None
        return taken

    def done(self, policies: Sequence[str]) -> None:
        """These policies have been trained, or failed to be: they may be ready again."""
        for name in policies:
            self._slots[name].training = False

    def waiting(self) -> list[Rollout]:
        """Everything that waits, for a checkpoint; :meth:`restore` takes it back."""
        return [rollout for slot in self._slots.values() for rollout in slot.waiting]

    def restore(self, rollouts: Sequence[Rollout], counts: Mapping[str, int]) -> None:
        """Back to a checkpoint, agents being registered as they were."""
        for rollout in rollouts:
            slot = self._slots[self._policy[rollout.agent]]
            slot.waiting.append(rollout)
            slot.steps += len(rollout)
        self.counts = Counter(counts)
