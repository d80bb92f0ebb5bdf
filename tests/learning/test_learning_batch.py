"""Only what is kept becomes rows; everything eligible counts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning_toys import credited, experience, settlement

from sparring.learning.batch import count, micro_batches, pack_rows, split_stale, to_experience, to_experiences
from sparring.learning.gate import GatedTurn
from sparring.policies.contract import ScoreRow
from sparring.types import PolicyVersion, SamplingSettings

LEARNER = PolicyVersion(incarnation=2, step=10)


def test_experience_by_hand() -> None:
    gated = GatedTurn(credited=credited(0, 1.5, log_probs=(-0.5, -0.25)), weights=(0.0, 1.0))
    found = to_experience(gated)
    assert found.token_ids == (1, 2, 3, 4, 5)
    assert found.loss_mask == (False, False, False, True, True)
    assert found.behaviour_log_probs == (0.0, 0.0, 0.0, -0.5, -0.25)
    assert found.advantages == (0.0, 0.0, 0.0, 1.5, 1.5)
    assert found.weights == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert found.graded_tokens == 1
    uncounted = dataclasses.replace(gated, credited=dataclasses.replace(gated.credited, counted=False))
    assert not any(to_experience(uncounted).loss_mask)
    other = GatedTurn(credited=credited(1, 1.0, policy="other"), weights=(1.0, 1.0))
    assert to_experiences([other, gated], policy="shared") == [found]


def test_rows_end_at_the_last_kept_token_and_empty_ones_are_gone() -> None:
    batch = [
        experience(0, [1, 2, 3, 4, 5, 6], 2, 1.0, [1.0, 0.0, 0.5, 0.0], [0, 0, -1, -2, -3, -4]),
        experience(1, [1, 2, 7, 8], 2, -1.0, [0.0, 0.0], [0, 0, -1, -1]),
    ]
    counts = count(batch, LEARNER)
    assert (counts.eligible_replies, counts.kept_replies) == (2, 1)
    assert (counts.eligible_tokens, counts.graded_tokens) == (6, 2)
    assert (counts.mean_version_lag, counts.entropy) == (10.0, 2.0)
    (part,) = micro_batches(batch, 100)
    assert part.rows == (ScoreRow(token_ids=(1, 2, 3, 4, 5), positions=(2, 4)),)
    assert part.behaviour_log_probs.tolist() == [-1.0, -3.0]
    assert part.weights.tolist() == [1.0, 0.5]
    assert part.reply.tolist() == [0, 0]


def test_micro_batches_respect_budget_and_sampling() -> None:
    plain = [experience(i, [1, 2, 3, 4 + i], 3, 1.0, [1.0], [0, 0, 0, -1]) for i in range(5)]
    assert [len(part.rows) for part in micro_batches(plain, 8)] == [2, 2, 1]
    assert [len(part.rows) for part in micro_batches(plain, 1)] == [1] * 5  # a long row goes alone
    # Distinct prefixes: three shared tokens and one of each row's own.
    assert [len(part.rows) for part in micro_batches(plain, 8, shares_prefixes=True)] == [5]
    assert [len(part.rows) for part in micro_batches(plain, 5, shares_prefixes=True)] == [2, 2, 1]
    greedy = dataclasses.replace(plain[0], sampling=SamplingSettings(temperature=0.0))
    warm = dataclasses.replace(plain[1], sampling=SamplingSettings(temperature=0.7))
    parts = micro_batches([warm, greedy, plain[2]], 100)
    assert [(part.temperature, len(part.rows)) for part in parts] == [(1.0, 1), (0.7, 1), (1.0, 1)]


SHAPES = st.lists(st.tuples(st.integers(1, 9), st.lists(st.booleans(), min_size=1, max_size=9)), max_size=20)


@given(SHAPES, st.integers(1, 60))
def test_micro_batches_hold_every_kept_token_once(shapes: list[tuple[int, list[bool]]], budget: int) -> None:
    batch = []
    for i, (prompt, kept) in enumerate(shapes):
        length = prompt + len(kept)
        batch.append(experience(i, [7] * length, prompt, float(i), [float(k) for k in kept], [0.0] * length))
    parts = micro_batches(batch, budget)
    found = []
    for part in parts:
        positions = [position for row in part.rows for position in row.positions]
        found += list(zip(part.advantages.tolist(), positions, strict=True))
    wanted = [(float(i), prompt + j) for i, (prompt, kept) in enumerate(shapes) for j, k in enumerate(kept) if k]
    assert sorted(found) == sorted(wanted)
    for part in parts:
        longest = max(len(row.token_ids) for row in part.rows)
        assert len(part.rows) == 1 or len(part.rows) * longest <= budget
        assert all(row.positions[-1] == len(row.token_ids) - 1 for row in part.rows)


def test_stale_turns_are_told_apart() -> None:
    batch = [settlement(0, 1.0, step=10), settlement(1, 1.0, step=7), settlement(2, 1.0, step=13)]
    fresh, stale = split_stale(batch, LEARNER, 2)
    assert ([s.turn.version.step for s in fresh], [s.turn.version.step for s in stale]) == ([10], [7, 13])
    assert split_stale(batch, LEARNER, None) == (batch, [])


def test_broken_rows_are_refused() -> None:
    good = experience(0, [1, 2], 1, 1.0, [1.0], [0, -1])
    with pytest.raises(ValueError, match="different lengths"):
        count([dataclasses.replace(good, weights=(1.0,))], LEARNER)
    with pytest.raises(ValueError, match="first token"):
        count([dataclasses.replace(good, loss_mask=(True, True), weights=(1.0, 1.0))], LEARNER)
    for positions in ((0,), (2, 1), (1, 1), (3,)):
        with pytest.raises(ValueError, match="ascending"):
            pack_rows([ScoreRow(token_ids=(1, 2, 3), positions=positions)], 10)
    assert pack_rows([ScoreRow(token_ids=(1, 2, 3), positions=())], 10) == []
    assert pack_rows([ScoreRow(token_ids=(1, 2, 3), positions=(1,))], 10) == [
        [ScoreRow(token_ids=(1, 2), positions=(1,))]
    ]
