"""``sparring demo``: the main job on the embedded model, in minutes, with its proof.

Three teams that share one model do business in a market; the run's start, its filtered clone and its trained model then
decide the same held-out situations: scam families, handles and seeds that none of them has ever met.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparring.config import CheckpointSettings, DemoConfig, EvalConfig, SharedConfig
from sparring.evaluation.evaluate import EvalReport, evaluate_run
from sparring.learning.settings import OptimizerSettings
from sparring.loops.shared import SharedReport, train_shared

SHORT = SharedConfig(
    worlds=8, agents_per_team=2, ticks=90,
    optimizer=OptimizerSettings(learning_rate=4e-4, beta2=0.98),
    checkpoint=CheckpointSettings(every=30, keep=2),
)  # fmt: skip
"""A few minutes on two cores."""
FULL = SharedConfig(
    worlds=8, agents_per_team=4, ticks=400,
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
    evaluation = evaluate_run(EvalConfig(
        run=training.run, situations=480 if config.full else 320, seed=1000 + config.seed, threads=config.threads,
        quiet=config.quiet,
    ))  # fmt: skip
    return DemoReport(training=training, evaluation=evaluation)


def verdict(report: EvalReport) -> str:
    """What may be claimed, and what not."""
    loss, cloned = report.reductions["blue_loss"], report.over_cloned["blue_loss"]
    service, takings = report.over_start["service"], report.over_start["red_takings"]
    return (
        f"Blue loses {loss.value:.0%} less an attack than at the start (interval {loss.low:.0%} to {loss.high:.0%}), "
        f"{-cloned.value:.1f} credits less than filtered cloning ({-cloned.high:.1f} to {-cloned.low:.1f}).\n"
        f"It serves {service.value:+.0%} of honest requests ({service.low:+.0%} to {service.high:+.0%}); "
        f"red takes {takings.value:+.1f} credits more an opportunity ({takings.low:+.1f} to {takings.high:+.1f}).\n"
        f"The run is in {report.run}. This shows that the machinery learns, on a model of a million parameters: it says "
        "nothing of what larger models would do.\n"
        f"Next: sparring eval {report.run} --json   |   sparring play market   |   sparring train shared --help"
    )
