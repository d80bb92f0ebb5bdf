"""The distribution a reply is drawn from, in one place for the sampler and the learner: their log-probs must agree."""

from __future__ import annotations

import torch
from torch import Tensor


def effective(temperature: float, top_p: float) -> tuple[float, float]:
    """Temperature and nucleus mass that log-probs are taken at: greedy (temperature 0) reports those of 1 and 1.

    Raises:
        ValueError: A temperature below 0, or a mass outside (0, 1].

    >>> effective(0.0, 0.9)
    (1.0, 1.0)
    """
    if not temperature >= 0.0:
        raise ValueError(f"temperature is {temperature}, must be 0 (greedy) or more")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p is {top_p}, must be above 0 and at most 1")
    return (1.0, 1.0) if temperature == 0.0 else (temperature, top_p)


def outside_nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """Which tokens the nucleus leaves out (Holtzman et al. 2020).

    The smallest set of the likeliest tokens with at least mass ``top_p`` stays. Ties go to the lower id.

    Args:
        log_probs: Shape (N, V), fp32 nats, normalised.
        top_p: Mass to keep, in (0, 1).

    Returns:
        Bool of shape (N, V).
    """
    ordered, order = log_probs.detach().sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp().to(torch.float64).cumsum(dim=-1)
    mass_before = mass - ordered.exp()
    outside_ordered = mass_before >= top_p
    outside_ordered[..., 0] = False
    return torch.zeros_like(outside_ordered).scatter(-1, order, outside_ordered)


def log_distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probs of every token under the distribution sampled from.

    Args:
        logits: Shape (N, V), any float type.
        temperature: Logits are divided by it; 0 counts as 1.
        top_p: Below 1 the support is the nucleus, and the rest gets -inf.

    Returns:
        fp32, shape (N, V), nats; each row's exp sums to 1.
    """
    temperature, top_p = effective(temperature, top_p)
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if top_p < 1.0:
        outside = outside_nucleus(log_probs, top_p)
        log_probs = torch.log_softmax(log_probs.masked_fill(outside, float("-inf")), dim=-1)
    return log_probs


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probs of given tokens under the same distribution, differentiable.

    The targets themselves always count into the support: a token that was sampled may have left the nucleus since, by
    a step of the learner or by rounding, and must still have a finite log-prob.

    Args:
        logits: Shape (N, V).
        targets: int64, shape (N,).
        temperature: As in :func:`log_distribution`.
        top_p: As in :func:`log_distribution`.

    Returns:
        fp32, shape (N,), nats.
    """
    temperature, top_p = effective(temperature, top_p)
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if top_p < 1.0:
        outside = outside_nucleus(torch.log_softmax(scaled.detach(), dim=-1), top_p)
        outside = outside.scatter(-1, targets.unsqueeze(-1), False)
        scaled = scaled.masked_fill(outside, float("-inf"))
    return chosen - torch.logsumexp(scaled, dim=-1)
