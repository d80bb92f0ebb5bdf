"""The recorder of many lanes against open paths fed step by step: a second implementation of the same thing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_fixtures import DISCRETE, assert_same
from sparring.intake.check import problem
from sparring.intake.recorder import Recorder
from sparring.types import PolicyVersion, Rollout


def version(step: int) -> PolicyVersion:
    return PolicyVersion(incarnation=1, step=step)


class World:
    """Random acting, rewards and ends for two agents in three environments, with the observation of every lane."""

    def __init__(self, seed: int, *, everybody: bool) -> None:
        self.rng, self.everybody = np.random.default_rng(seed), everybody
        self.look()

    def look(self) -> None:
        self.seen = self.rng.normal(size=(2, 3, 3)).astype(np.float32)
        self.states = self.rng.normal(size=(2, 3, 2)).astype(np.float32)
        self.acting = np.ones((2, 3), bool) if self.everybody else self.rng.random((2, 3)) < 0.6


def play(seed: int, cuts: list[int], *, everybody: bool, resume_at: int | None = None) -> tuple[list[Rollout], Any]:
    """Rollouts of all cuts, and by lane what happened, step by step."""
    world = World(seed, everybody=everybody)
    rng, out = np.random.default_rng(seed + 1), list[Rollout]()
    recorder = Recorder(("p", "q"), 3, 6, DISCRETE, masked=True, state_size=2)
    log: dict[tuple[int, int], list[dict[str, Any]]] = {(a, e): [] for a in range(2) for e in range(3)}
    for number, ticks in enumerate(cuts):
        if resume_at == number:
            arrays, versions = recorder.snapshot()
            recorder = Recorder(("p", "q"), 3, 6, DISCRETE, masked=True, state_size=2)
            recorder.restore(arrays, json.loads(json.dumps(versions)))
        for _ in range(ticks):
            actions = rng.integers(4, size=(2, 3, 1))
            masks = rng.random((2, 3, 4)) < 0.5
            np.put_along_axis(masks, actions, True, axis=2)
            log_probs = rng.normal(size=(2, 3)).astype(np.float32)
            recorder.act(world.seen, world.acting, actions, log_probs, masks, world.states)
            rewards = rng.normal(size=(2, 3)).astype(np.float32)
            terminated, truncated = rng.random((2, 3)) < 0.1, rng.random((2, 3)) < 0.1
            finals = rng.normal(size=(2, 3, 3)).astype(np.float32)
            final_states = rng.normal(size=(2, 3, 2)).astype(np.float32)
            for (a, e), steps in log.items():
                if world.acting[a, e]:
                    steps.append({"seen": world.seen[a, e].copy(), "action": actions[a, e], "reward": np.float32(0),
                                  "version": number, "end": None})  # fmt: skip
                if steps and steps[-1]["end"] is None:
                    steps[-1]["reward"] += rewards[a, e]
                    if terminated[a, e] or truncated[a, e]:
                        steps[-1]["end"] = (bool(terminated[a, e]), bool(truncated[a, e]), finals[a, e])
            recorder.settle(rewards, terminated, truncated, finals, final_states)
            world.look()
        out += recorder.cut([version(number)] * 2, world.seen, world.acting, world.states)
    return out, log


@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), everybody=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_lane_is_what_happened_in_it(seed: int, cuts: list[int], everybody: bool) -> None:
    """Rewards between an agent's turns, late ends, cuts in between: nothing lost, doubled or glued (traps 7, 17, 25)."""
    out, log = play(seed, cuts, everybody=everybody)
    assert [problem(each, DISCRETE, state_size=2) for each in out] == [""] * len(out)
    for (a, e), steps in log.items():
        own = [each for each in out if (each.agent, each.environment) == (("p", "q")[a], e)]
        count = sum(map(len, own))
        assert len(steps) - count in ((0,) if everybody else (0, 1))  # the last one may wait
        rows = steps[:count]
        if not rows:
            continue
        np.testing.assert_array_equal(np.concatenate([r.observations for r in own]), [s["seen"] for s in rows])
        np.testing.assert_allclose(np.concatenate([r.rewards for r in own]), [s["reward"] for s in rows], atol=1e-5)
        ends = [s["end"] or (False, False, None) for s in rows]
        assert np.concatenate([r.terminated for r in own]).tolist() == [end[0] for end in ends]
        assert np.concatenate([r.truncated for r in own]).tolist() == [end[1] for end in ends]
        assert [r.version.step for r in own for _ in range(len(r))] == [s["version"] for s in rows]
        at, episode = 0, 0
        for rollout in own:
            assert rollout.episode == episode
            finals = list(rollout.final_observations)
            for t in np.flatnonzero(rollout.bootstraps).tolist():
                final, end = finals.pop(0), steps[at + t]["end"]
                if end is not None:
                    np.testing.assert_array_equal(final, end[2])
                elif at + t + 1 < len(steps):
                    np.testing.assert_array_equal(final, steps[at + t + 1]["seen"])
            at += len(rollout)
            episode += int((rollout.terminated | rollout.truncated).sum())


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_between_two_cuts_loses_nothing(seed: int) -> None:
    straight, _ = play(seed, [3, 4, 5, 2], everybody=False)
    resumed, _ = play(seed, [3, 4, 5, 2], everybody=False, resume_at=2)
    for one, two in zip(straight, resumed, strict=True):
        assert_same(one, two)
