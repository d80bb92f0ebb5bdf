"""Credit, statistics and losses of PPO against numbers by hand, a second implementation, and rivals' own numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.learning.ppo import (
    Moments,
    adam_step,
    approximate_kl,
    clip_gradients,
    clipped_surrogate,
    gae,
    normalized,
    value_loss,
    vtrace,
)

TORCHRL = np.load(Path(__file__).parent / "rivals" / "from_torchrl.npz")


def flags(*values: int) -> np.ndarray:
    return np.array(values, np.bool_)


# GAE


def test_gae_by_hand() -> None:
    """gamma .5, lam .5. Step 2 terminates: d = 4 - 3 = 1. Step 1: d = 2 + .5*3 - 2 = 1.5, A = 1.5 + .25*1 = 1.75.
    Step 0: d = 1 + .5*2 - 1 = 1, A = 1 + .25*1.75 = 1.4375."""
    found = gae(
        np.array([1.0, 2, 4]), np.array([1.0, 2, 3]), np.array([2.0, 3, 99]), flags(0, 0, 1), flags(0, 0, 1),
        gamma=0.5, lam=0.5,
    )  # fmt: skip
    assert found.tolist() == [1.4375, 1.75, 1.0]


def test_truncation_bootstraps_from_the_successor_and_leaks_nothing() -> None:
    """Traps 7 and 16: step 0 is truncated, its final observation is worth 10; what comes after is another episode."""
    rewards, values, following = np.array([1.0, 1.0]), np.array([2.0, 5.0]), np.array([10.0, 10.0])
    found = gae(rewards, values, following, flags(0, 0), flags(1, 1), gamma=0.5, lam=1.0)
    assert found.tolist() == [1 + 5 - 2, 1 + 5 - 5]
    assert gae(rewards, values, following, flags(1, 0), flags(1, 1), gamma=0.5, lam=1.0)[0] == 1 - 2


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_gae_of_constant_values_has_a_closed_form(gamma: float, lam: float) -> None:
    """stable-baselines3's own test: V = 0, reward 1 a step: A_t = sum of (gamma lam)^k over what is left."""
    steps = 9
    zero = np.zeros(steps)
    found = gae(zero + 1, zero, zero, zero.astype(bool), zero.astype(bool), gamma=gamma, lam=lam)
    assert found == pytest.approx([sum((gamma * lam) ** k for k in range(steps - t)) for t in range(steps)])


def by_definition(r, v, n, term, ended, gamma, lam):  # type: ignore[no-untyped-def]
    """A second implementation: the sum of decayed errors, from every step forward."""
    out = np.zeros_like(v)
    for t in range(len(v)):
        weight = 1.0
        for k in range(t, len(v)):
            out[t] += weight * (r[k] + gamma * (0.0 if term[k] else n[k]) - v[k])
            weight *= gamma * lam
            if ended[k]:
                break
    return out


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 25), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_gae_is_the_sum_it_is_defined_as(seed: int, steps: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    r, v, n = rng.normal(size=(3, steps))
    term = rng.random(steps) < 0.2
    ended = term | (rng.random(steps) < 0.2)
    expected = by_definition(r, v, n, term, ended, gamma, lam)
    np.testing.assert_allclose(gae(r, v, n, term, ended, gamma=gamma, lam=lam), expected, atol=1e-10)


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.5)])
def test_gae_is_torchrls(gamma: float, lam: float) -> None:
    names = ("rewards", "values", "next_values", "terminated", "ended")
    found = gae(*(TORCHRL[name] for name in names), gamma=gamma, lam=lam)
    np.testing.assert_allclose(found, TORCHRL[f"gae/{gamma}/{lam}"], atol=1e-10)


# V-trace


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_vtrace_is_torchrls(cap: float) -> None:
    names = ("rewards", "values", "next_values", "terminated", "ended")
    log_ratios = TORCHRL["log_pi"] - TORCHRL["log_mu"]
    found = vtrace(log_ratios, *(TORCHRL[name] for name in names), gamma=0.95, cap=cap)
    weights = np.minimum(np.exp(log_ratios), cap)
    np.testing.assert_allclose(found.targets, TORCHRL[f"vtrace/{cap}/targets"], atol=1e-10)
    np.testing.assert_allclose(weights * found.advantages, TORCHRL[f"vtrace/{cap}/advantages"], atol=1e-10)


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 25), lam=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_vtrace_on_policy_is_gae(seed: int, steps: int, lam: float) -> None:
    """Its targets are A + V of the same lambda (trap 15); its advantages those of one step towards such a target."""
    rng = np.random.default_rng(seed)
    r, v, n = rng.normal(size=(3, steps))
    term = rng.random(steps) < 0.2
    ended = term | (rng.random(steps) < 0.2)
    ended[-1] = True
    n[:-1][~ended[:-1]] = v[1:][~ended[:-1]]  # a successor inside an episode is the next row
    found = vtrace(np.zeros(steps), r, v, n, term, ended, gamma=0.9, lam=lam)
    advantages = gae(r, v, n, term, ended, gamma=0.9, lam=lam)
    np.testing.assert_allclose(found.targets, advantages + v, atol=1e-10)
    whole = vtrace(np.zeros(steps), r, v, n, term, ended, gamma=0.9)
    np.testing.assert_allclose(whole.advantages, gae(r, v, n, term, ended, gamma=0.9, lam=1.0), atol=1e-10)


def test_vtrace_by_hand() -> None:
    """One episode of two steps, ratios 1/2 and 4 (cut to 1): the second step's target is its reward, the first moves
    half way to 1 + 3 from 0, and half of the second's excess (3 - 1) comes along."""
    found = vtrace(
        np.log([0.5, 4.0]), np.array([1.0, 3.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0]), flags(0, 1), flags(0, 1),
        gamma=1.0,
    )  # fmt: skip
    assert found.targets == pytest.approx([0 + 0.5 * (1 + 1 - 0) + 0.5 * (3 - 1), 3.0])
    assert found.advantages == pytest.approx([1 + 3 - 0, 3 - 1])


# Statistics


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 40), max_size=4), scale=st.floats(1e-3, 1e4))
@settings(max_examples=60, deadline=None)
def test_merged_statistics_are_those_of_one_pass(seed: int, cuts: list[int], scale: float) -> None:
    rows = np.random.default_rng(seed).normal(3.0, 2.0, size=(40, 2)) * scale
    merged = Moments.empty(2)
    for part in np.split(rows, sorted(cuts)):
        merged = merged.merge(Moments.of(part))
    assert merged.count == 40
    np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(merged.variance, rows.var(0), rtol=1e-9)


def test_statistics_stay_right_beyond_2_to_the_24() -> None:
    """Trap 14: counts are whole numbers, and a late change of the data still shows."""
    old = Moments(count=2**24, mean=np.array([5.0]), squares=np.array([2.0**24]))
    new = old
    for _ in range(64):
        new = new.merge(Moments.of(np.full((2**18, 1), 7.0)))
    assert new.count == 2**25
    assert new.mean[0] == pytest.approx(6.0, abs=1e-12)
    assert new.variance[0] == pytest.approx(0.5 + 1.0, abs=1e-9)
    one = Moments(count=2**40, mean=np.array([1.0]), squares=np.array([0.0])).merge(Moments.of(np.array([[1.0]])))
    assert one.count == 2**40 + 1


def test_nothing_is_scaled_before_there_is_data_and_a_constant_has_a_floor() -> None:
    assert Moments.empty(2).scale(1e-4).tolist() == [1.0, 1.0]
    assert Moments.of(np.full((5, 1), 3.0)).scale(1e-4).tolist() == [1e-4]


def test_normalized_advantages() -> None:
    """Deviation of (1, 2, 3) is 1, unbiased; padding is in neither; one step alone stays; a constant gives 0 (trap
    23)."""
    found = normalized(
        torch.tensor([[1.0, 2.0, 3.0, 777.0], [5.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 4.0]]),
        torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
    )
    assert found[0].tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0])
    assert found[1, 0] == 5.0 and found[2].tolist() == [0.0] * 4


# Losses and the step


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0), (1.5, 2.0, 2.4, 0.0), (1.5, -2.0, -3.0, -3.0), (0.5, 2.0, 1.0, 1.0),
        (0.5, -2.0, -1.6, 0.0),
    ],
)  # fmt: skip
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, gain: float, slope: float) -> None:
    """Clip .2. d gain / d log ratio is ratio x advantage, or 0 where it is cut."""
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.25]], dtype=torch.float64)
    loss, _ = clipped_surrogate(log_ratio, torch.tensor([[advantage]], dtype=torch.float64), weight, 0.2)
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert loss.item() == pytest.approx(-0.25 * gain) and log_ratio.grad.item() == pytest.approx(-0.25 * slope)


def test_value_loss_by_hand() -> None:
    values, targets, old = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 4.0]]), torch.tensor([[0.0, 0.0]])
    weights = torch.tensor([[0.5, 0.5]])
    assert value_loss(values, targets, weights).item() == 1.0
    # Clipped to .5: errors .25 and 12.25; the larger counts, 1 and 12.25.
    assert value_loss(values, targets, weights, old_values=old, clip=0.5).item() == pytest.approx((1 + 12.25) / 2)


def test_kl_estimate_by_hand() -> None:
    log_ratios = torch.tensor([[0.0, math.log(2.0)]])
    found = approximate_kl(log_ratios, log_ratios.exp(), torch.tensor([[0.5, 0.5]]))
    assert found.item() == pytest.approx((1 - math.log(2.0)) / 2)


def test_adam_and_clip_are_torchs_for_every_row() -> None:
    """Rows joined at different times: each with its own count of steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    first, second = torch.zeros_like(parameters), torch.zeros_like(parameters)
    steps = np.zeros((3, 1))
    alone = [torch.nn.Parameter(row.clone()) for row in parameters]
    optimizers = [torch.optim.Adam([row], lr=0.01, eps=1e-5) for row in alone]
    for step in range(6):
        here = slice(0, 3) if step > 2 else slice(0, 2)  # the third begins later
        gradients = 3.0 * torch.randn(3, 7, generator=generator, dtype=torch.float64)
        for row, optimizer, gradient in zip(alone[here], optimizers[here], gradients[here], strict=True):
            row.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_([row], 2.0)
            optimizer.step()
        clipped, _ = clip_gradients(gradients[here], 2.0)
        adam_step(parameters[here], clipped, first[here], second[here], steps[here], 0.01, eps=1e-5)
    assert steps.squeeze(1).tolist() == [6, 6, 3]
    torch.testing.assert_close(parameters, torch.stack([row.detach() for row in alone]), atol=1e-12, rtol=0)
