"""``sparring eval``: start, cloned, trained and every bot on one held-out panel, with intervals."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparring.checkpoints import read_checkpoint
from sparring.config import EvalConfig, SharedConfig
from sparring.envs.contract import Env, Figure, Situation, Suite
from sparring.envs.load import load_env
from sparring.errors import ConfigError
from sparring.evaluation.cloning import CloningReport, clone
from sparring.evaluation.panel import play_bot, play_policy
from sparring.evaluation.statistics import Bootstrap, Estimate
from sparring.policies.causal_lm import CausalLM
from sparring.rundir import find_run
from sparring.runs import build_policies, find_checkpoint, policy_name, restore_policies, run_config

MODELS = ("start", "cloned", "trained")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """A panel's figures by player, and what training changed, paired by situation."""

    run: str
    step: int
    situations: int
    seed: int
    estimates: Mapping[str, Mapping[str, Estimate]]
    """Player -> figure -> estimate."""
    over_start: Mapping[str, Estimate]
    """Trained minus start, by figure."""
    over_cloned: Mapping[str, Estimate]
    """Trained minus cloned."""
    reductions: Mapping[str, Estimate]
    """1 - trained / start, of figures where lower is better."""
    cloning: CloningReport | None

    def flat(self) -> dict[str, float | int | str]:
        """The figures of the models under flat names: ``blue_loss_start``, ``blue_loss_start_low``, ..."""
        row: dict[str, float | int | str] = {"run": self.run, "step": self.step, "situations": self.situations, "seed": self.seed}
        for player, figures in self.estimates.items():
            for name, estimate in figures.items():
                row |= _flat(f"{name}_{player}", estimate)
        for label, group in (("over_start", self.over_start), ("over_cloned", self.over_cloned), ("reduction", self.reductions)):
            for name, estimate in group.items():
                row |= _flat(f"{name}_{label}", estimate)
        return row


def _flat(name: str, estimate: Estimate) -> dict[str, float | int | str]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high, f"{name}_n": estimate.n}


def suite_of(env: Env) -> Suite:
    """The environment's evaluation suite; ConfigError if it declares none."""
    suite = getattr(env, "suite", None)
    if suite is None:
        raise ConfigError(f"{env.name} declares no evaluation suite: give the environment an attribute `suite`")
    found: Suite = suite
    return found


def evaluate_run(config: EvalConfig) -> EvalReport:
    """Measures a run: its start, its trained policies, filtered cloning of its replies, and every bot.

    Raises:
        ConfigError, CheckpointError: No such run, checkpoint or suite.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = find_run(config.run)
    settings = run_config(run)
    env = load_env(settings.env, rules=settings.rules, settings=settings.env_settings)
    suite = suite_of(env)
    situations = suite.situations(count=config.situations, seed=config.seed)
    checkpoint = read_checkpoint(find_checkpoint(run, config.step))
    teams = [team for team in env.teams if settings.players.get(team, "policy") == "policy"]
    say = _Say(quiet=config.quiet)

    rows: dict[str, list[Any]] = {}
    policies = build_policies(settings, teams)
    say(f"start plays {len(situations)} situations")
    rows["start"] = _play(policies, settings, situations, seed=config.seed)
    cloning: CloningReport | None = None
    if config.cloning:
        say(f"cloning the best fifth of the run's replies")  # noqa: F541
        for name in sorted(policies):
            cloning = clone(
                policies[name], run, settings.optimizer, seed=config.seed,
                micro_batch_tokens=settings.loss.micro_batch_tokens,
            )  # fmt: skip
        rows["cloned"] = _play(policies, settings, situations, seed=config.seed)
    say("trained plays")
    restore_policies(policies, checkpoint)
    rows["trained"] = _play(policies, settings, situations, seed=config.seed)
    for name, bot in getattr(env, "bots", {}).items():
        rows[f"bot_{name}"] = play_bot(bot, situations, seed=config.seed)

    bootstrap = Bootstrap([situation.key for situation in situations], seed=config.seed)
    figures = suite.figures
    return EvalReport(
        run=str(run), step=checkpoint.manifest.step, situations=len(situations), seed=config.seed,
        estimates={player: _estimates(bootstrap, figures, found) for player, found in rows.items()},
        over_start=_differences(bootstrap, figures, rows["trained"], rows["start"]),
        over_cloned=_differences(bootstrap, figures, rows["trained"], rows["cloned"]) if "cloned" in rows else {},
        reductions={
            name: bootstrap.reduction(figure, rows["trained"], rows["start"])
            for name, figure in figures.items()
            if not figure.higher_is_better
        },
        cloning=cloning,
    )  # fmt: skip


class _Say:
    """Progress on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            print(f"eval: {text}", file=sys.stderr, flush=True)


def _play(policies: Mapping[str, CausalLM], settings: SharedConfig, situations: Sequence[Situation], *, seed: int) -> list[Any]:
    """Every situation, decided by the policy of its team; in the order of the situations."""
    results: list[Any] = [None] * len(situations)
    for name, policy in policies.items():
        mine = [i for i, situation in enumerate(situations) if policy_name(settings, situation.team) == name]
        played = play_policy(policy, [situations[i] for i in mine], settings.sampling, seed=seed)
        for i, result in zip(mine, played, strict=True):
            results[i] = result
    return results


def _estimates(bootstrap: Bootstrap, figures: Mapping[str, Figure], rows: Sequence[Any]) -> dict[str, Estimate]:
    return {name: bootstrap.estimate(figure, rows) for name, figure in figures.items()}


def _differences(
    bootstrap: Bootstrap, figures: Mapping[str, Figure], rows: Sequence[Any], other: Sequence[Any]
) -> dict[str, Estimate]:
    return {name: bootstrap.difference(figure, rows, other) for name, figure in figures.items()}


def print_report(report: EvalReport, figures: Mapping[str, Figure]) -> None:
    """The report as a table for people, on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.run}, checkpoint {report.step}: {report.situations} held-out situations, 95 % intervals")
    table.add_column("figure")
    for player in report.estimates:
        table.add_column(player.removeprefix("bot_") if player in MODELS else f"bot {player.removeprefix('bot_')}", justify="right")
    for name, figure in figures.items():
        cells = [_cell(report.estimates[player][name], short=player not in MODELS) for player in report.estimates]
        table.add_row(f"{name} {'↑' if figure.higher_is_better else '↓'}\n[dim]{figure.unit}[/]", *cells)
    console = Console()
    console.print(table)
    for label, group in (("trained - start", report.over_start), ("trained - cloned", report.over_cloned)):
        for name, estimate in group.items():
            sign = "" if estimate.excludes_zero else "  (interval includes 0)"
            console.print(f"{label:>16}  {name:<18} {estimate.value:+8.3f}  [{estimate.low:+.3f}, {estimate.high:+.3f}]  n={estimate.n}{sign}", highlight=False, markup=False)


def _cell(estimate: Estimate, *, short: bool) -> str:
    if short:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f}\n[dim]{estimate.low:.2f} to {estimate.high:.2f}[/]"
