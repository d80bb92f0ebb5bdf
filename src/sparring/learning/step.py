"""One learner step, blind to the algorithm: advantages and gate weights arrive as per-token streams in the experiences.

The only place of the package with ``.backward()`` for language models. A step either moves the weights and the
version, or says why not; a number that is not finite saves the batch and moves nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sparring.errors import ConfigError, TrainingError
from sparring.learning.batch import (
    BatchCounts,
    MicroBatch,
    canonical,
    count,
    eligible_positions,
    kept_positions,
    micro_batches,
    pack_rows,
)
from sparring.learning.losses import cross_entropy, kl_to_reference, policy_loss
from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import LossSettings
from sparring.policies.contract import ScoreRow, TrainablePolicy
from sparring.types import Experience, PolicyVersion, SkipReason, StepReport

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadBatch:
    """What is saved when a step meets a number that is not finite; ``read_bad_batch`` reads it."""

    policy: str
    version: PolicyVersion
    reason: str
    experiences: tuple[Experience, ...] = ()
    rows: tuple[ScoreRow, ...] = ()
    """Of a supervised step."""


@dataclass(slots=True)
class _Sums:
    """Over the graded tokens of a step, in the order of micro-batches."""

    tokens: int = 0
    ratio: float = 0.0
    largest_ratio: float = 0.0
    divergence: float = 0.0


def learner_step(
    policy: TrainablePolicy,
    experiences: Sequence[Experience],
    settings: LossSettings,
    optimizer: NamedOptimizer,
    *,
    bad_batch_dir: Path,
) -> StepReport:
    """One optimiser step of ``policy`` on a batch, or a typed skip. The batch's order changes no bit of the result.

    Only kept tokens, and what precedes them in their rows, are run forward. The loss is normalised by all eligible
    tokens, fixed before the first micro-batch, so micro-batches add up to the gradient of the whole.

    Skips, leaving weights, moments and version alone: NO_EXPERIENCE, EQUAL_REWARDS (every advantage is 0),
    NOTHING_KEPT, ZERO_GRADIENT. ``policy.version.step`` rises by one on a real step only.

    Raises TrainingError for a loss or gradient that is not finite: the batch is in ``bad_batch_dir``, the weights are
    untouched. Raises ConfigError when a KL term or a reply ratio meets a reply cut by the gate, ValueError for an
    experience of another policy.
    """
    start = time.perf_counter()
    for experience in experiences:
        if experience.policy != policy.name:
            raise ValueError(f"experience {experience.source} is of policy {experience.policy!r}, not {policy.name!r}")
    batch = canonical(experiences)
    counts = count(batch, policy.version)
    if settings.needs_whole_replies:
        _check_whole_replies(batch, settings)
    sums = _Sums()
    skipped = _reason_to_skip(batch, counts)
    loss = norm = 0.0
    forwarded = 0
    if skipped is None:

        def part_loss(part: MicroBatch) -> Tensor:
            return _policy_part(policy, part, settings, counts.eligible_tokens, sums)

        def save(reason: str) -> Path:
            return save_bad_batch(bad_batch_dir, policy, reason, experiences=batch)

        parts = micro_batches(batch, settings.micro_batch_tokens, shares_prefixes=policy.shares_prefixes)
        forwarded = sum(policy.positions(part.rows) for part in parts)
        loss, norm, skipped = _descend(parts, part_loss, optimizer, save)
    _close(policy, optimizer, skipped)
    return StepReport(
        policy=policy.name,
        version=policy.version,
        skipped=skipped,
        loss=loss,
        grad_norm=norm,
        eligible_replies=counts.eligible_replies,
        kept_replies=counts.kept_replies,
        eligible_tokens=counts.eligible_tokens,
        graded_tokens=counts.graded_tokens,
        forwarded_tokens=forwarded,
        mean_ratio=sums.ratio / sums.tokens if sums.tokens else 1.0,
        max_ratio=sums.largest_ratio if sums.tokens else 1.0,
        mean_version_lag=counts.mean_version_lag,
        entropy=counts.entropy,
        kl_to_reference=sums.divergence / sums.tokens if sums.tokens and settings.kl_coefficient > 0.0 else None,
        seconds=time.perf_counter() - start,
    )


def supervised_step(
    policy: TrainablePolicy,
    rows: Sequence[ScoreRow],
    optimizer: NamedOptimizer,
    *,
    bad_batch_dir: Path,
    temperature: float = 1.0,
    micro_batch_tokens: int = 4096,
) -> StepReport:
    """One optimiser step of cross-entropy on the marked positions of ``rows`` (the reply tokens), mean over all of
    them.

    The same machinery and the same guarantees as ``learner_step``. In the report ``loss`` and ``entropy`` are the
    cross-entropy before the step, nats a token; ratios are 1.
    """
    start = time.perf_counter()
    parts = pack_rows(rows, micro_batch_tokens)
    taught = [row for part in parts for row in part]
    tokens = sum(len(row.positions) for row in taught)
    loss = norm = 0.0
    skipped: SkipReason | None = SkipReason.NO_EXPERIENCE
    if taught:

        def part_loss(part: list[ScoreRow]) -> Tensor:
            return cross_entropy(policy.log_probs(part, temperature=temperature), normaliser=tokens)

        def save(reason: str) -> Path:
            return save_bad_batch(bad_batch_dir, policy, reason, rows=taught)

        loss, norm, skipped = _descend(parts, part_loss, optimizer, save)
    _close(policy, optimizer, skipped)
    return StepReport(
        policy=policy.name,
        version=policy.version,
        skipped=skipped,
        loss=loss,
        grad_norm=norm,
        eligible_replies=len(taught),
        kept_replies=len(taught),
        eligible_tokens=tokens,
        graded_tokens=tokens,
        forwarded_tokens=sum(policy.positions(part) for part in parts),
        mean_ratio=1.0,
        max_ratio=1.0,
        mean_version_lag=0.0,
        entropy=loss,
        kl_to_reference=None,
        seconds=time.perf_counter() - start,
    )


def save_bad_batch(
    directory: Path,
    policy: TrainablePolicy,
    reason: str,
    *,
    experiences: Sequence[Experience] = (),
    rows: Sequence[ScoreRow] = (),
) -> Path:
    """Write the batch as JSON (NaN and Infinity as Python's json writes them), beside and then renamed; its path."""
    bad = BadBatch(
        policy=policy.name,
        version=policy.version,
        reason=reason,
        experiences=tuple(experiences),
        rows=tuple(rows),
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"bad-batch-{policy.name.replace('/', '_')}-{policy.version}.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(msgspec.to_builtins(bad)), encoding="utf-8")
    beside.replace(path)
    return path


def read_bad_batch(path: Path) -> BadBatch:
    """What ``save_bad_batch`` wrote, to the bit."""
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), BadBatch)


def _reason_to_skip(batch: Sequence[Experience], counts: BatchCounts) -> SkipReason | None:
    if not batch:
        return SkipReason.NO_EXPERIENCE
    if not any(any(experience.advantages) for experience in batch):
        return SkipReason.EQUAL_REWARDS
    if counts.graded_tokens == 0:
        return SkipReason.NOTHING_KEPT
    return None


def _check_whole_replies(batch: Sequence[Experience], settings: LossSettings) -> None:
    term = "loss.kl_coefficient" if settings.kl_coefficient > 0.0 else "loss.ratio = 'reply'"
    for experience in batch:
        kept = kept_positions(experience)
        if kept and kept != eligible_positions(experience):
            raise ConfigError(
                f"{term} needs every token of a reply, but the gate cut reply {experience.source}: gate.unit = 'reply'"
            )
        if kept and settings.kl_coefficient > 0.0 and experience.sampling.top_p < 1.0:
            raise ConfigError("loss.kl_coefficient needs the whole distribution: sample with top_p = 1")


def _policy_part(
    policy: TrainablePolicy, part: MicroBatch, settings: LossSettings, normaliser: int, sums: _Sums
) -> Tensor:
    """The loss of one micro-batch, with its figures added to ``sums``."""
    log_probs = policy.log_probs(part.rows, temperature=part.temperature, top_p=part.top_p)
    device = log_probs.device
    behaviour = part.behaviour_log_probs.to(device)
    reference: Tensor | None = None
    if settings.kl_coefficient > 0.0:
        reference = policy.reference_log_probs(part.rows, temperature=part.temperature)
    with torch.no_grad():
        ratios = torch.exp(log_probs.double() - behaviour.double())
        sums.tokens += ratios.numel()
        sums.ratio += float(ratios.sum())
        sums.largest_ratio = max(sums.largest_ratio, float(ratios.max()))
        if reference is not None:
            sums.divergence += float(kl_to_reference(log_probs, reference).double().sum())
    return policy_loss(
        log_probs,
        behaviour,
        part.advantages.to(device),
        part.weights.to(device),
        part.reply.to(device),
        reference,
        settings,
        normaliser=normaliser,
    )


def _descend(
    parts: Sequence[Part],
    part_loss: Callable[[Part], Tensor],
    optimizer: NamedOptimizer,
    save: Callable[[str], Path],
) -> tuple[float, float, SkipReason | None]:
    """Gradient of the sum of the parts' losses, clipped, and the step: (loss, norm before clipping, reason of a
    skip)."""
    optimizer.zero_grad()
    total = 0.0
    for part in parts:
        loss = part_loss(part)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise _not_finite("loss", value, optimizer, save)
        loss.backward()
        total += value
    gradients = optimizer.gradients()
    norm_tensor = get_total_norm(gradients) if gradients else torch.zeros(())
    norm = float(norm_tensor)
    if not math.isfinite(norm):
        raise _not_finite("gradient norm", norm, optimizer, save)
    if norm == 0.0:
        optimizer.zero_grad()
        return total, norm, SkipReason.ZERO_GRADIENT
    if optimizer.settings.max_grad_norm is not None:
        with_gradient = [p for p in optimizer.parameters.values() if p.grad is not None]
        clip_grads_with_norm_(with_gradient, optimizer.settings.max_grad_norm, norm_tensor)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm, None


def _not_finite(what: str, value: float, optimizer: NamedOptimizer, save: Callable[[str], Path]) -> TrainingError:
    optimizer.zero_grad()
    path = save(f"{what} is {value}")
    return TrainingError(f"the {what} is {value}: weights are untouched, the batch is in {path}")


def _close(policy: TrainablePolicy, optimizer: NamedOptimizer, skipped: SkipReason | None) -> None:
    if skipped is None:
        policy.version = replace(policy.version, step=policy.version.step + 1)
    else:
        optimizer.skip()
