"""Losses and their gradients against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.learning.losses import (
    clipped_ratio,
    cross_entropy,
    kl_to_reference,
    policy_gradient,
    policy_loss,
    reply_log_ratios,
)
from sparring.learning.settings import LossSettings


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values: float) -> Tensor:
    return tensor(*values).requires_grad_()


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    return torch.autograd.grad(loss, of)[0].tolist()


def test_policy_gradient_by_hand() -> None:
    """d loss / d log pi = -(1/N) w min(ratio, cap) U: ratios 1, 1/2, 8 (capped at 2), and a half weight."""
    log_probs = leaf(-1.0, -2.0, -0.5, -1.0)
    log_ratios = log_probs - (log_probs.detach() - tensor(0.0, math.log(0.5), math.log(8.0), 0.0))
    loss = policy_gradient(
        log_probs, log_ratios, tensor(2.0, 1.0, -1.0, 4.0), tensor(1.0, 1.0, 1.0, 0.5), normaliser=10, ratio_cap=2.0
    )
    assert gradient(loss, log_probs) == pytest.approx([-0.2, -0.05, 0.2, -0.2])
    assert loss.item() == pytest.approx(-(2.0 * -1.0 + 0.5 * -2.0 - 2.0 * -0.5 + 0.5 * 4.0 * -1.0) / 10)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, 1.0),
        (1.3, 1.0, 0.0),  # up far enough
        (1.3, -1.0, -1.3),  # too likely and bad: still pushed down
        (0.7, 1.0, 0.7),  # too unlikely and good: still pushed up
        (0.7, -1.0, 0.0),  # down far enough
        (5.0, -1.0, 0.0),  # beyond the cap of 3
    ],
)
def test_clipped_ratio_by_hand(ratio: float, advantage: float, slope: float) -> None:
    log_ratios = leaf(math.log(ratio))
    loss = clipped_ratio(
        log_ratios, tensor(advantage), tensor(0.5), normaliser=4, clip_low=0.2, clip_high=0.2, ratio_cap=3.0
    )
    assert gradient(loss, log_ratios) == pytest.approx([-0.5 * slope / 4])
    objective = min(min(ratio, 3.0) * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert loss.item() == pytest.approx(-0.5 * objective / 4)


def test_extreme_ratios_stay_finite() -> None:
    for kind in ("policy_gradient", "clipped"):
        log_probs = leaf(-0.1, -500.0)
        settings = LossSettings(kind=kind)
        reply = torch.tensor([0, 0])
        loss = policy_loss(
            log_probs, tensor(-900.0, -0.1), tensor(-1.0, 1.0), tensor(1, 1), reply, None, settings, normaliser=2
        )
        assert all(map(math.isfinite, gradient(loss, log_probs)))


def test_k3_by_hand() -> None:
    """pi = 1/2, reference = 1/4: d = log(1/2), k3 = 1/2 - 1 + log 2; slope 1 - exp(d)."""
    log_probs = leaf(math.log(0.5), math.log(0.3))
    values = kl_to_reference(log_probs, tensor(math.log(0.25), math.log(0.3)))
    assert values.tolist() == pytest.approx([math.log(2) - 0.5, 0.0])
    assert gradient(values.sum(), log_probs) == pytest.approx([0.5, 0.0])
    distribution, reference = tensor(0.2, 0.5, 0.3), tensor(0.4, 0.4, 0.2)
    expected = (distribution * kl_to_reference(distribution.log(), reference.log())).sum()
    assert expected.item() == pytest.approx((distribution * (distribution / reference).log()).sum().item())  # unbiased


def test_reply_ratios_by_hand() -> None:
    found = reply_log_ratios(tensor(-1.0, -2.0, -3.0), tensor(-1.5, -1.5, -2.0), torch.tensor([0, 0, 1]))
    assert found.tolist() == [0.0, 0.0, -1.0]
    empty = reply_log_ratios(tensor(), tensor(), torch.tensor([], dtype=torch.int64))
    assert empty.tolist() == []


def test_policy_loss_adds_kl_over_all_eligible_tokens() -> None:
    log_probs = leaf(math.log(0.5))
    settings = LossSettings(kl_coefficient=0.4)
    loss = policy_loss(
        log_probs, log_probs.detach(), tensor(1.0), tensor(1.0), torch.tensor([0]), tensor(math.log(0.25)), settings,
        normaliser=8,
    )  # fmt: skip
    assert gradient(loss, log_probs) == pytest.approx([(-1.0 + 0.4 * 0.5) / 8])


def test_cross_entropy_by_hand() -> None:
    log_probs = leaf(-1.0, -3.0)
    loss = cross_entropy(log_probs, normaliser=4)
    assert (loss.item(), gradient(loss, log_probs)) == (1.0, [-0.25, -0.25])
