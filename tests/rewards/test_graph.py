"""Rewards on graphs: the invariants of case 15, the hacks of section 7b, and the published figures of the classic rules."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_fixtures import path
from sparring.envs.graph.records import STAGES, AnswerFacts, GeneratorFacts, Query, Telemetry
from sparring.errors import ConfigError
from sparring.rewards import graph_classic as classic
from sparring.rewards.graph import (
    AnswererWeights,
    GeneratorWeights,
    answerer_reward,
    diversity,
    generator_rewards,
    learnability,
    similarity,
    team_work,
)

WEIGHTS = AnswererWeights(telemetry=0.1)


def answered(**fields: Any) -> AnswerFacts:
    return AnswerFacts(**{"parsed": True, "correct": False, "evidence_f1": 0.0, "steps": 1, "max_steps": 1, **fields})


telemetry = st.none() | st.builds(
    Telemetry, spawned=st.integers(0, 10**6), finished=st.integers(0, 10**6), critical_steps=st.integers(0, 99),
    breadth=st.integers(0, 99), depth=st.integers(0, 99),
)  # fmt: skip


@settings(deadline=None)
@given(st.booleans(), st.floats(0, 1), st.integers(1, 9), telemetry, st.floats(0, 1), st.floats(0, 1))
def test_wrong_with_anything_is_less_than_right_bare(
    parsed: bool, f1: float, left: int, t: Any, anneal: float, other: float
) -> None:
    wrong = answered(parsed=parsed, evidence_f1=f1, steps=1, max_steps=left, telemetry=t)
    right = answered(correct=True, steps=9, max_steps=9, telemetry=None)
    assert answerer_reward(wrong, WEIGHTS, anneal=anneal).total < answerer_reward(right, WEIGHTS, anneal=other).total  # type: ignore[operator]


def test_answerer_by_hand() -> None:
    total = answerer_reward(answered(correct=True, evidence_f1=0.5, steps=2, max_steps=4), AnswererWeights()).total
    assert total == pytest.approx(1.0 + 0.1 + 0.1 + 0.025)
    assert answerer_reward(answered(parsed=False), AnswererWeights()).total == 0.0
    spam = answered(evidence_f1=0.0)  # 17 fabricated edges and a wrong answer
    assert (
        answerer_reward(spam, WEIGHTS).total < answerer_reward(answered(correct=True, evidence_f1=0.5), WEIGHTS).total
    )  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"answerer\.correct"):
        AnswererWeights(correct=0.3)


def test_telemetry_is_paid_as_measured_and_anneals_to_nothing() -> None:
    busy = Telemetry(spawned=4, finished=2, critical_steps=3, breadth=2, depth=1)
    facts = answered(telemetry=busy)
    assert answerer_reward(facts, WEIGHTS, anneal=0.0).total == answerer_reward(answered(), WEIGHTS).total
    assert answerer_reward(facts, WEIGHTS, anneal=1.0).parts["telemetry"] == pytest.approx(0.1 * team_work(busy))
    assert 0.0 <= team_work(busy) <= 1.0


# ------------------------------------------------------------------------------------------------------------ generator


def made(query: Query | None, solved: int = 4, guess: float = 0.1, stage: int = STAGES) -> GeneratorFacts:
    return GeneratorFacts(query=query, stage=stage, solved=solved, attempts=8, guess_chance=guess)


queries = st.sampled_from(
    [path("a", "r"), path("a", "r", "s"), path("a", "s", "r"), path("b", "r"), path("b", "r", "t")]
)
facts_lists = st.lists(
    st.builds(made, queries, st.integers(0, 8), st.floats(0, 1)) | st.builds(lambda s: made(None, stage=s), st.integers(0, 4)),
    min_size=1, max_size=9,
)  # fmt: skip


@settings(deadline=None)
@given(facts_lists, st.randoms(use_true_random=False))
def test_rewards_follow_the_completions_through_any_order(batch: list[GeneratorFacts], rng: Random) -> None:
    before = generator_rewards(batch, GeneratorWeights())
    order = list(range(len(batch)))
    rng.shuffle(order)
    after = generator_rewards([batch[i] for i in order], GeneratorWeights())
    assert [after[place].total for place in range(len(batch))] == [before[i].total for i in order]
    for i, one in enumerate(batch):
        for j, other in enumerate(batch):
            if one == other:
                assert before[i] == before[j]
    for facts, reward in zip(batch, before, strict=True):
        assert reward.total is not None and (reward.total < 0) == (facts.query is None)


def test_four_identical_completions_earn_the_same() -> None:
    assert len({reward.total for reward in generator_rewards([made(path("a", "r"))] * 4, GeneratorWeights())}) == 1


def test_a_perfect_policy_earns_as_much_in_its_second_epoch() -> None:
    batch = [made(path(start, "r", "s")) for start in "abcd"]
    first, second = (generator_rewards(batch, GeneratorWeights()) for _ in range(2))
    assert first == second and all(reward.total and reward.total > 1 for reward in second)


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_learnability_peaks_at_half(attempts: int, data: Any) -> None:
    solved = data.draw(st.integers(0, attempts))
    assert learnability(solved, attempts) == learnability(attempts - solved, attempts)
    assert 0.0 <= learnability(solved, attempts) <= 1.0
    assert learnability(0, attempts) == learnability(attempts, attempts) == 0.0


def test_neither_the_impossible_nor_the_guessable_is_paid_as_learnable() -> None:
    weights = GeneratorWeights(diversity=0.0)
    rewards = generator_rewards(
        [made(path("a", "r"), 4), made(path("b", "r"), 0), made(path("c", "r"), 8), made(path("d", "r"), 4, guess=0.5)],
        weights,
    )
    assert [reward.total for reward in rewards] == [1.25, 0.25, 0.25, 0.25]


def test_invalid_by_stage() -> None:
    totals = [r.total for r in generator_rewards([made(None, stage=stage) for stage in range(5)], GeneratorWeights())]
    assert totals == sorted(totals) and totals[0] == -1.0 and totals[-1] == pytest.approx(-1 / 3)  # type: ignore[type-var]


def test_similarity_and_diversity_by_hand() -> None:
    one, other, far = path("a", "r", "s"), path("a", "r", "t"), path("b", "t")
    assert similarity(one, other) == similarity(other, one) == pytest.approx(0.3 + 0.25)
    assert similarity(one, path("a", "s", "r")) == pytest.approx(0.3)  # relations in another order: another task
    assert similarity(one, far) == 0.0 and similarity(one, one) == 1.0
    assert diversity([one, one, far]) == pytest.approx([0.5, 0.5, 1.0])
    assert diversity([one]) == [1.0] and diversity([None]) == [None]


# -------------------------------------------------------------------------------------------------------------- classic


def classic_answer(right: bool, **fields: Any) -> classic.ClassicAnswer:
    return classic.ClassicAnswer(**{
        "answer": "user_1", "right": right, "named_edges": 0, "gold_named": 0, "gold_edges": 2, "deducible": False,
        "connectivity": -1.0, **fields,
    })  # fmt: skip


def test_classic_reproduces_the_published_figures() -> None:
    boast = classic.team_shaping(spawned=2, finished=2, critical=1, breadth=2, depth=1)
    assert boast == pytest.approx(0.3252, abs=5e-5)
    right, wrong = classic.answer_reward(classic_answer(True)), classic.answer_reward(classic_answer(False))
    assert (right, wrong) == pytest.approx((0.6071, 0.3452), abs=5e-5)
    assert (right + boast, wrong + boast) == pytest.approx((0.9323, 0.6705), abs=1e-4)
    assert wrong + boast > right  # the hack, kept for comparison


def test_classic_generator() -> None:
    for hops, pressure, published in ((2, 0.294, 0.952), (3, 0.44, 0.977), (4, 0.588, 0.993)):
        full = {"diversity": 1.0, "parallel": 0.5, "finished": 1.0, "signal": 0.25}
        assert classic.valid_reward(judge_right=False, pressure=pressure, **full) == pytest.approx(
            published, abs=0.06
        ), hops
    gap = classic.valid_reward(judge_right=False, pressure=0.3, **full) - classic.valid_reward(
        judge_right=True, pressure=0.3, **full
    )
    assert gap == pytest.approx(0.952 - 0.752)
    empty = (
        "missing_question_or_answer",
        "malformed_support_edges",
        "non_replayable_tool_calls",
        "non_unique_derivation_path",
    )
    nothing = {"question": False, "answer": False, "edges": 0, "calls": 0, "outputs": False, "graph": False}
    assert classic.invalid_reward(empty, signal=classic.text_signal(""), **nothing) == pytest.approx(-1.15)
    assert classic.text_signal("{" * 500 + '"question" "answer"') > classic.text_signal("an honest sentence")
