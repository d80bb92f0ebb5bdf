"""Who trains what, the five answers to a submission, and when there is enough: one test a trap of the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_fixtures import CONTINUOUS, DISCRETE, MULTI, random_rollout
from sparring.errors import ConfigError
from sparring.intake.registry import Readiness, Registry, SubmitStatus
from sparring.types import PolicyVersion, Spaces


class Learners:
    """A factory that counts, and versions that can be set."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Spaces]] = []
        self.versions: dict[str, PolicyVersion] = {}

    def __call__(self, name: str, spaces: Spaces) -> str:
        self.made.append((name, spaces))
        self.versions[name] = PolicyVersion(incarnation=1, step=0)
        return f"learner of {name}"

    def registry(self, **settings: Any) -> Registry[str]:
        return Registry(self, version=lambda name: self.versions[name], **settings)


def rollout(agent: str, steps: int = 4, spaces: Spaces = DISCRETE, step: int = 0, incarnation: int = 1) -> Any:
    return random_rollout(0, steps, spaces, agent=agent, version=PolicyVersion(incarnation=incarnation, step=step))


def test_every_agent_gets_a_learner_of_its_own_from_the_factory() -> None:
    """Traps 1 and 8: two agents registering; different spaces are welcome."""
    learners = Learners()
    registry = learners.registry()
    assert [registry.register(n, s) for n, s in (("a", DISCRETE), ("b", CONTINUOUS), ("c", MULTI))] == ["a", "b", "c"]
    assert registry.register("a", DISCRETE) == "a"
    assert learners.made == [("a", DISCRETE), ("b", CONTINUOUS), ("c", MULTI)]
    assert registry.learner("b") == "learner of b"
    assert registry.submit(rollout("b", spaces=CONTINUOUS)).status is SubmitStatus.READY


def test_agents_share_by_spaces_or_by_a_mapping() -> None:
    shared = Learners().registry(share="spaces")
    names = [shared.register(n, s) for n, s in (("a", DISCRETE), ("b", MULTI), ("c", DISCRETE))]
    assert names[0] == names[2] != names[1] and shared.agents(names[0]) == ("a", "c")
    mapped = Learners().registry(policies={"a": "team", "c": "team"})
    assert [mapped.register(n, DISCRETE) for n in "abc"] == ["team", "b", "team"]
    with pytest.raises(ConfigError, match=r"policies\.c is 'team', which a plays too, but their spaces differ"):
        mapped.leave("c")
        mapped.register("c", MULTI)


def test_the_five_answers_differ_and_are_counted() -> None:
    """Trap 29: a full buffer is not the same as not yet enough; trap 10: the actor's stamp is judged, not replaced."""
    learners = Learners()
    registry = learners.registry(readiness=Readiness(min_steps=10), capacity=12, max_version_lag=1)
    registry.register("a", DISCRETE)
    learners.versions["a"] = PolicyVersion(incarnation=2, step=5)
    answers = [
        registry.submit(r).status.value
        for r in (
            rollout("a", step=4), rollout("a", step=5, incarnation=2), rollout("a", step=4), rollout("a", step=4),
            rollout("a", step=3), rollout("a", step=6, incarnation=2), rollout("a", step=6), rollout("z"),
            rollout("a", spaces=CONTINUOUS, step=5),
        )
    ]  # fmt: skip
    assert answers == ["accepted", "accepted", "ready", "full", "stale", "invalid", "stale", "invalid", "invalid"]
    assert registry.counts == {
        "a/accepted": 2, "a/ready": 1, "a/full": 1, "a/stale": 2, "a/invalid": 2, "?/invalid": 1
    }  # fmt: skip
    assert registry.submit(rollout("z")).reason == "agent 'z' is not registered"
    assert "actions has shape (4, 2)" in registry.submit(rollout("a", spaces=CONTINUOUS, step=5)).reason
    assert [r.version.step for r in registry.take(["a"])["a"]] == [4, 5, 4]


def test_age_is_judged_when_data_are_consumed() -> None:
    """Trap 28: what grew too old while it waited is left out before anything is computed, and counted."""
    learners = Learners()
    registry = learners.registry()
    registry.register("a", DISCRETE)
    registry.submit(rollout("a", step=0))
    learners.versions["a"] = PolicyVersion(incarnation=1, step=1)
    registry.submit(rollout("a", step=1))
    learners.versions["a"] = PolicyVersion(incarnation=1, step=2)
    taken = registry.take(registry.ready())
    assert [r.version.step for r in taken["a"]] == [1] and registry.counts["a/dropped"] == 1


def test_a_policy_whose_data_are_all_stale_is_skipped_and_can_go_on() -> None:
    """Traps 2 and 3: results come by name, and nobody's learner is lost."""
    learners = Learners()
    registry = learners.registry()
    for name in "ab":
        registry.register(name, DISCRETE)
        registry.submit(rollout(name))
    learners.versions["a"] = PolicyVersion(incarnation=1, step=9)
    taken = registry.take(registry.ready())
    assert list(taken) == ["b"]
    registry.done(list(taken))
    registry.submit(rollout("a", step=9))
    assert registry.ready() == ("a",)


def test_each_policy_goes_at_its_own_pace() -> None:
    """Trap 4: a dead agent blocks nobody."""
    registry = Learners().registry(readiness=Readiness(min_steps=4))
    for name in ("fast", "dead"):
        registry.register(name, DISCRETE)
    assert registry.submit(rollout("fast")).status is SubmitStatus.READY
    assert registry.ready() == ("fast",)


def test_together_with_quorum_and_timeout() -> None:
    ready = Readiness(trajectories=2, together=True, quorum=0.6, timeout=10)
    registry = Learners().registry(readiness=ready)
    for name in "abc":
        registry.register(name, DISCRETE)
    for _ in range(2):
        registry.submit(rollout("a"), now=100)
    assert registry.ready(now=100) == () and registry.ready(now=109.9) == ()
    assert registry.ready(now=110) == ("a",)  # without the others
    registry.submit(rollout("b"), now=111)
    assert registry.submit(rollout("b"), now=105).status is SubmitStatus.READY  # two of three
    assert registry.ready(now=105) == ("a", "b")
    registry.take(("a", "b"))
    registry.done(("a", "b"))
    assert registry.ready(now=500) == ()
    registry.submit(rollout("a"), now=500)
    registry.submit(rollout("a"), now=500)
    assert registry.ready(now=509) == () and registry.ready(now=510) == ("a",)  # the clock began anew


def test_readiness_does_not_fire_again_while_a_policy_trains() -> None:
    """Trap 34."""
    registry = Learners().registry()
    registry.register("a", DISCRETE)
    registry.submit(rollout("a"))
    registry.take(registry.ready())
    assert registry.submit(rollout("a")).status is SubmitStatus.ACCEPTED and registry.ready() == ()
    registry.done(["a"])
    assert registry.ready() == ("a",)


def test_a_cut_that_ends_no_episode_counts_as_data() -> None:
    """Trap 17: readiness and what is taken never disagree."""
    registry = Learners().registry(readiness=Readiness(trajectories=3))
    registry.register("a", DISCRETE)
    for _ in range(3):
        registry.submit(random_rollout(1, 5, agent="a", ends=0.0))
    assert len(registry.take(registry.ready())["a"]) == 3


def test_agents_leave_and_policies_are_forgotten() -> None:
    registry = Learners().registry(policies={"a": "team", "b": "team"})
    for name in "ab":
        registry.register(name, DISCRETE)
    registry.submit(rollout("a"))
    assert registry.leave("a") is False and registry.leave("b") is True
    assert registry.submit(rollout("a")).status is SubmitStatus.INVALID
    assert registry.ready() == ("team",)  # what it sent stays
    assert registry.forget("team") == "learner of team" and registry.policies == ()


def test_restored_is_as_it_was() -> None:
    registry = Learners().registry()
    registry.register("a", DISCRETE)
    registry.submit(rollout("a", steps=7))
    other = Learners().registry()
    other.register("a", DISCRETE)
    other.restore(registry.waiting(), registry.counts)
    assert other.counts == registry.counts and np.array_equal(
        other.take(["a"])["a"][0].rewards, rollout("a", 7).rewards
    )
