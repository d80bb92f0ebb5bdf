"""Open paths: by agent and environment, cut without gluing, every boundary with its successor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_fixtures import DISCRETE, random_rollout
from sparring.intake.check import problem
from sparring.intake.paths import OpenPaths, PathError
from sparring.types import PolicyVersion, Rollout, Transition


def step(number: float, agent: str = "a", environment: int = 0, episode: int = 0, **other: Any) -> Transition:
    fields: dict[str, Any] = {
        "agent": agent, "environment": environment, "episode": episode, "log_prob": -0.5, "reward": number,
        "version": PolicyVersion(incarnation=1, step=0), "observation": np.full(3, number, np.float32),
        "action": np.array([1]),
    }  # fmt: skip
    return Transition(**{**fields, **other})


def test_environments_and_agents_are_never_glued_together() -> None:
    """Trap 7: two environments of one agent, interleaved."""
    paths = OpenPaths()
    for t in range(3):
        for environment in (0, 1):
            assert paths.add(step(10 * environment + t, environment=environment)) is None
        paths.add(step(100 + t, agent="b"))
    one, two = paths.close("a", 0, np.zeros(3, np.float32)), paths.close("a", 1, np.ones(3, np.float32))
    assert one is not None and two is not None
    assert one.rewards.tolist() == [0, 1, 2] and two.rewards.tolist() == [10, 11, 12]
    assert one.final_observations.tolist() == [[0, 0, 0]] and two.final_observations.tolist() == [[1, 1, 1]]
    assert paths.open_steps() == {("b", 0): 3}
    assert problem(one, DISCRETE) == ""


def test_a_cut_takes_the_next_observation_as_successor() -> None:
    """Traps 16 and 17: a cut that ends no episode closes a rollout, and bootstraps from s', not from s."""
    paths = OpenPaths(max_steps=2)
    assert paths.add(step(0)) is None and paths.add(step(1)) is None
    out = paths.add(step(2))
    assert out is not None and out.rewards.tolist() == [0, 1]
    assert out.final_observations.tolist() == [[2, 2, 2]] and not out.truncated.any()
    out = paths.close("a", 0, np.full(3, 3, np.float32))
    assert out is not None and out.rewards.tolist() == [2] and out.final_observations.tolist() == [[3, 3, 3]]
    assert paths.close("a", 0) is None


def test_flags_belong_to_their_steps() -> None:
    """Trap 7, second half: a truncation and a termination in one rollout."""
    paths = OpenPaths(max_steps=4)
    seen = np.full(3, 9, np.float32)
    paths.add(step(0, truncated=True, final_observation=seen))
    paths.add(step(1, episode=1))
    paths.add(step(2, episode=1, terminated=True))
    out = paths.add(step(3, episode=2, terminated=True, truncated=True))
    assert out is not None and out.terminated.tolist() == [False, False, True, True]
    assert out.truncated.tolist() == [True, False, False, True]
    assert out.bootstraps.tolist() == [True, False, False, False] and out.final_observations.tolist() == [[9, 9, 9]]


def test_memory_grows_with_what_is_there_not_with_the_limit() -> None:
    """Trap 38: the original once asked for 24 GB for paths that might have become long."""
    import tracemalloc

    tracemalloc.start()
    paths = OpenPaths(max_steps=10**12)
    for environment in range(100):
        paths.add(step(0, environment=environment))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_new_version_begins_a_new_rollout() -> None:
    paths = OpenPaths()
    paths.add(step(0))
    newer = PolicyVersion(incarnation=1, step=1)
    out = paths.add(step(1, version=newer))
    assert out is not None and len(out) == 1 and out.version.step == 0
    out = paths.close("a", 0, np.zeros(3, np.float32))
    assert out is not None and out.version == newer


def test_what_does_not_continue_its_path_is_refused() -> None:
    paths = OpenPaths()
    with pytest.raises(PathError, match="final_observation is missing"):
        paths.add(step(0, truncated=True))
    paths.add(step(0))
    with pytest.raises(PathError, match="has not ended"):
        paths.add(step(1, episode=1))
    with pytest.raises(PathError, match="observation is missing"):
        paths.close("a", 0)
    assert paths.open_steps() == {("a", 0): 1}
    paths.add(step(1, mask=np.ones(4, np.bool_)))
    with pytest.raises(PathError, match="give it at every step"):
        paths.close("a", 0, np.zeros(3, np.float32))


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 30), cut=st.integers(1, 9), state=st.booleans())
@settings(max_examples=60, deadline=None)
def test_however_it_is_cut_nothing_is_lost(seed: int, steps: int, cut: int, state: bool) -> None:
    whole = random_rollout(seed, steps, masked=True, state_size=2 if state else 0)
    paths, out = OpenPaths(max_steps=cut), list[Rollout]()
    finals, final_states, episode = list(whole.final_observations), list(whole.final_states if state else []), 0
    needs = whole.bootstraps
    for t in range(steps):
        ends = bool(needs[t] and whole.truncated[t])
        got = paths.add(Transition(
            agent="a", environment=0, episode=episode, version=whole.version, observation=whole.observations[t],
            action=whole.actions[t], log_prob=float(whole.log_probs[t]), reward=float(whole.rewards[t]),
            terminated=bool(whole.terminated[t]), truncated=bool(whole.truncated[t]), mask=whole.masks[t],
            state=whole.states[t] if state else None, final_observation=finals.pop(0) if ends else None,
            final_state=final_states.pop(0) if ends and state else None,
        ))  # fmt: skip
        out += [] if got is None else [got]
        episode += bool(whole.terminated[t] or whole.truncated[t])
    got = paths.close("a", 0, finals[0] if finals else None, final_states[0] if final_states else None)
    out += [] if got is None else [got]
    assert sum(map(len, out)) == steps and max(map(len, out)) <= cut
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "masks"):
        assert np.array_equal(np.concatenate([getattr(r, name) for r in out]), getattr(whole, name))
    assert [problem(r, DISCRETE, state_size=2 if state else 0) for r in out] == [""] * len(out)
    assert sum(len(r.final_observations) for r in out) >= len(whole.final_observations)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": np.zeros(2, np.float32)}, "log_probs has shape (2,), expected (3,)"),
        ({"observations": np.zeros((3, 12), np.uint8)}, "observations has shape (3, 12)"),
        ({"observations": np.zeros((3, 3), np.uint8)}, "observations is of uint8: give floats"),
        ({"observations": np.full((3, 3), np.nan, np.float32)}, "observations holds a number that is not finite"),
        ({"actions": np.zeros((3, 1), np.float32)}, "actions is of float32: give whole numbers"),
        ({"actions": np.full((3, 1), 4)}, "actions holds a choice outside 0 to 3"),
        ({"actions": np.full((3, 1), -1)}, "actions holds a choice outside 0 to 3"),
        ({"final_observations": np.zeros((3, 3), np.float32)}, "final_observations has shape (3, 3)"),
        ({"masks": np.zeros((3, 4), np.bool_)}, "masks forbids every choice at row 0, part 0"),
        ({"masks": np.eye(4, dtype=np.bool_)[[0, 0, 0]], "actions": np.ones((3, 1), int)}, "a choice that masks forbids"),
        ({"masks": np.zeros((3, 12), np.bool_)}, "masks has shape (3, 12)"),
        ({"rewards": np.array([], np.float32)}, "it has no steps"),
        ({"rewards": [0.0, 0.0, 0.0]}, "rewards is a list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    """Traps 24 to 27: nothing is cut to fit, filled in, or read at another width."""
    rollout = random_rollout(0, 3, ends=0.0)
    assert problem(rollout, DISCRETE) == ""
    fields = {name: getattr(rollout, name) for name in Rollout.__slots__}
    assert message in problem(Rollout(**{**fields, **changes}), DISCRETE)


def test_a_centralised_critic_needs_its_state() -> None:
    assert "states is missing" in problem(random_rollout(0, 3), DISCRETE, state_size=2)
    assert problem(random_rollout(0, 3, state_size=2), DISCRETE, state_size=2) == ""
