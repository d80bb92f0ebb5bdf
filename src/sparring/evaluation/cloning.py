"""Filtered behaviour cloning: supervised training on the best fifth of the very replies that a run sampled.

It is the baseline for every claim of reinforcement learning: a gain that cloning also gives is not a gain of RL.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.errors import CheckpointError
from sparring.files import read_jsonl
from sparring.learning.settings import OptimizerSettings
from sparring.learning.supervised import reply_row, supervised_epochs
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import ScoreRow

BEST_SHARE = 0.2
EPOCHS = 1
BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CloningReport:
    """What cloning learned from."""

    replies: int
    """Of the policy in the run's transcripts, valid or not."""
    chosen: int
    epochs: int
    steps: int
    learning_rate: float


def best_replies(
    run: Path, policy: str, *, until: int | None = None, share: float = BEST_SHARE
) -> tuple[list[ScoreRow], int]:
    """Rows of the best ``share`` of each team's replies by reward, and how many replies there were; of those that had
    settled by tick ``until``.

    Raises:
        CheckpointError: The run has no transcripts of the policy.
    """
    by_team: dict[str, list[tuple[float, int, dict[str, Any]]]] = defaultdict(list)
    count = 0
    for file in sorted((run / "episodes").glob("*.jsonl.zst")):
        for row in read_jsonl(file):
            late = until is not None and int(str(row["tick"])) > until
            if row["policy"] == policy and isinstance(row["reward"], float | int) and not late:
                by_team[str(row["team"])].append((float(row["reward"]), count, dict(row)))
                count += 1
    if not count:
        raise CheckpointError(f"{run}: no transcripts of policy {policy!r} to clone from")
    rows: list[ScoreRow] = []
    for team in sorted(by_team):
        ordered = sorted(by_team[team], key=lambda item: (-item[0], item[1]))
        best = ordered[: max(1, round(share * len(ordered)))]
        rows += [reply_row(row["prompt_ids"], row["reply_ids"]) for _, _, row in best]
    return rows, count


def clone(
    policy: CausalLM, run: Path, optimizer: OptimizerSettings, *, seed: int, micro_batch_tokens: int,
    until: int | None = None,
) -> CloningReport:  # fmt: skip
    """Trains ``policy`` (at its start) on the best fifth of the run's replies (up to tick ``until``), with the run's
    optimiser settings."""
    rows, count = best_replies(run, policy.name, until=until)
    reports = supervised_epochs(
        policy, rows, optimizer=optimizer, epochs=EPOCHS, batch_size=BATCH, seed=seed,
        bad_batch_dir=run / "bad-batches", micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    return CloningReport(
        replies=count, chosen=len(rows), epochs=EPOCHS, steps=len(reports), learning_rate=optimizer.rate
    )
