"""The recipe runs on the learner, and its figures are what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
from token_reversal import GATES, Reverser, Trial, compare, cost_to_reach, document, figure, paired_difference


def test_sampled_log_probs_are_the_learners() -> None:
    from sparring.policies.contract import ScoreRow

    policy = Reverser(4, 3, seed=0)
    prompts = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(0))
    answers, log_probs = policy.sample(prompts, torch.Generator().manual_seed(1))
    rows = [
        ScoreRow(token_ids=(*p, *a), positions=(4, 6, 7))
        for p, a in zip(prompts.tolist(), answers.tolist(), strict=True)
    ]
    with torch.no_grad():
        scored = policy.log_probs(rows, temperature=1.0)
    assert torch.allclose(scored.view(5, 3), log_probs[:, [0, 2, 3]], atol=1e-5)


def test_methods_cost_what_they_grade() -> None:
    trials = {method: [Trial(method, 0, 3, 2)] for method in GATES}
    for own in trials.values():
        for _ in range(22):
            own[0].step()
    graded = {method: own[0].graded[-1] for method, own in trials.items()}
    assert graded["pg"] == 22 * 300 and graded["ppo"] == 2 * graded["pg"]
    assert graded["dgk_3"] < graded["dgk_10"] < graded["dgk_30"] < graded["filter"] <= graded["dg"] <= graded["pg"]
    assert trials["pg"][0].errors[:3] == trials["filter"][0].errors[:3]  # the same gradient, fewer rows
    found = compare(trials)
    found["settings"] = {"seeds": 1, "steps": 22, "length": 3, "tokens": 2}
    assert found["methods"]["pg"]["graded_of_pg"] == 1.0
    assert "PG, filtered" in document(found) and figure(trials).count("<polyline") == 4 * len(GATES)


def test_cost_is_read_at_the_first_step_that_is_as_good() -> None:
    trial = Trial("pg", 0, 3, 2)
    trial.errors = [1.0] * 30 + [0.0] * 30
    trial.graded = trial.forwarded = list(range(1, 61))
    trial.seconds = [float(i) for i in range(1, 61)]
    assert trial.smooth()[39] == pytest.approx(0.5)
    assert cost_to_reach(trial, 0.5)["graded"] == 40 and cost_to_reach(trial, -1.0)["steps"] == float("inf")


def test_order_is_judged_by_intervals() -> None:
    found = paired_difference([3.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    assert found["value"] == 1.0 and found["low"] == 0.0 and found["high"] == 2.0
    assert paired_difference([1.0, 1.5], [0.5, 0.5])["low"] > 0.0
