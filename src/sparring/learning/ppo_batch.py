"""Rollouts of many policies as padded arrays, and the layout in which credit is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.types import PolicyVersion, Rollout

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Steps of A policies, rollout after rollout, padded to N; padding repeats a policy's own first step."""

    counts: NDArray[np.int64]
    """Shape (A,): steps of each policy; 0 for one that sits this out."""
    observations: Array
    """Shape (A, N, D)."""
    actions: Array
    """Shape (A, N, K)."""
    masks: Array | None
    """Shape (A, N, M)."""
    states: Array | None
    """Shape (A, N, S)."""
    log_probs: Array
    """Shape (A, N): of the behaviour policy."""
    rewards: Array
    terminated: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    """Terminated, truncated, or the last of its rollout; true on padding."""
    bootstraps: NDArray[np.bool_]
    """Steps whose successor is a final observation."""
    lags: NDArray[np.int64]
    """Shape (A, N): learner's version minus the behaviour policy's, in updates."""
    final_counts: NDArray[np.int64]
    """Shape (A,)."""
    finals: Array
    """Shape (A, F, D), or (A, F, S) where the critic sees states."""
    columns: NDArray[np.int64]
    """Shape (T, R): flat index (policy * N + step) of step t of rollout r; beyond a rollout's end its last step."""
    inside: NDArray[np.bool_]
    """Shape (T, R): false beyond a rollout's end."""

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Shape (A, N): false on padding."""
        return np.arange(self.observations.shape[1]) < self.counts[:, None]


def collate(rollouts: Sequence[Sequence[Rollout]], versions: Sequence[PolicyVersion], dtype: Any) -> RolloutBatch:
    """Rollouts of A policies as one batch.

    Args:
        rollouts: For each policy; at least one has some.
        versions: Of the learner, for each policy.
        dtype: Of all floats.
    """
    first = next(each for own in rollouts for each in own)
    counts = np.array([sum(map(len, own)) for own in rollouts])
    policies, most = len(rollouts), int(counts.max())
    final_counts = np.array([sum(len(each.final_observations) for each in own) for own in rollouts])
    finals = "final_observations" if first.states is None else "final_states"

    def padded(take: Callable[[Rollout], Any], kind: Any, length: int = most) -> Array:
        example = take(first)
        out = np.zeros((policies, length, *example.shape[1:]), kind)
        for row, own in enumerate(rollouts):
            if own:
                whole = np.concatenate([take(each) for each in own]) if len(own) > 1 else take(own[0])
                out[row, : len(whole)] = whole
                if 0 < len(whole) < length:
                    out[row, len(whole) :] = whole[0]
        return out

    width = next((r.masks.shape[1] for own in rollouts for r in own if r.masks is not None), 0)

    def allowed(each: Rollout) -> Array:
        return np.ones((len(each), width), np.bool_) if each.masks is None else each.masks

    lengths = np.array([len(each) for own in rollouts for each in own])
    starts = np.array(
        [row * most + offset for row, own in enumerate(rollouts) for offset in _offsets(own)], dtype=np.int64
    )
    steps = np.arange(lengths.max())[:, None]
    ended = padded(_ends, np.bool_)
    ended[np.arange(most) >= counts[:, None]] = True
    masks = padded(allowed, np.bool_) if width else None
    if masks is not None:
        masks[counts == 0] = True
    return RolloutBatch(
        counts=counts, observations=padded(lambda r: r.observations, dtype),
        actions=padded(lambda r: r.actions, np.int64 if first.actions.dtype.kind == "i" else dtype),
        masks=masks, states=None if first.states is None else padded(lambda r: r.states, dtype),
        log_probs=padded(lambda r: r.log_probs, dtype), rewards=padded(lambda r: r.rewards, np.float64),
        terminated=padded(lambda r: r.terminated, np.bool_), ended=ended,
        bootstraps=padded(lambda r: r.bootstraps, np.bool_) & (np.arange(most) < counts[:, None]),
        lags=_lags(rollouts, versions, most), final_counts=final_counts,
        finals=padded(lambda r: getattr(r, finals), dtype, max(1, int(final_counts.max()))),
        columns=starts + np.minimum(steps, lengths - 1), inside=steps < lengths,
    )  # fmt: skip


def _offsets(own: Sequence[Rollout]) -> list[int]:
    lengths = [len(each) for each in own]
    found: list[int] = (np.cumsum(lengths) - lengths).astype(int).tolist()
    return found


def _ends(rollout: Rollout) -> Array:
    ends = rollout.terminated | rollout.truncated
    ends[-1] = True
    return ends


def _lags(rollouts: Sequence[Sequence[Rollout]], versions: Sequence[PolicyVersion], most: int) -> NDArray[np.int64]:
    lags = np.zeros((len(rollouts), most), np.int64)
    for row, (own, version) in enumerate(zip(rollouts, versions, strict=True)):
        at = 0
        for each in own:
            lags[row, at : at + len(each)] = version.step - each.version.step
            at += len(each)
    return lags


def successors(batch: RolloutBatch, values: Array, final_values: Array) -> Array:
    """The value of every step's successor, shape (A, N): that of the next row, or of the final observation.

    Args:
        batch: The steps.
        values: Shape (A, N).
        final_values: Shape (A, F).
    """
    following = np.empty_like(values)
    following[:, :-1], following[:, -1] = values[:, 1:], 0.0
    present = np.arange(final_values.shape[1]) < batch.final_counts[:, None]
    following[batch.bootstraps] = final_values[present]
    return following


def by_rollout(batch: RolloutBatch, array: Array) -> Array:
    """Steps (A, N) as columns (T, R), one a rollout; beyond its end a rollout repeats its last step."""
    found: Array = array.ravel()[batch.columns]
    return found


def by_policy(batch: RolloutBatch, columns: Array) -> Array:
    """Columns (T, R) back as (A, N), 0 on padding."""
    out = np.zeros(batch.observations.shape[:2], columns.dtype)
    out.ravel()[batch.columns[batch.inside]] = columns[batch.inside]
    return out
