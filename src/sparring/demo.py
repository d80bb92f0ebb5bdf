"""``sparring demo``: the main job on the embedded model, in minutes, with its proof.

Three teams that share one model do business in a market; the run's start, its filtered clone and its trained model then
decide the same held-out situations: scam families, handles and seeds that none of them has ever met.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparring.config import CheckpointSettings, DemoConfig, EvalConfig, SharedConfig
from sparring.evaluation.evaluate import EvalReport, evaluate_shared
from sparring.learning.settings import OptimizerSettings
from sparring.loops.shared import SharedReport, train_shared

RULES: Mapping[str, float] = {"red_sender_share": 0.45}
"""Attackers are almost half of whom an agent hears from, not a tenth: else minutes show too few attacks to learn from. The
panel that judges is the same whatever the share."""
SHORT = SharedConfig(
    worlds=8, agents_per_team=2, ticks=80, env_settings=RULES,
    optimizer=OptimizerSettings(learning_rate=4e-4, beta2=0.98),
    checkpoint=CheckpointSettings(every=40, keep=2),
)  # fmt: skip
"""A few minutes on two cores."""
FULL = SharedConfig(
    worlds=8, agents_per_team=4, ticks=400, env_settings=RULES,
    optimizer=OptimizerSettings(learning_rate=3e-4, beta2=0.98),
    checkpoint=CheckpointSettings(every=50, keep=2),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """What the demo did and what came of it."""

    training: SharedReport
    evaluation: EvalReport

    def render(self) -> str:
        return f"{self.evaluation.render()}\n{verdict(self.evaluation)}"

    def flat(self) -> Mapping[str, float | int | str]:
        return self.evaluation.flat() | {
            "training_seconds": self.training.seconds,
            "valid_share": self.training.valid_share,
        }


def demo(config: DemoConfig) -> DemoReport:
    """Trains and evaluates; the run stays under ``runs/``."""

    chosen = FULL if config.full else SHORT
    print(
        f"Three teams of {chosen.agents_per_team} agents in each of {chosen.worlds} markets share one small model and "
        f"learn for {chosen.ticks} ticks.", file=sys.stderr,
    )  # fmt: skip
    training = train_shared(
        replace(chosen, seed=config.seed, run=config.run, threads=config.threads, quiet=config.quiet)
    )
    evaluation = evaluate_shared(EvalConfig(
        run=training.run, situations=480 if config.full else 400, seed=1000 + config.seed, threads=config.threads,
        quiet=config.quiet,
    ))  # fmt: skip
    return DemoReport(training=training, evaluation=evaluation)


def verdict(report: EvalReport) -> str:
    """What this run shows, claim by claim, and what it does not."""
    start, cloned = report.over_start, report.over_cloned
    reduction = report.reductions["blue_loss"]
    claims = (
        (
            "blue loses at least 40 % less an attack than at the start",
            reduction.low > 0 and reduction.value >= 0.4,
            reduction,
        ),
        ("blue loses less than the clone", cloned["blue_loss"].high < 0, cloned["blue_loss"]),
        ("blue serves no fewer honest requests", start["service"].value >= 0, start["service"]),
        ("red takes more", start["red_takings"].low > 0, start["red_takings"]),
    )
    lines = [
        f"{'shown    ' if holds else 'not shown'}  {claim}: {e.value:+.2f} ({e.low:+.2f} to {e.high:+.2f}), n = {e.n}"
        for claim, holds, e in claims
    ]
    return "\n".join(
        [
            *lines,
            f"The run is in {report.run}. A model of a million parameters shows whether the machinery learns, and nothing of",
            "what larger models would do.",
            f"Next: sparring eval {report.run} --json   |   sparring play market   |   sparring train shared --help",
        ]
    )
