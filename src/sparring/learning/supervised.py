"""Supervised training on replies: for a warm start, and for the cloning that reinforcement learning must beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import OptimizerSettings
from sparring.learning.step import supervised_step
from sparring.policies.contract import ScoreRow, TrainablePolicy
from sparring.types import StepReport


def reply_row(prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> ScoreRow:
    """A row whose reply tokens, and no others, are learned."""
    start, end = len(prompt_ids), len(prompt_ids) + len(reply_ids)
    return ScoreRow(token_ids=(*prompt_ids, *reply_ids), positions=tuple(range(start, end)))


def supervised_epochs(
    policy: TrainablePolicy,
    rows: Sequence[ScoreRow],
    *,
    optimizer: OptimizerSettings,
    epochs: int,
    batch_size: int,
    seed: int,
    bad_batch_dir: Path,
    micro_batch_tokens: int = 4096,
    report: Callable[[StepReport, int], None] = lambda step, total: None,
) -> list[StepReport]:
    """``epochs`` passes over ``rows`` in shuffled batches; the order follows from ``seed``.

    Args:
        report: Called after each step with its report and the number of steps in all.

    Returns:
        The steps' reports.

    Raises:
        TrainingError: Loss or gradient was not finite.
    """
    named = NamedOptimizer(policy.trainable_parameters(), policy.matrix_names(), optimizer, seed=seed)
    total = epochs * -(-len(rows) // batch_size)
    reports: list[StepReport] = []
    for epoch in range(epochs):
        order = list(range(len(rows)))
        Random(f"{seed}/{epoch}").shuffle(order)
        for begin in range(0, len(order), batch_size):
            batch = [rows[i] for i in order[begin : begin + batch_size]]
            reports.append(supervised_step(
                policy, batch, named, bad_batch_dir=bad_batch_dir, micro_batch_tokens=micro_batch_tokens
            ))  # fmt: skip
            report(reports[-1], total)
    return reports
