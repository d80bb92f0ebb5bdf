"""One update of a stack of small policies: credit, then epochs of minibatches, each policy as if it were alone.

Every policy has its own moments, count of Adam's steps, gradient clip, order of steps, and stop by divergence; a
policy with fewer steps sits out the minibatches that it has not. Nothing is kept unless the whole update came to its
end: an error leaves the learner as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.learning.ppo import (
    Floats,
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
from sparring.learning.ppo_batch import RolloutBatch, by_policy, by_rollout, collate, successors
from sparring.learning.settings import PPOSettings
from sparring.policies.contract import StackedPolicies, StepBatch
from sparring.types import PolicyVersion, Rollout, UpdateReport

CHUNK = 1 << 15
"""Steps that the pass before the epochs takes at once: bounds memory."""
NORMAL_FLOOR = 1e-4
"""Least deviation that observations and returns are divided by."""
OBSERVATION_CLIP = 10.0
"""Normalised observations are cut to this, as when acting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizers:
    """Running statistics of one policy, of everything it was ever trained on."""

    observations: Moments
    states: Moments
    """Of a centralised critic; of size 0 where there is none."""
    returns: Moments


@dataclass(kw_only=True, slots=True)
class StackLearner:
    """A stack of policies with all that learning keeps of them, row by row."""

    policies: StackedPolicies
    settings: PPOSettings
    sizes: tuple[int, int]
    """Numbers in an observation and in a state."""
    first: Tensor
    """Adam's moments, shape (A, P)."""
    second: Tensor
    steps: Floats
    """Adam's steps, shape (A, 1)."""
    normalizers: list[Normalizers]
    versions: list[PolicyVersion]

    @classmethod
    def of(cls, policies: StackedPolicies, settings: PPOSettings, *, sizes: tuple[int, int]) -> StackLearner:
        """A learner of a stack that is still empty."""
        zeros = torch.zeros_like(policies.parameters)
        return cls(
            policies=policies, settings=settings, sizes=sizes, first=zeros, second=zeros.clone(),
            steps=np.zeros((len(zeros), 1)), normalizers=[], versions=[],
        )  # fmt: skip

    def join(self, version: PolicyVersion) -> None:
        """Take up the last policy of the stack, which has just joined; the others keep everything."""
        row = self.first.new_zeros(1, self.policies.parameters.shape[1])
        self.first, self.second = torch.cat([self.first, row]), torch.cat([self.second, row])
        self.steps = np.concatenate([self.steps, np.zeros((1, 1))])
        observation, state = self.sizes
        self.normalizers.append(
            Normalizers(observations=Moments.empty(observation), states=Moments.empty(state), returns=Moments.empty(1))
        )
        self.versions.append(version)

    def leave(self, row: int) -> None:
        """Forget a policy that leaves the stack; the rows after it move up."""
        keep = [each for each in range(len(self.versions)) if each != row]
        self.first, self.second, self.steps = self.first[keep], self.second[keep], self.steps[keep]
        self.normalizers.pop(row)
        self.versions.pop(row)

    def scales(self, which: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation (A, D) of ``observations``, ``states`` or ``returns``."""
        moments: list[Moments] = [getattr(each, which) for each in self.normalizers]
        return np.stack([m.mean for m in moments]), np.stack([m.scale(NORMAL_FLOOR) for m in moments])


def update(
    learner: StackLearner, rollouts: Mapping[str, Sequence[Rollout]], *, algorithm: str, progress: float, seed: int
) -> dict[str, UpdateReport]:
    """One update of every policy that has rollouts; the others stay as they are.

    Args:
        learner: Changed only when everything went well.
        rollouts: By policy; of versions that are admitted.
        algorithm: ``ppo``, or ``reinforce`` (one pass, no clipping; the critic is the baseline).
        progress: Share of the run that is over, for schedules.
        seed: Of the run.

    Returns:
        A report by policy. A policy whose numbers were no longer finite is back at where it was, and its report says so.
    """
    began = time.perf_counter()
    settings, stack = learner.settings, learner.policies
    own = [list(rollouts.get(name, ())) for name in stack.names]
    dtype = stack.parameters.dtype
    batch = collate(own, learner.versions, np.float64 if dtype == torch.float64 else np.float32)
    steps = _tensors(learner, batch)
    credit = _credit(learner, batch, steps, algorithm)
    orders = [
        _order(settings, int(count), seed, name, learner.versions[row].step)
        for row, (name, count) in enumerate(zip(stack.names, batch.counts, strict=True))
    ]
    work = _Work(
        parameters=stack.parameters.clone(), first=learner.first.clone(), second=learner.second.clone(),
        steps=learner.steps.copy(),
    )  # fmt: skip
    passes = _epochs(stack, settings, work, steps, credit, batch, orders, algorithm=algorithm, progress=progress)

    finite = torch.isfinite(work.parameters).all(dim=1) & torch.isfinite(work.second).all(dim=1)
    moved = finite & torch.from_numpy(batch.counts > 0)
    keep = moved.unsqueeze(1)
    stack.parameters.copy_(torch.where(keep, work.parameters, stack.parameters))
    learner.first = torch.where(keep, work.first, learner.first)
    learner.second = torch.where(keep, work.second, learner.second)
    learner.steps = np.where(keep.numpy(), work.steps, learner.steps)
    reports = {}
    seconds = time.perf_counter() - began
    for row, name in enumerate(stack.names):
        if not own[row]:
            continue
        if moved[row]:
            learner.versions[row] = replace(learner.versions[row], step=learner.versions[row].step + 1)
            learner.normalizers[row] = _merged(learner, row, batch, credit)
        reports[name] = _report(name, row, learner, batch, credit, passes, failed=not moved[row], seconds=seconds)
    return reports


# Before the epochs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """The batch as the policies see it."""

    batch: StepBatch
    finals: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Credit:
    """What every step is to learn; all (A, N), 0 on padding."""

    anchors: Tensor
    """Log-probs that ratios are taken against."""
    advantages: Tensor
    importance: Tensor | None
    """Truncated importance weights, where they are asked for."""
    targets: Tensor
    """In units of the value head."""
    old_values: Tensor
    returns: np.ndarray
    returns_moments: list[Moments]
    mismatch: np.ndarray
    """Shape (A,): mean |learner's log-prob - actor's| over steps of the learner's own version."""


def _tensors(learner: StackLearner, batch: RolloutBatch) -> _Steps:
    settings = learner.settings

    def seen(array: np.ndarray, which: str) -> Tensor:
        if settings.normalize_observations:
            mean, scale = learner.scales(which)
            array = ((array - mean[:, None]) / scale[:, None]).astype(array.dtype)
            array = np.clip(array, -OBSERVATION_CLIP, OBSERVATION_CLIP)
        return torch.from_numpy(array)

    centralised = batch.states is not None
    return _Steps(
        batch=StepBatch(
            observations=seen(batch.observations, "observations"), actions=torch.from_numpy(batch.actions),
            masks=None if batch.masks is None else torch.from_numpy(batch.masks),
            states=None if batch.states is None else seen(batch.states, "states"),
        ),
        finals=seen(batch.finals, "states" if centralised else "observations"),
    )  # fmt: skip


def _credit(learner: StackLearner, batch: RolloutBatch, steps: _Steps, algorithm: str) -> _Credit:
    settings, stack = learner.settings, learner.policies
    with torch.no_grad():
        log_probs, values = _evaluated(stack, steps.batch)
        finals = stack.values(stack.parameters, steps.finals).double().numpy()
    present = values.double().numpy()
    if settings.normalize_values:
        mean, scale = learner.scales("returns")
        present, finals = present * scale + mean, finals * scale + mean
    valid = batch.valid
    gaps = log_probs.double().numpy() - batch.log_probs
    fresh = valid & (batch.lags == 0)
    mismatch = (np.abs(gaps) * fresh).sum(1) / np.maximum(fresh.sum(1), 1)

    following = successors(batch, present, finals)
    columns = [by_rollout(batch, a) for a in (batch.rewards, present, following, batch.terminated, batch.ended)]
    importance = None
    if settings.correction == "vtrace" and algorithm == "ppo":
        traced = vtrace(
            by_rollout(batch, gaps), *columns, gamma=settings.gamma, lam=settings.gae_lambda, cap=settings.ratio_cap
        )
        advantages, targets = by_policy(batch, traced.advantages), by_policy(batch, traced.targets)
    else:
        advantages = by_policy(batch, gae(*columns, gamma=settings.gamma, lam=settings.gae_lambda))
        targets = np.where(valid, advantages + present, 0.0)
    if settings.correction == "truncated" and algorithm == "ppo":
        importance = torch.from_numpy(np.minimum(np.exp(gaps), settings.ratio_cap)).to(log_probs.dtype)

    moments = [each.returns for each in learner.normalizers]
    old = present
    head_targets = targets
    if settings.normalize_values:
        moments = [m.merge(Moments.of(targets[row][valid[row]][:, None])) for row, m in enumerate(moments)]
        mean = np.stack([m.mean for m in moments])
        scale = np.stack([m.scale(NORMAL_FLOOR) for m in moments])
        head_targets, old = np.where(valid, (targets - mean) / scale, 0.0), (present - mean) / scale
    behaviour = torch.from_numpy(batch.log_probs)
    out = torch.from_numpy(advantages).to(log_probs.dtype)
    if settings.normalize_advantages == "batch":
        out = normalized(out, torch.from_numpy(valid).to(out.dtype))
    return _Credit(
        anchors=log_probs if importance is not None else behaviour, advantages=out, importance=importance,
        targets=torch.from_numpy(head_targets).to(log_probs.dtype),
        old_values=torch.from_numpy(old).to(log_probs.dtype), returns=targets, returns_moments=moments,
        mismatch=mismatch,
    )  # fmt: skip


def _evaluated(stack: StackedPolicies, batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and values of the whole batch, some steps at a time."""
    length = batch.observations.shape[1]
    width = max(1, CHUNK // len(batch.observations))
    parts = []
    for start in range(0, length, width):
        log_probs, _, values = stack.evaluate(stack.parameters, _slice(batch, start, start + width))
        parts.append((log_probs, values))
    return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)


def _slice(batch: StepBatch, start: int, stop: int) -> StepBatch:
    return StepBatch(
        observations=batch.observations[:, start:stop], actions=batch.actions[:, start:stop],
        masks=None if batch.masks is None else batch.masks[:, start:stop],
        states=None if batch.states is None else batch.states[:, start:stop],
    )  # fmt: skip


def _order(settings: PPOSettings, count: int, seed: int, name: str, step: int) -> np.random.Generator | None:
    """Where a policy's orders of steps come from: its own name and step, whoever else is in the stack."""
    if not settings.shuffle or count == 0:
        return None
    words = np.frombuffer(name.encode(), np.uint8).tolist()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, *words])))


# The epochs


@dataclass(kw_only=True, slots=True)
class _Work:
    """The learner's numbers while they change."""

    parameters: Tensor
    first: Tensor
    second: Tensor
    steps: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """What the first and the last pass of each policy showed; rows of FIGURES, shape (A, len(FIGURES))."""

    first: np.ndarray
    last: np.ndarray
    stopped_in: np.ndarray
    """Shape (A,): passes that were begun."""
    stopped: np.ndarray
    """Shape (A,), bool: stopped by divergence."""


FIGURES = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def _epochs(
    stack: StackedPolicies, settings: PPOSettings, work: _Work, steps: _Steps, credit: _Credit, batch: RolloutBatch,
    generators: Sequence[np.random.Generator | None], *, algorithm: str, progress: float,
) -> _Passes:  # fmt: skip
    policies, most = batch.observations.shape[:2]
    size = min(settings.minibatch or most, most)
    count = -(-most // size)
    learning_rate = _scheduled(settings.learning_rate, settings.learning_rate_end, progress)
    clip = _scheduled(settings.clip, settings.clip_end, progress)
    epochs = 1 if algorithm == "reinforce" else settings.epochs
    active = torch.from_numpy(batch.counts > 0)
    first = last = np.zeros((policies, len(FIGURES)))
    stopped_in, stopped = np.zeros(policies, np.int64), torch.zeros(policies, dtype=torch.bool)
    ragged = bool((batch.counts != most).any())
    fields = _fields(steps, credit)
    each = torch.ones(policies, dtype=credit.advantages.dtype)  # policies' losses are apart: their sum's gradient
    for epoch in range(epochs):
        shuffled, weights = _shuffled(fields, batch, generators, size, count)
        if settings.normalize_advantages == "minibatch":
            cut = (policies, count, size)
            shuffled["advantages"] = normalized(
                shuffled["advantages"].view(cut), (weights > 0).to(weights.dtype).view(cut)
            ).view(policies, -1)
        measured = epoch in (0, epochs - 1) or settings.target_kl is not None
        sums = weights.new_zeros(policies, len(FIGURES))
        taken = weights.new_zeros(policies, 1)
        stopped_in += active.numpy()
        pieces = {name: tensor.split(size, dim=1) for name, tensor in shuffled.items()}
        for index, weight in enumerate(weights.split(size, dim=1)):
            here = {name: cut_up[index] for name, cut_up in pieces.items()}
            parameters = work.parameters.requires_grad_()
            minibatch = StepBatch(
                observations=here["observations"], actions=here["actions"], masks=here.get("masks"),
                states=here.get("states"),
            )  # fmt: skip
            log_probs, entropy, values = stack.evaluate(parameters, minibatch)
            log_ratios = log_probs - here["anchors"]
            advantages = here["advantages"]
            if "importance" in here:
                advantages = advantages * here["importance"]
            if algorithm == "reinforce":
                policy_loss, ratios = -(log_probs * advantages * weight).sum(-1), log_ratios.exp()
            else:
                policy_loss, ratios = clipped_surrogate(log_ratios, advantages, weight, clip)
            error = value_loss(values, here["targets"], weight, old_values=here["old_values"], clip=settings.clip_value)
            loss = policy_loss + settings.value_coefficient * error
            if settings.entropy_coefficient > 0.0:
                loss = loss - settings.entropy_coefficient * (entropy * weight).sum(-1)
            (gradients,) = torch.autograd.grad(loss, parameters, grad_outputs=each)
            with torch.no_grad():
                work.parameters = parameters.detach()
                norms = None
                if settings.max_grad_norm is not None:
                    gradients, norms = clip_gradients(gradients, settings.max_grad_norm)
                if measured:
                    figures = _figures(policy_loss, error, entropy, log_ratios, ratios, weight, clip, gradients, norms)
                    steps_here = (weight > 0).sum(1, keepdim=True)
                    share = steps_here * active.unsqueeze(1)
                    sums, taken = sums + torch.where(share > 0, figures * share, 0.0), taken + share
                    if settings.target_kl is not None:
                        kl = figures[:, 3:4] if settings.kl_window == "minibatch" else sums[:, 3:4] / taken.clamp(min=1)
                        over = (kl.squeeze(1) > 1.5 * settings.target_kl) & active & (steps_here.squeeze(1) > 0)
                        stopped, active = stopped | over, active & ~over
                _step(work, gradients, learning_rate, settings, weight, active, everyone=not ragged)
            if settings.target_kl is not None and not bool(active.any()):
                break
        if measured:
            means = (sums / taken.clamp(min=1)).double().numpy()
            seen = (taken.squeeze(1) > 0).numpy()
            first = means if epoch == 0 else first
            last = np.where(seen[:, None], means, last)
        if not bool(active.any()):
            break
    return _Passes(first=first, last=last, stopped_in=stopped_in, stopped=stopped.numpy())


def _step(
    work: _Work, gradients: Tensor, learning_rate: float, settings: PPOSettings, weight: Tensor, active: Tensor, *,
    everyone: bool,
) -> None:  # fmt: skip
    """Adam, for the policies that have steps in this minibatch and have not stopped; nothing of the others moves."""
    if everyone and bool(active.all()):
        adam_step(work.parameters, gradients, work.first, work.second, work.steps, learning_rate, eps=settings.adam_eps)
        return
    moves = (active & (weight > 0).any(1)).unsqueeze(1)
    before = (work.parameters, work.first, work.second)
    after, steps = [tensor.clone() for tensor in before], work.steps.copy()
    adam_step(after[0], gradients, after[1], after[2], steps, learning_rate, eps=settings.adam_eps)
    chosen = [torch.where(moves, new, old) for new, old in zip(after, before, strict=True)]
    work.parameters, work.first, work.second = chosen
    work.steps = np.where(moves.numpy(), steps, work.steps)


def _fields(steps: _Steps, credit: _Credit) -> dict[str, Tensor]:
    """Everything that a minibatch is cut from, by name; (A, N, ...)."""
    fields: dict[str, Tensor | None] = {
        "observations": steps.batch.observations, "actions": steps.batch.actions, "masks": steps.batch.masks,
        "states": steps.batch.states, "anchors": credit.anchors, "advantages": credit.advantages,
        "targets": credit.targets, "old_values": credit.old_values, "importance": credit.importance,
    }  # fmt: skip
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def _shuffled(
    fields: Mapping[str, Tensor], batch: RolloutBatch, generators: Sequence[np.random.Generator | None], size: int,
    count: int,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """One pass over all steps: fields (A, count * size, ...) in each policy's order, and each step's weight in its
    minibatch: 1 / steps of the policy in it, 0 on padding."""
    policies, most = batch.observations.shape[:2]
    index = np.zeros((policies, count * size), np.int64)
    weights = np.zeros((policies, count * size))
    for row, (steps, generator) in enumerate(zip(batch.counts.tolist(), generators, strict=True)):
        index[row, :steps] = np.arange(steps) if generator is None else generator.permutation(steps)
        whole = steps // size * size
        weights[row, :whole] = 1.0 / size
        if whole < steps:
            weights[row, whole:steps] = 1.0 / (steps - whole)
    index += most * np.arange(policies)[:, None]
    flat = torch.from_numpy(index.ravel())
    shuffled = {
        name: tensor.reshape(policies * most, *tensor.shape[2:])
        .index_select(0, flat)
        .view(policies, count * size, *tensor.shape[2:])
        for name, tensor in fields.items()
    }
    return shuffled, torch.from_numpy(weights).to(fields["advantages"].dtype)


def _figures(
    policy_loss: Tensor, error: Tensor, entropy: Tensor, log_ratios: Tensor, ratios: Tensor, weight: Tensor,
    clip: float, gradients: Tensor, norms: Tensor | None,
) -> Tensor:  # fmt: skip
    clipped = ((ratios - 1.0).abs() > clip).to(weight.dtype)
    return torch.stack(
        [
            policy_loss,
            error,
            (entropy * weight).sum(-1),
            approximate_kl(log_ratios, ratios, weight),
            (clipped * weight).sum(-1),
            gradients.norm(dim=1) if norms is None else norms,
        ],
        dim=1,
    )


def _scheduled(start: float, end: float | None, progress: float) -> float:
    return start if end is None else start + (end - start) * min(max(progress, 0.0), 1.0)


# After them


def _merged(learner: StackLearner, row: int, batch: RolloutBatch, credit: _Credit) -> Normalizers:
    """Statistics with this batch in them. They change between updates only: a ratio of 1 stays one."""
    own, settings = learner.normalizers[row], learner.settings
    here = slice(0, int(batch.counts[row]))
    observations, states = own.observations, own.states
    if settings.normalize_observations:
        observations = observations.merge(Moments.of(batch.observations[row, here]))
        if batch.states is not None:
            states = states.merge(Moments.of(batch.states[row, here]))
    return Normalizers(observations=observations, states=states, returns=credit.returns_moments[row])


def _report(
    name: str, row: int, learner: StackLearner, batch: RolloutBatch, credit: _Credit, passes: _Passes, *, failed: bool,
    seconds: float,
) -> UpdateReport:  # fmt: skip
    here = slice(0, int(batch.counts[row]))
    last: dict[str, Any] = dict(zip(FIGURES, passes.last[row].tolist(), strict=True))
    first = dict(zip(FIGURES, passes.first[row].tolist(), strict=True))
    returns = credit.returns[row, here]
    spread = float(np.var(returns))
    residual = float(np.var(returns - credit.old_values[row, here].double().numpy())) if spread > 0 else 0.0
    return UpdateReport(
        policy=name, version=learner.versions[row], failed=failed, steps=int(batch.counts[row]),
        **last, policy_loss_change=last["policy_loss"] - first["policy_loss"],
        value_loss_change=last["value_loss"] - first["value_loss"],
        explained_variance=1.0 - residual / spread if spread > 0 and not learner.settings.normalize_values else None,
        passes=int(passes.stopped_in[row]), stopped=bool(passes.stopped[row]),
        mismatch=float(credit.mismatch[row]), version_lag=float(batch.lags[row, here].mean()), seconds=seconds,
    )  # fmt: skip
