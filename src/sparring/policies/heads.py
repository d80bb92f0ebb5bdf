"""Action distributions of small policies, in torch: log-probs and entropies with a gradient. ``acting.py`` samples.

Shapes: outputs of the network (..., F), actions (..., K), masks (..., M); results (...).
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FORBIDDEN = -1e9
"""Logit of a choice that the mask forbids: its probability is exactly 0, and so is its gradient."""

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(16)


def choices(outputs: Tensor, actions: Tensor, counts: tuple[int, ...], masks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy (nats) of independent choices; forbidden ones are in neither.

    Args:
        outputs: Logits of all parts, one after the other; F = sum of counts.
        actions: Whole numbers.
        counts: Choices of each part.
        masks: True where allowed; None allows all.
    """
    if masks is not None:
        outputs = outputs.masked_fill(~masks, FORBIDDEN)
    log_prob = entropy = None
    for part, logits in enumerate(outputs.split(counts, dim=-1) if len(counts) > 1 else (outputs,)):
        all_log_probs = torch.log_softmax(logits, dim=-1)
        taken = all_log_probs.gather(-1, actions[..., part : part + 1]).squeeze(-1)
        nats = -(all_log_probs.exp() * all_log_probs).sum(-1)
        log_prob = taken if log_prob is None else log_prob + taken
        entropy = nats if entropy is None else entropy + nats
    assert log_prob is not None and entropy is not None
    return log_prob, entropy


def gaussian(means: Tensor, log_stds: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy (nats) of a diagonal Gaussian.

    Args:
        means: Shape (..., K).
        log_stds: Broadcast to that.
        actions: As sampled.
    """
    z = (actions - means) * (-log_stds).exp()
    log_prob = (-0.5 * z.square() - log_stds - 0.5 * math.log(2.0 * math.pi)).sum(-1)
    entropy = (log_stds + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(means).sum(-1)
    return log_prob, entropy


def squashed(means: Tensor, log_stds: Tensor, actions: Tensor, half_widths: Tensor) -> tuple[Tensor, Tensor]:
    """The same for ``middle + half_width tanh(u)`` with u Gaussian, by change of variables.

    The entropy has no closed form: ``H(u) + E[log |d action / d u|]``, the mean by Gauss-Hermite quadrature (16 nodes).

    Args:
        means, log_stds: Of u.
        actions: u as sampled, not the squashed action: nothing has to be inverted.
        half_widths: Shape (K,), half of high - low.
    """
    log_prob, entropy = gaussian(means, log_stds, actions)
    nodes = torch.as_tensor(_NODES, dtype=means.dtype, device=means.device)
    weights = torch.as_tensor(_WEIGHTS / _WEIGHTS.sum(), dtype=means.dtype, device=means.device)
    u = means.unsqueeze(-1) + log_stds.exp().unsqueeze(-1) * nodes
    stretch = (_log_slope(u) * weights).sum(-1)
    scale = half_widths.log()
    return log_prob - (_log_slope(actions) + scale).sum(-1), entropy + (stretch + scale).sum(-1)


def _log_slope(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)``, without cancellation."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
