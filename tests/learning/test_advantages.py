"""Advantages against numbers worked out by hand, and rows A1 to A4 of spec/market.md 4.2."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning_toys import settlement

from sparring.errors import TrainingError
from sparring.learning.advantages import (
    BaselineState,
    Credits,
    credit,
    group_relative,
    leave_one_out,
)
from sparring.learning.settings import AdvantageSettings

PLAIN = AdvantageSettings(scale="none")


def values(credits: Credits) -> list[float]:
    return [turn.advantage for turn in credits.turns]


def test_leave_one_out_by_hand() -> None:
    # others' means: 2.5, 1.5, 1.0, 2/3... for rewards 0, 2, 3 and the pair (1, 0)
    assert leave_one_out([0.0, 2.0, 4.0]) == [-3.0, 0.0, 3.0]
    assert leave_one_out([1.0, 0.0]) == [1.0, -1.0]
    assert leave_one_out([7.0]) == [0.0]
    assert leave_one_out([]) == []


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_leave_one_out_is_the_definition(rewards: list[float]) -> None:
    for index, value in enumerate(leave_one_out(rewards)):
        others = rewards[:index] + rewards[index + 1 :]
        assert value == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-7)


def test_group_relative_by_hand() -> None:
    assert group_relative([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    std = math.sqrt(0.1875)
    assert group_relative([1.0, 0.0, 0.0, 0.0], deviation_floor=0.01) == pytest.approx([0.75 / std] + [-0.25 / std] * 3)
    assert group_relative([0.002, 0.0], deviation_floor=0.01) == pytest.approx([0.1, -0.1])  # the floor holds


def test_each_policy_and_team_has_its_own_baseline() -> None:
    batch = [
        settlement(0, 1.0, team="red"),
        settlement(1, 3.0, team="red"),
        settlement(2, 10.0, team="blue"),
        settlement(3, 20.0, team="blue"),
        settlement(4, 100.0, team="blue", policy="other"),
        settlement(5, 300.0, team="blue", policy="other"),
    ]
    credits, _ = credit(batch, PLAIN, BaselineState())
    assert values(credits) == [-2.0, 2.0, -10.0, 10.0, -200.0, 200.0]


def test_unscored_is_left_out_and_never_zero() -> None:
    credits, state = credit([settlement(0, 4.0), settlement(1, None), settlement(2, 2.0)], PLAIN, BaselineState())
    assert values(credits) == [2.0, -2.0]
    assert (credits.unscored, state.roles[0].mean) == (1, 3.0)


@pytest.mark.parametrize("kind", ["leave_one_out", "running"])
def test_a1_order_changes_nothing(kind: str) -> None:
    """Red, blue, gray in any order: the same advantages and the same state, bit for bit."""
    settings = AdvantageSettings(kind=kind)  # type: ignore[arg-type]
    dice = random.Random(1)
    teams = ["red", "blue", "gray"]
    earlier = [settlement(i, dice.random(), team=teams[i % 3], tick=9) for i in range(9)]
    _, before = credit(earlier, settings, BaselineState())
    batch = [settlement(i, dice.gauss(teams.index(teams[i % 3]), 1.0), team=teams[i % 3]) for i in range(60)]
    first = credit(batch, settings, before)
    for _ in range(5):
        dice.shuffle(batch)
        assert credit(batch, settings, before) == first
    assert credit(sorted(batch, key=lambda s: s.turn.team), settings, before) == first


@pytest.mark.parametrize("kind", ["leave_one_out", "running"])
def test_a1_a_tiny_difference_after_equal_rewards_stays_tiny(kind: str) -> None:
    settings = AdvantageSettings(kind=kind)  # type: ignore[arg-type]
    state = BaselineState()
    for tick in range(25):
        credits, state = credit([settlement(0, 0.1, tick=tick), settlement(1, 0.1, tick=tick)], settings, state)
        assert values(credits) == [0.0, 0.0]
    credits, _ = credit([settlement(0, 0.1), settlement(1, 0.1 + 1e-6)], settings, state)
    assert max(map(abs, values(credits))) == pytest.approx(1e-4, rel=1e-3)  # the original gave 10
    credits, _ = credit([settlement(i, 0.1 + (i == 25) * 1e-6) for i in range(26)], settings, BaselineState())
    assert max(map(abs, values(credits))) == pytest.approx(1e-4, rel=1e-3)


def test_a_rare_reward_after_equal_ones_is_bounded() -> None:
    state = BaselineState()
    for tick in range(200):
        _, state = credit([settlement(i, 0.0, tick=tick) for i in range(10)], AdvantageSettings(), state)
    credits, _ = credit([settlement(i, float(i == 0)) for i in range(10)], AdvantageSettings(), state)
    assert max(map(abs, values(credits))) <= math.sqrt(10)


def test_a1_the_second_sample_ever_is_not_always_one() -> None:
    _, state = credit([settlement(0, 0.5)], PLAIN, BaselineState())
    credits, _ = credit([settlement(0, 0.6, tick=1)], AdvantageSettings(kind="running", scale="none"), state)
    assert values(credits) == pytest.approx([0.1])


def test_a2_the_baseline_leaves_the_sample_out() -> None:
    """Raising one's own reward by 1 raises one's advantage by exactly 1."""
    for kind in ("leave_one_out", "running"):
        settings = AdvantageSettings(kind=kind, scale="none")
        _, state = credit([settlement(0, 0.0), settlement(1, 1.0)], settings, BaselineState())
        low = values(credit([settlement(0, 1.0), settlement(1, 3.0)], settings, state)[0])[0]
        high = values(credit([settlement(0, 2.0), settlement(1, 3.0)], settings, state)[0])[0]
        assert high - low == 1.0


def test_running_uses_then_updates_once() -> None:
    settings = AdvantageSettings(kind="running", decay=0.75, scale="none")
    credits, state = credit([settlement(0, 1.0), settlement(1, 3.0)], settings, BaselineState())
    assert values(credits) == [-2.0, 2.0]  # no history: leave-one-out
    assert state.roles[0].mean == 2.0
    credits, state = credit([settlement(0, 6.0), settlement(1, 2.0), settlement(2, 2.5)], settings, state)
    assert values(credits) == [4.0, 0.0, 0.5]  # all against the same 2.0
    assert state.roles[0].mean == pytest.approx(2.0 + 0.25 * (3.5 - 2.0))
    assert state.roles[0].batches == 2


def test_running_scale_by_hand() -> None:
    settings = AdvantageSettings(kind="running", decay=0.5)
    credits, state = credit([settlement(0, 0.0), settlement(1, 2.0)], settings, BaselineState())
    assert values(credits) == [-1.0, 1.0]  # raw -2 and 2, root mean square 2
    credits, state = credit([settlement(0, 2.0), settlement(1, 1.0)], settings, state)
    assert values(credits) == [0.5, 0.0]  # raw 1 and 0 against mean 1, running root mean square 2
    assert state.roles[0].mean_square == 0.5 * 4.0 + 0.5 * 0.5


def test_a3_resume_is_exact_and_dropped_samples_move_nothing() -> None:
    settings = AdvantageSettings(kind="running")
    dice = random.Random(3)
    batches = [[settlement(i, dice.random(), team="rb"[i % 2], tick=t) for i in range(8)] for t in range(12)]
    state, whole = BaselineState(), []
    for batch in batches:
        credits, state = credit(batch, settings, state)
        whole.append(credits)
    again, resumed = BaselineState(), []
    for batch in batches:
        credits, again = credit(batch, settings, again)
        resumed.append(credits)
        again = msgspec.json.decode(msgspec.json.encode(again), type=BaselineState)  # saved and loaded after each
    assert (resumed, again) == (whole, state)
    _, after_nothing = credit([settlement(0, None, team="r")], settings, state)
    assert after_nothing == state


def test_groups() -> None:
    settings = AdvantageSettings(kind="group", scale="none")
    batch = [settlement(i, r) for i, r in enumerate([1.0, 0.0, 5.0, 2.0, 2.0, 9.0])]
    names = ["g", "g", "alone", "equal", "equal", "judge failed"]
    batch.append(settlement(6, None))
    groups = {s.turn.id: n for s, n in zip(batch, [*names, "judge failed"], strict=True)}
    credits, _ = credit(batch, settings, BaselineState(), groups=groups)
    assert [(t.settlement.turn.id.agent, t.advantage, t.counted) for t in credits.turns] == [
        ("a0000", 0.5, True),
        ("a0001", -0.5, True),
        ("a0003", 0.0, False),  # equal rewards leave the denominator
        ("a0004", 0.0, False),
    ]
    assert (credits.dropped, credits.unscored) == (2, 1)
    with pytest.raises(TrainingError, match="no group"):
        credit(batch, settings, BaselineState())


def test_bad_batches_are_refused() -> None:
    with pytest.raises(TrainingError, match="twice"):
        credit([settlement(0, 1.0), settlement(0, 2.0)], PLAIN, BaselineState())
    for value in (math.nan, math.inf):
        with pytest.raises(TrainingError, match="0/a0000/0"):
            credit([settlement(0, value)], PLAIN, BaselineState())
    credits, state = credit([], PLAIN, BaselineState())
    assert (credits.turns, state) == ((), BaselineState())


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_permutation_and_equal_rewards(rewards: list[float], dice: random.Random) -> None:
    batch = [settlement(i, r, team="rgb"[i % 3]) for i, r in enumerate(rewards)]
    first = credit(batch, AdvantageSettings(), BaselineState())
    dice.shuffle(batch)
    assert credit(batch, AdvantageSettings(), BaselineState()) == first
    equal, _ = credit([settlement(i, rewards[0]) for i in range(len(rewards))], AdvantageSettings(), BaselineState())
    assert values(equal) == [0.0] * len(rewards)
