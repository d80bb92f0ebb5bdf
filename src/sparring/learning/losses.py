"""The losses, as pure functions of flat tensors over the kept tokens of a batch.

Legend: K kept tokens; N the normaliser, the number of *all* eligible reply tokens of the batch, those included that
the gate dropped (arXiv 2603.20526: sum over kept / all valid); pi the learner; mu the behaviour policy; U advantage;
w gate weight. All tensors have shape (K,) and one floating dtype; scalars have shape (). ``log_probs`` alone carries
a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.learning.settings import LossSettings


def token_log_ratios(log_probs: Tensor, behaviour_log_probs: Tensor) -> Tensor:
    """log(pi / mu) of each token, nats."""
    return log_probs - behaviour_log_probs


def reply_log_ratios(log_probs: Tensor, behaviour_log_probs: Tensor, reply: Tensor) -> Tensor:
    """Mean over its reply of log(pi / mu), given to each token (GSPO, arXiv 2507.18071, eq. 7).

    ``reply`` (K,), int64, numbers the reply of each token from 0; every token of a reply must be present.
    """
    count = int(reply.max()) + 1 if reply.numel() else 0
    difference = log_probs - behaviour_log_probs
    sums = difference.new_zeros(count).index_add(0, reply, difference)
    sizes = difference.new_zeros(count).index_add(0, reply, torch.ones_like(difference))
    return (sums / sizes)[reply]


def policy_gradient(
    log_probs: Tensor,
    log_ratios: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    normaliser: int,
    ratio_cap: float,
) -> Tensor:
    """-(1 / N) * sum w * min(pi / mu, cap) * U * log pi, with the ratio taken as a constant.

    REINFORCE with truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561, rho-bar). Its gradient is
    -(1 / N) * sum w * min(ratio, cap) * U * grad log pi.
    """
    ratios = torch.exp(log_ratios.detach().clamp(max=math.log(ratio_cap)))
    return -(weights * ratios * advantages * log_probs).sum() / normaliser


def clipped_ratio(
    log_ratios: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    normaliser: int,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Tensor:
    """-(1 / N) * sum w * min(rho * U, clip(rho, 1 - low, 1 + high) * U), rho = pi / mu (PPO, arXiv 1707.06347, eq. 7).

    Beyond ``ratio_cap`` the ratio is held, so that a bad token that has become likely gives no unbounded gradient (dual
    clip, arXiv 1912.09729). With reply ratios a reply counts once per token.
    """
    ratios = torch.exp(log_ratios.clamp(max=math.log(ratio_cap)))
    clipped = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -(weights * torch.minimum(ratios * advantages, clipped * advantages)).sum() / normaliser


def kl_to_reference(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k3 estimate of KL(pi || reference) of each token, nats, never negative: exp(d) - 1 - d, d = log reference - log
    pi.

    Source: J. Schulman, "Approximating KL divergence" (2020); as in GRPO (arXiv 2402.03300, eq. 4). Shape (K,).
    """
    difference = reference_log_probs - log_probs
    return torch.expm1(difference) - difference


def cross_entropy(log_probs: Tensor, *, normaliser: int) -> Tensor:
    """-(1 / N) * sum log pi: supervised learning on the marked tokens."""
    return -log_probs.sum() / normaliser


def policy_loss(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    reply: Tensor,
    reference_log_probs: Tensor | None,
    settings: LossSettings,
    *,
    normaliser: int,
) -> Tensor:
    """The loss the settings name, over one micro-batch of whole rows; micro-batches add up, as N is the batch's.

    ``reference_log_probs`` is needed when ``settings.kl_coefficient`` > 0: that adds coefficient / N * sum of k3 over
    the kept tokens.
    """
    if settings.ratio == "reply":
        log_ratios = reply_log_ratios(log_probs, behaviour_log_probs, reply)
    else:
        log_ratios = token_log_ratios(log_probs, behaviour_log_probs)
    if settings.kind == "policy_gradient":
        loss = policy_gradient(
            log_probs, log_ratios, advantages, weights, normaliser=normaliser, ratio_cap=settings.ratio_cap
        )
    else:
        loss = clipped_ratio(
            log_ratios,
            advantages,
            weights,
            normaliser=normaliser,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            ratio_cap=settings.ratio_cap,
        )
    if settings.kl_coefficient > 0.0:
        assert reference_log_probs is not None
        loss = loss + settings.kl_coefficient * kl_to_reference(log_probs, reference_log_probs).sum() / normaliser
    return loss
