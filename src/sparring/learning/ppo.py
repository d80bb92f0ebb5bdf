"""The maths of PPO for small policies: pure functions, and running statistics that can be merged.

Legend: ``T`` time, ``R`` rollouts side by side, ``A`` policies of a stack, ``B`` steps of a minibatch. Credit is
computed by numpy in float64 whatever the policy's dtype; losses by torch in the policy's.

A step is *terminated* (nothing comes after), or its successor has a value. It is *ended* where what follows in the
array is no consequence of it: terminated, truncated, or the last of its rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

STD_FLOOR = 1e-8
"""Added to the deviation that advantages are divided by: a constant batch gives 0, not noise."""


# Credit


def gae(
    rewards: NDArray[Any], values: NDArray[Any], next_values: NDArray[Any], terminated: Flags, ended: Flags, *,
    gamma: float, lam: float,
) -> Floats:  # fmt: skip
    """Generalised advantage estimates (Schulman et al. 2016, eq. 16), shape (T, ...) like all arguments.

    ``A_t = d_t + gamma lam A_{t+1}`` unless t ended, with ``d_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and
    ``V(s_{t+1}) = 0`` where t terminated.

    Args:
        rewards: ``r_t``.
        values: ``V(s_t)``.
        next_values: ``V(s_{t+1})`` of the true successor: at a truncated or last step that of the final observation.
        terminated: No successor.
        ended: The next row is no successor.
        gamma: Discount.
        lam: Decay.
    """
    delta = np.asarray(rewards, np.float64) + gamma * np.where(terminated, 0.0, next_values) - values
    decay = np.where(ended, 0.0, gamma * lam)
    return _scan(delta, decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class VTrace:
    """Targets and advantages of :func:`vtrace`, shape (T, ...)."""

    targets: Floats
    """``v_t``: what the value head should say."""
    advantages: Floats
    """``r_t + gamma v_{t+1} - V(s_t)``, not yet weighted by the importance ratio of t."""


def vtrace(
    log_ratios: NDArray[Any], rewards: NDArray[Any], values: NDArray[Any], next_values: NDArray[Any],
    terminated: Flags, ended: Flags, *, gamma: float, lam: float = 1.0, cap: float = 1.0,
) -> VTrace:  # fmt: skip
    """V-trace (Espeholt et al. 2018, eq. 1, remark 2 for ``lam``): values of the current policy from older steps.

    ``v_t = V_t + rho_t d_t + gamma c_t (v_{t+1} - V_{t+1})`` with ``rho = min(cap, pi / mu)`` and ``c = lam min(1,
    pi / mu)``. At ratio 1 and cap 1 the targets are those of :func:`gae`.

    Args:
        log_ratios: ``log pi(a_t | s_t) - log mu(a_t | s_t)`` of the current over the behaviour policy.
        rewards, values, next_values, terminated, ended, gamma, lam: As in :func:`gae`; values are the current ones.
        cap: Largest ``rho``.
    """
    ratios = np.exp(np.asarray(log_ratios, np.float64))
    successors = np.where(terminated, 0.0, next_values)
    delta = np.asarray(rewards, np.float64) + gamma * successors - values
    excess = _scan(np.minimum(ratios, cap) * delta, np.where(ended, 0.0, gamma * lam * np.minimum(ratios, 1.0)))
    following = np.zeros_like(excess)
    following[:-1] = excess[1:]
    advantages = delta + gamma * np.where(ended, 0.0, following)
    return VTrace(targets=values + excess, advantages=advantages)


def _scan(first: Floats, decay: Floats) -> Floats:
    """``x_t = first_t + decay_t x_{t+1}``, from the end."""
    out = np.empty_like(first)
    running = np.zeros_like(first[0])
    for t in range(len(first) - 1, -1, -1):
        running = first[t] + decay[t] * running
        out[t] = running
    return out


# Running statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations per feature, in float64; exact counts of any size.

    >>> Moments.of(np.array([[1.0], [3.0]])).variance.tolist()
    [1.0]
    """

    count: int
    mean: Floats
    """Shape (D,)."""
    squares: Floats
    """Shape (D,): sum of (x - mean)^2."""

    @classmethod
    def empty(cls, size: int) -> Moments:
        return cls(count=0, mean=np.zeros(size), squares=np.zeros(size))

    @classmethod
    def of(cls, rows: NDArray[Any]) -> Moments:
        """Of rows of shape (N, D), in two passes."""
        rows = np.asarray(rows, np.float64)
        if not len(rows):
            return cls.empty(rows.shape[1])
        mean = rows.mean(axis=0)
        return cls(count=len(rows), mean=mean, squares=np.square(rows - mean).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Of both sets of rows together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if count == 0:
            return self
        gap, share = other.mean - self.mean, other.count / count
        return Moments(
            count=count,
            mean=self.mean + gap * share,
            squares=self.squares + other.squares + np.square(gap) * (self.count * share),
        )

    @property
    def variance(self) -> Floats:
        """Population variance; 1 before there is any row, so that nothing is scaled."""
        return self.squares / self.count if self.count else np.ones_like(self.squares)

    def scale(self, floor: float) -> Floats:
        """Standard deviation, at least ``floor``."""
        return np.sqrt(np.maximum(self.variance, floor * floor))


def normalized(advantages: Tensor, weights: Tensor) -> Tensor:
    """Advantages shifted to mean 0 and divided by their deviation (unbiased, plus 1e-8) over the last dimension.

    Args:
        advantages: Shape (..., B).
        weights: 1 for steps that count, 0 for padding; same shape. A single step stays as it is.
    """
    count = weights.sum(-1, keepdim=True)
    mean = (advantages * weights).sum(-1, keepdim=True) / count.clamp(min=1)
    deviations = (advantages - mean) * weights
    std = (deviations.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, deviations / (std + STD_FLOOR), advantages)


# Losses: per policy, shape (A,), from steps of shape (A, B) and weights that sum to 1 over a policy's steps


def clipped_surrogate(log_ratios: Tensor, advantages: Tensor, weights: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Policy loss of PPO (Schulman et al. 2017, eq. 7) and the ratios, which the divergence reuses.

    ``- sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip, 1 + clip) A_t)``
    """
    ratios = log_ratios.exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(1.0 - clip, 1.0 + clip) * advantages)
    return -(gains * weights).sum(-1), ratios


def value_loss(
    values: Tensor, targets: Tensor, weights: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Mean squared error; with ``clip`` the larger of that and the error of the value that moved at most ``clip``."""
    errors = (values - targets).square()
    if clip is not None:
        assert old_values is not None
        near = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - targets).square())
    return (errors * weights).sum(-1)


def approximate_kl(log_ratios: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
    """``E[(rho - 1) - log rho]`` (Schulman's k3): an estimate of KL(old || new) that is never below 0. No gradient."""
    return (((ratios - 1.0) - log_ratios).detach() * weights).sum(-1)


# The step


def clip_gradients(gradients: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Each policy's gradient scaled to ``max_norm`` at most (as torch's ``clip_grad_norm_``), and the norms before.

    Args:
        gradients: Shape (A, P).
        max_norm: Above 0.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return gradients * (max_norm / (norms + 1e-6)).clamp(max=1.0), norms.squeeze(1)


def adam_step(
    parameters: Tensor, gradients: Tensor, first: Tensor, second: Tensor, steps: Floats, learning_rate: float, *,
    eps: float, beta1: float = 0.9, beta2: float = 0.999,
) -> None:  # fmt: skip
    """One step of Adam (Kingma and Ba 2015), as torch has it, in place, every policy by its own count of steps.

    Args:
        parameters, gradients, first, second: Shape (A, P).
        steps: Shape (A, 1): steps before this one; 1 is added.
        learning_rate: For all.
        eps: Added to the root of the corrected second moment.
        beta1, beta2: Decay of the moments.
    """
    steps += 1.0
    ragged = bool((steps != steps[0]).any())
    own, slopes, means, squares = (
        list(tensor) if ragged else [tensor] for tensor in (parameters, gradients, first, second)
    )
    counts = [torch.tensor(float(steps[row, 0])) for row in range(len(own))]
    # What torch.optim.Adam(fused=True) calls: one pass over all numbers in place of six.
    torch._fused_adam_(
        own, slopes, means, squares, [], counts, lr=learning_rate, beta1=beta1, beta2=beta2, weight_decay=0.0,
        eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
