"""Gated turns to experiences, and experiences to rows that hold nothing the gate dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparring.learning.gate import GatedTurn
from sparring.policies.contract import ScoreRow
from sparring.tokens.prefix_tree import shared_length
from sparring.types import Experience, PolicyVersion, Settlement


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """What a batch holds, for the report."""

    eligible_replies: int
    """Experiences with at least one token in the denominator."""
    kept_replies: int
    eligible_tokens: int
    """The normaliser."""
    graded_tokens: int
    mean_version_lag: float
    """Learner step minus behaviour step, mean over eligible replies; 0 when there are none."""
    entropy: float
    """Mean behaviour surprisal of the eligible tokens, nats; 0 when there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows scored together, and flat tensors aligned with their kept positions (K over all rows), fp32 on the CPU."""

    rows: tuple[ScoreRow, ...]
    """Cut after their last kept position; rows without one are not here."""
    temperature: float
    top_p: float
    behaviour_log_probs: Tensor
    """(K,)"""
    advantages: Tensor
    """(K,)"""
    weights: Tensor
    """(K,), all above 0."""
    reply: Tensor
    """(K,), int64: index of the row of each token."""


def split_stale(
    settlements: Iterable[Settlement], learner: PolicyVersion, max_version_lag: int | None
) -> tuple[list[Settlement], list[Settlement]]:
    """(fresh, stale), for the loop to count and drop the stale before advantages are taken.

    The lag is the distance in optimiser steps; None takes everything for fresh. A turn of an abandoned future (sampled
    before a crash, at a step beyond the checkpoint) is as far away as its step is.
    """
    fresh: list[Settlement] = []
    stale: list[Settlement] = []
    for settlement in settlements:
        lag = abs(learner.step - settlement.turn.version.step)
        (fresh if max_version_lag is None or lag <= max_version_lag else stale).append(settlement)
    return fresh, stale


def to_experience(gated: GatedTurn) -> Experience:
    """One turn as the learner takes it: token arrays of shape (T,) = prompt then reply.

    A turn that does not count (a group of equal rewards) has an empty loss mask.
    """
    turn = gated.credited.settlement.turn
    prompt, reply = len(turn.prompt_ids), len(turn.reply_ids)
    nothing = (0.0,) * prompt
    return Experience(
        source=turn.id,
        policy=turn.policy,
        team=turn.team,
        version=turn.version,
        sampling=turn.sampling,
        token_ids=turn.prompt_ids + turn.reply_ids,
        loss_mask=(False,) * prompt + (gated.credited.counted,) * reply,
        behaviour_log_probs=nothing + turn.log_probs,
        advantages=nothing + (gated.credited.advantage,) * reply,
        weights=nothing + gated.weights,
    )


def to_experiences(turns: Iterable[GatedTurn], *, policy: str) -> list[Experience]:
    """The experiences of one policy, in order of TurnId."""
    mine = [turn for turn in turns if turn.credited.settlement.turn.policy == policy]
    return [to_experience(turn) for turn in sorted(mine, key=lambda turn: turn.credited.settlement.turn.id)]


def canonical(experiences: Iterable[Experience]) -> list[Experience]:
    """The one order in which a batch is learned, whatever order it came in: by sampling settings, tokens, source.

    Rows that share a beginning are neighbours, so that they fall into one micro-batch.
    """
    return sorted(experiences, key=lambda e: (e.sampling.temperature, e.sampling.top_p, e.token_ids, e.source))


def eligible_positions(experience: Experience) -> list[int]:
    """Positions in the denominator, ascending."""
    positions: list[int] = np.flatnonzero(np.array(experience.loss_mask, dtype=bool)).tolist()
    return positions


def kept_positions(experience: Experience) -> list[int]:
    """Eligible positions with a weight other than 0, ascending. Raises ValueError when arrays differ in length, or when
    position 0, which nothing predicts, is kept."""
    lengths = {
        len(experience.token_ids),
        len(experience.loss_mask),
        len(experience.behaviour_log_probs),
        len(experience.advantages),
        len(experience.weights),
    }
    if len(lengths) != 1:
        raise ValueError(f"experience {experience.source}: token arrays of different lengths {sorted(lengths)}")
    kept = np.array(experience.loss_mask, dtype=bool) & (np.array(experience.weights) != 0.0)
    positions: list[int] = np.flatnonzero(kept).tolist()
    if positions and positions[0] == 0:
        raise ValueError(f"experience {experience.source}: its first token has no prediction to learn from")
    return positions


def score_row(experience: Experience, positions: Sequence[int]) -> ScoreRow:
    """The row cut after its last kept position."""
    return ScoreRow(token_ids=experience.token_ids[: positions[-1] + 1], positions=tuple(positions))


def count(experiences: Sequence[Experience], learner: PolicyVersion) -> BatchCounts:
    """Counts and means over a batch, exact and independent of its order."""
    eligible = [eligible_positions(experience) for experience in experiences]
    kept = [kept_positions(experience) for experience in experiences]
    replies = sum(1 for positions in eligible if positions)
    tokens = sum(len(positions) for positions in eligible)
    lag = sum(learner.step - e.version.step for e, positions in zip(experiences, eligible, strict=True) if positions)
    surprisal = 0.0 - math.fsum(
        e.behaviour_log_probs[i] for e, positions in zip(experiences, eligible, strict=True) for i in positions
    )
    return BatchCounts(
        eligible_replies=replies,
        kept_replies=sum(1 for positions in kept if positions),
        eligible_tokens=tokens,
        graded_tokens=sum(len(positions) for positions in kept),
        mean_version_lag=lag / max(1, replies),
        entropy=surprisal / max(1, tokens),
    )


def micro_batches(
    experiences: Sequence[Experience], max_tokens: int, *, shares_prefixes: bool = False
) -> list[MicroBatch]:
    """The kept rows in canonical order, cut into parts of at most ``max_tokens`` positions, never within a row.

    The positions of a part are its distinct prefixes for a policy that shares them, else rows x longest row. A row
    longer than that is a part of its own. Parts never mix sampling settings. Temperature 0 (greedy) has the log-probs
    of temperature 1 and is scored so.
    """
    parts: list[list[tuple[Experience, ScoreRow]]] = []
    longest = size = 0
    for experience in canonical(experiences):
        positions = kept_positions(experience)
        if not positions:
            continue
        row = score_row(experience, positions)
        last = parts[-1] if parts else []
        if shares_prefixes:
            size += len(row.token_ids) - (shared_length(last[-1][1].token_ids, row.token_ids) if last else 0)
        else:
            longest = max(longest, len(row.token_ids))
            size = (len(last) + 1) * longest
        if not last or not _same_sampling(last[0][0], experience) or size > max_tokens:
            parts.append([])
            longest = size = len(row.token_ids)
        parts[-1].append((experience, row))
    return [_micro_batch(part) for part in parts]


def pack_rows(rows: Sequence[ScoreRow], max_tokens: int) -> list[list[ScoreRow]]:
    """Rows for supervised learning in canonical order, cut by the same rule. Rows without positions are left out, the
    others are cut after their last. Raises ValueError when positions are not ascending, or outside 1..T-1."""
    cut: list[ScoreRow] = []
    for row in rows:
        if not row.positions:
            continue
        ascending = all(a < b for a, b in pairwise(row.positions))
        if not ascending or row.positions[0] < 1 or row.positions[-1] >= len(row.token_ids):
            raise ValueError(f"positions {row.positions} of a row of {len(row.token_ids)} tokens: ascending, from 1")
        cut.append(ScoreRow(token_ids=row.token_ids[: row.positions[-1] + 1], positions=row.positions))
    parts: list[list[ScoreRow]] = []
    longest = 0
    for row in sorted(cut, key=lambda row: (len(row.token_ids), row.token_ids, row.positions)):
        longest = max(longest, len(row.token_ids))
        if not parts or (len(parts[-1]) + 1) * longest > max_tokens:
            parts.append([])
            longest = len(row.token_ids)
        parts[-1].append(row)
    return parts


def _same_sampling(a: Experience, b: Experience) -> bool:
    return (a.sampling.temperature, a.sampling.top_p) == (b.sampling.temperature, b.sampling.top_p)


def _micro_batch(part: Sequence[tuple[Experience, ScoreRow]]) -> MicroBatch:
    sampling = part[0][0].sampling

    def flat(field: Callable[[Experience], Sequence[float]]) -> Tensor:
        return torch.tensor([field(e)[i] for e, row in part for i in row.positions], dtype=torch.float32)

    return MicroBatch(
        rows=tuple(row for _, row in part),
        temperature=sampling.temperature if sampling.temperature > 0.0 else 1.0,
        top_p=sampling.top_p,
        behaviour_log_probs=flat(lambda e: e.behaviour_log_probs),
        advantages=flat(lambda e: e.advantages),
        weights=flat(lambda e: e.weights),
        reply=torch.tensor([i for i, (_, row) in enumerate(part) for _ in row.positions], dtype=torch.int64),
    )
