"""The gate against numbers worked out by hand, rows K1 to K9 of spec/market.md 4.2, and its rate over a thousand
steps."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_toys import credited

from sparring.errors import CheckpointError, TrainingError
from sparring.learning.advantages import CreditedTurn
from sparring.learning.gate import Gate, GateDecision, GateState, aimed_rate, quantile_price, sigmoid, soft_price
from sparring.learning.losses import policy_gradient
from sparring.learning.settings import GateSettings

FIXTURE = Path(__file__).parent.parent / "fixtures" / "kondo_gate.json"
COLD = {"warmup_replies": 0}


def weights(decision: GateDecision) -> list[list[float]]:
    return [list(turn.weights) for turn in decision.turns]


def batch_of(
    dice: np.random.Generator,
    tick: int,
    *,
    replies: int = 30,
    tokens: int = 20,
    size: float = 1.0,
    teams: tuple[str, ...] = ("red", "blue", "gray"),
) -> list[CreditedTurn]:
    return [
        credited(
            i,
            float(size * dice.normal()),
            team=teams[i % len(teams)],
            log_probs=(-dice.exponential(size=tokens)).tolist(),
            tick=tick,
        )
        for i in range(replies)
    ]


# ------------------------------------------------------------------------------------------------------------- by hand


def test_fixed_price_by_hand() -> None:
    gate = Gate(GateSettings(price=0.9, **COLD), seed=0)
    turns = [
        credited(0, 2.0, log_probs=(-0.5, -0.4, -3.0)),  # delight 1.0, 0.8, 6.0
        credited(1, -1.0, log_probs=(-0.1, -2.0)),  # -0.1, -2.0
        credited(2, 0.3, log_probs=(-3.0,)),  # 0.9, not above
    ]
    assert weights(gate.weigh(turns)) == [[1.0, 0.0, 1.0], [0.0, 1.0], [0.0]]
    signed = Gate(GateSettings(price=0.9, sign_split=False, **COLD), seed=0)
    assert weights(signed.weigh(turns)) == [[1.0, 0.0, 1.0], [0.0, 0.0], [0.0]]


def test_delight_weights_by_hand() -> None:
    gate = Gate(GateSettings(mode="delight", temperature=2.0), seed=0)
    found = weights(gate.weigh([credited(0, 2.0, log_probs=(-1.0, 0.0)), credited(1, -2.0, log_probs=(-1.0,))]))
    assert found == [[pytest.approx(1 / (1 + math.exp(-1.0))), 0.5], [pytest.approx(1 / (1 + math.exp(1.0)))]]


def test_reply_delight_by_hand() -> None:
    turns = [credited(0, 1.0, log_probs=(-1.0, -2.0)), credited(1, 1.0, log_probs=(-2.5,))]
    total = Gate(GateSettings(unit="reply", price=2.7, **COLD), seed=0)
    assert weights(total.weigh(turns)) == [[1.0, 1.0], [0.0]]  # sums 3.0 and 2.5
    mean = Gate(GateSettings(unit="reply", price=2.0, reply_surprisal="mean", **COLD), seed=0)
    assert weights(mean.weigh(turns)) == [[0.0, 0.0], [1.0]]  # means 1.5 and 2.5


def test_off_keeps_all_that_has_an_advantage() -> None:
    gate = Gate(GateSettings(mode="off"), seed=0)
    assert weights(gate.weigh([credited(0, 1.0), credited(1, -1e-5), credited(2, 0.0)])) == [[1, 1], [1, 1], [0, 0]]


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_price_keeps_exactly_the_rate_of_its_pool(values: list[int], rate: float) -> None:
    pool = np.array(values, dtype=np.float64)
    price, share = quantile_price(pool, rate)
    kept = np.count_nonzero(pool > price) + share * np.count_nonzero(pool == price)
    assert kept == pytest.approx(rate * len(pool))


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.floats(0.01, 0.99), st.floats(0.05, 3.0))
def test_a_soft_price_keeps_the_rate_in_expectation(values: list[float], rate: float, temperature: float) -> None:
    pool = np.array(values)
    price = soft_price(pool, rate, temperature)
    assert sigmoid((pool - price) / temperature).mean() == pytest.approx(rate, abs=1e-6)


def test_aimed_rate_by_hand() -> None:
    assert aimed_rate(0.1, 7.0, 10) == pytest.approx(0.1 * math.e)  # 7 / (5 + 2 x 0.1 x 10)
    assert aimed_rate(0.01, 1e9, 10) == pytest.approx(0.16)
    assert aimed_rate(0.1, -1e9, 10) == pytest.approx(0.1 / 64)
    assert aimed_rate(0.5, 1e9, 10) == 1.0


# --------------------------------------------------------------------------------------------------------- rows K1 - K9


@pytest.mark.parametrize("count", [1, 2, 5, 10, 20, 30, 34])
def test_k1_small_batches_keep_the_rate_on_average(count: int) -> None:
    """Per reply, at 3 %, one team, one sign: the original kept 20 % of 5 replies and 3.3 % of 30."""
    gate = Gate(GateSettings(unit="reply", **COLD), seed=count)
    dice = np.random.default_rng(count)
    kept, empty = 0, 0
    for tick in range(2000):
        turns = [credited(i, float(dice.exponential()), log_probs=(-1.0,), tick=tick) for i in range(count)]
        now = sum(map(sum, weights(gate.weigh(turns))))
        kept += int(now)
        empty += now == 0
    assert kept / (2000 * count) == pytest.approx(0.03, rel=0.1 if count > 1 else 0.2)
    assert empty > 0  # an empty step is allowed


def test_k2_neither_sign_nor_team_starves() -> None:
    """Red earns much and often, blue's lessons are all negative: each keeps its 3 %."""
    gate = Gate(GateSettings(**COLD), seed=0)
    dice = np.random.default_rng(0)
    kept = {("red", 1): 0, ("blue", -1): 0, ("red", -1): 0}
    seen = dict.fromkeys(kept, 0)
    for tick in range(300):
        turns = []
        for i in range(30):
            team, sign = [("red", 1), ("red", 1), ("red", -1), ("blue", -1)][i % 4]
            advantage = float(sign * (100.0 if sign > 0 else 0.1) * dice.exponential())
            log_probs = (-dice.exponential(size=10)).tolist()
            turns.append(credited(i, advantage, team=team, log_probs=log_probs, tick=tick))
        for turn in gate.weigh(turns).turns:
            key = (turn.credited.settlement.turn.team, 1 if turn.credited.advantage > 0 else -1)
            kept[key] += int(sum(turn.weights))
            seen[key] += len(turn.weights)
    for key in kept:
        assert kept[key] / seen[key] == pytest.approx(0.03, rel=0.1), key


@pytest.mark.parametrize("mode", ["kondo", "delight", "uniform", "off"])
def test_k2_violations_are_always_kept(mode: str) -> None:
    gate = Gate(GateSettings(mode=mode, **COLD), seed=0)  # type: ignore[arg-type]
    dice = np.random.default_rng(0)
    for tick in range(50):
        turns = [credited(99, -1e-3, log_probs=(-1e-6, 0.0, -1.0), violation=True, tick=tick), *batch_of(dice, tick)]
        decision = gate.weigh(turns)
        assert decision.turns[-1].weights == (1.0, 1.0, 1.0)
        assert [r.forced_replies for r in decision.reports if r.team == "blue"] == [1]
    loose = Gate(GateSettings(keep_violations=False, price=1.0, **COLD), seed=0)
    assert weights(loose.weigh([credited(0, -1e-3, violation=True)])) == [[0.0, 0.0]]
    # No gradient, or a wrong one, is never forced in.
    assert weights(Gate(GateSettings(price=1.0), seed=0).weigh([credited(0, 0.0, violation=True)])) == [[0.0, 0.0]]
    assert weights(Gate(GateSettings(price=1.0), seed=0).weigh([credited(0, 0.1, violation=True)])) == [[0.0, 0.0]]


@pytest.mark.parametrize("mode", ["kondo", "delight", "uniform", "off"])
def test_k3_equal_rewards_keep_nothing(mode: str) -> None:
    gate = Gate(GateSettings(mode=mode), seed=0)  # type: ignore[arg-type]
    decision = gate.weigh([credited(i, 0.0) for i in range(30)])
    assert weights(decision) == [[0.0, 0.0]] * 30
    assert decision.reports[0].kept_replies == 0


def test_k3_ties_do_not_open_the_gate() -> None:
    """All delights equal: still 3 %, not all 30."""
    gate = Gate(GateSettings(**COLD), seed=0)
    kept = sum(
        sum(map(sum, weights(gate.weigh([credited(i, 1.0, log_probs=(-1.0,), tick=t) for i in range(30)]))))
        for t in range(500)
    )
    assert kept / 15000 == pytest.approx(0.03, rel=0.1)


def test_k4_a_price_can_refuse_a_whole_batch_and_nan_is_loud() -> None:
    gate = Gate(GateSettings(price=0.5, sign_split=False, **COLD), seed=0)
    assert sum(map(sum, weights(gate.weigh([credited(i, -1.0 - i) for i in range(10)])))) == 0
    before = gate.state()[1]
    for bad in (
        credited(0, math.nan),
        credited(0, math.inf),
        credited(0, 1.0, log_probs=(-1.0, math.nan)),
        credited(0, 1.0, log_probs=(-math.inf,)),
    ):
        with pytest.raises(TrainingError, match="0/a0000/0"):
            gate.weigh([credited(1, 1.0), bad])
    assert gate.state()[1] == before
    short = credited(0, 1.0)
    turn = dataclasses.replace(short.settlement.turn, log_probs=(-0.1,))
    torn = CreditedTurn(settlement=dataclasses.replace(short.settlement, turn=turn), advantage=1.0)
    with pytest.raises(TrainingError, match="1 log-probs for 2"):
        gate.weigh([torn])


def test_k5_nothing_is_forced_when_nothing_passes() -> None:
    gate = Gate(GateSettings(price=1e9, **COLD), seed=0)
    assert sum(map(sum, weights(gate.weigh([credited(i, 1.0) for i in range(10)])))) == 0


def test_k6_k7_reports_have_one_meaning_with_every_mode() -> None:
    for mode in ("kondo", "delight", "uniform", "off"):
        gate = Gate(GateSettings(mode=mode), seed=0)  # type: ignore[arg-type]
        report = gate.weigh([credited(0, 2.0), credited(1, -1.0), credited(2, 0.0)]).reports[0]
        assert (report.policy, report.team, report.rate) == ("shared", "blue", 0.30)
        assert (report.eligible_replies, report.eligible_tokens, report.candidate_tokens) == (3, 6, 4)
        assert report.mean_delight == pytest.approx((2.0 * 0.75 - 0.75) / 6)  # signed, over eligible tokens


def test_a4_warm_up_counts_eligible_replies_of_the_policy() -> None:
    gate = Gate(GateSettings(warmup_replies=500), seed=0)
    dice = np.random.default_rng(0)
    rates = []
    for tick in range(20):
        rates.append(gate.weigh(batch_of(dice, tick)).reports[0].rate)
    assert rates == [0.30] * 17 + [0.03] * 3  # 17 x 30 >= 500
    assert gate.rate("another policy") == 0.30
    uncounted = [dataclasses.replace(credited(i, 0.0), counted=False) for i in range(600)]
    other = Gate(GateSettings(), seed=0)
    other.weigh(uncounted)
    assert other.rate("shared") == 0.30


# ------------------------------------------------------------------------------------------- rate, determinism, resume


@pytest.mark.parametrize(
    ("unit", "bernoulli", "drift"),
    [
        ("token", False, "steady"),
        ("token", False, "grows 20x"),
        ("token", False, "shrinks 20x"),
        ("reply", False, "steady"),
        ("reply", False, "grows 20x"),
        ("reply", False, "shrinks 20x"),
        ("token", True, "grows 20x"),
        ("reply", True, "steady"),
    ],
)
def test_rate_is_met_over_a_thousand_steps(unit: str, bernoulli: bool, drift: str) -> None:
    """30 replies a tick, three teams; kept within 10 % of 3 % in all, and in each team."""
    gate = Gate(GateSettings(unit=unit, bernoulli=bernoulli, **COLD), seed=7)  # type: ignore[arg-type]
    dice = np.random.default_rng(7)
    kept = dict.fromkeys(("red", "blue", "gray"), 0.0)
    seen = dict.fromkeys(kept, 0.0)
    for tick in range(1000):
        factor = 20.0 ** (tick / 1000)
        size = {"steady": 1.0, "grows 20x": factor, "shrinks 20x": 1 / factor}[drift]
        for turn in gate.weigh(batch_of(dice, tick, size=size, tokens=8)).turns:
            team = turn.credited.settlement.turn.team
            kept[team] += sum(turn.weights) if unit == "token" else turn.weights[0]
            seen[team] += len(turn.weights) if unit == "token" else 1
    overall = sum(kept.values()) / sum(seen.values())
    print(f"gate rate per {unit}, bernoulli {bernoulli}, {drift}: {overall:.5f}")
    assert overall == pytest.approx(0.03, rel=0.1)
    for team in kept:
        assert kept[team] / seen[team] == pytest.approx(0.03, rel=0.1), team


def test_uniform_keeps_the_rate_without_looking() -> None:
    gate = Gate(GateSettings(mode="uniform", **COLD), seed=0)
    dice = np.random.default_rng(0)
    kept = high = total = 0.0
    for tick in range(300):
        for turn in gate.weigh(batch_of(dice, tick)).turns:
            kept += sum(turn.weights)
            total += len(turn.weights)
            log_probs = turn.credited.settlement.turn.log_probs
            high += sum(w for w, lp in zip(turn.weights, log_probs, strict=True) if lp < -math.log(2))
    assert kept / total == pytest.approx(0.03, rel=0.05)
    assert high / kept == pytest.approx(0.5, abs=0.03)  # half of all exponential surprisals exceed log 2


@pytest.mark.parametrize(
    "settings",
    [
        GateSettings(warmup_replies=100),
        GateSettings(warmup_replies=100, bernoulli=True),
        GateSettings(mode="uniform"),
        GateSettings(unit="reply", rate=0.2, history=64),
        GateSettings(sign_split=False),
    ],
)
def test_permutation_and_resume_change_nothing(settings: GateSettings) -> None:
    dice = np.random.default_rng(1)
    batches = [batch_of(dice, tick) for tick in range(12)]
    whole = Gate(settings, seed=5)
    expected = [whole.weigh(batch) for batch in batches]
    assert any(any(turn.weights) for decision in expected for turn in decision.turns)
    shuffler = random.Random(0)
    other = Gate(settings, seed=5)
    for batch, wanted in zip(batches, expected, strict=True):
        shuffled = shuffler.sample(batch, len(batch))
        assert other.weigh(shuffled) == wanted
        arrays, record = other.state()
        other = Gate(settings, seed=5)
        other.load_state(arrays, msgspec.json.decode(msgspec.json.encode(record), type=GateState))
    arrays, record = whole.state()
    assert record == other.state()[1]
    assert all(np.array_equal(arrays[name], other.state()[0][name]) for name in arrays)
    assert all(len(values) <= settings.history for values in arrays.values())
    if settings.mode == "uniform":
        assert Gate(settings, seed=6).weigh(batches[0]) != expected[0]


def test_a_torn_state_is_refused() -> None:
    gate = Gate(GateSettings(), seed=0)
    gate.weigh(batch_of(np.random.default_rng(0), 0))
    arrays, record = gate.state()
    with pytest.raises(CheckpointError):
        Gate(GateSettings(), seed=0).load_state({}, record)
    with pytest.raises(CheckpointError):
        Gate(GateSettings(), seed=0).load_state(arrays | {"history/0": np.array([np.nan])}, record)


def test_history_of_a_huge_batch_is_thinned() -> None:
    gate = Gate(GateSettings(history=50, **COLD), seed=0)
    gate.weigh([credited(i, 1.0, log_probs=(-1.0,) * 10) for i in range(100)])
    assert len(gate.state()[0]["history/0"]) == 50


# ------------------------------------------------------------------------------------------- against the public package


@pytest.mark.parametrize("case", json.loads(FIXTURE.read_text())["cases"], ids=lambda case: f"rate {case['rate']}")
def test_agrees_with_kondo_gate(case: dict[str, Any]) -> None:
    """PyPI's kondo-gate 0.1.0 keeps delight >= the batch's quantile: our first batch, one sign, when rate x tokens is
    whole. Its loss is divided by all tokens, like ours. Made by tests/fixtures/make_references.py."""
    rate, advantages, log_probs = case["rate"], case["advantages"], case["log_probs"]
    turns = [credited(i, a, log_probs=row) for i, (a, row) in enumerate(zip(advantages, log_probs, strict=True))]
    same = {
        "quantile": GateSettings(rate=rate, sign_split=False, **COLD),
        "price": GateSettings(price=rate, sign_split=False, **COLD),
        "sigmoid": GateSettings(mode="delight"),
    }
    for name, how in same.items():
        ours = weights(Gate(how, seed=0).weigh(turns))
        np.testing.assert_allclose(ours, case[name]["weights"], rtol=1e-6)
        flat = [torch.tensor(values).flatten() for values in (log_probs, ours)]
        loss = policy_gradient(
            flat[0], torch.zeros(100), torch.tensor(advantages).repeat_interleave(10), flat[1], normaliser=100,
            ratio_cap=2.0,
        )  # fmt: skip
        assert loss.item() == pytest.approx(case[name]["loss"], rel=1e-5)


def test_control_priorities_by_hand() -> None:
    turns = [
        credited(0, 2.0, log_probs=(-0.5, -0.1)),
        credited(1, -3.0, log_probs=(-0.2, -0.7)),
        credited(2, 1.0, log_probs=(-4.0,)),
    ]
    expected = {  # price 0.6
        "delight": [[1, 0], [0, 0], [1]],
        "advantage": [[1, 1], [0, 0], [1]],
        "abs_advantage": [[1, 1], [1, 1], [1]],
        "surprisal": [[0, 0], [0, 1], [1]],
    }
    for priority, wanted in expected.items():
        settings = GateSettings(priority=priority, price=0.6, sign_split=False, **COLD)  # type: ignore[arg-type]
        assert weights(Gate(settings, seed=0).weigh(turns)) == wanted, priority
    split = GateSettings(priority="advantage", price=2.5, **COLD)
    assert weights(Gate(split, seed=0).weigh(turns)) == [[0, 0], [1, 1], [0]]
    whole = GateSettings(priority="surprisal", price=0.8, unit="reply", sign_split=False, **COLD)
    assert weights(Gate(whole, seed=0).weigh(turns)) == [[0, 0], [1, 1], [1]]


@pytest.mark.parametrize("priority", ["advantage", "abs_advantage", "surprisal"])
@pytest.mark.parametrize("unit", ["token", "reply"])
def test_control_priorities_meet_the_rate(priority: str, unit: str) -> None:
    """All tokens of a reply have one advantage: ties, of which the rate is still kept."""
    gate = Gate(GateSettings(priority=priority, unit=unit, rate=0.05, **COLD), seed=1)  # type: ignore[arg-type]
    dice = np.random.default_rng(1)
    kept = total = 0.0
    for tick in range(300):
        for row in weights(gate.weigh(batch_of(dice, tick))):
            kept, total = kept + sum(row), total + len(row)
    assert kept / total == pytest.approx(0.05, rel=0.1)
