"""``sparring eval``: start, cloned, trained and every bot on one held-out panel, with intervals."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparring.checkpoints import list_checkpoints, read_checkpoint
from sparring.config import EvalConfig, SharedConfig
from sparring.envs.contract import Env, Figure, Situation, Suite
from sparring.envs.load import load_env
from sparring.errors import ConfigError
from sparring.evaluation.cloning import CloningReport, clone
from sparring.evaluation.graph_panel import GraphEval, evaluate_selfplay
from sparring.evaluation.panel import answer_attacks, play_bot, play_policy, write_attacks
from sparring.evaluation.statistics import Bootstrap, Estimate
from sparring.policies.causal_lm import CausalLM
from sparring.rundir import find_run
from sparring.runs import (
    build_policies,
    find_checkpoint,
    is_selfplay,
    load_policy,
    policy_name,
    restore_policies,
    run_config,
)

MODELS = ("start", "cloned", "trained")
DEFENDERS = ("start", "trained")


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
    duels: Mapping[str, Mapping[str, Estimate]]
    """Opponent -> defender -> what it loses, where the suite has duels; opponents are the start, the trained model, the
    run's older checkpoints, and whom the configuration names."""
    headline: Mapping[str, Mapping[str, Estimate]]
    """Opponent (``scripted`` is the panel itself) -> defender -> the suite's headline figure; the worst counts."""
    cloning: CloningReport | None
    units: Mapping[str, str]
    """Figure -> its unit, and which way is better."""

    def render(self) -> str:
        """As tables for people."""
        return rendered(self)

    def flat(self) -> dict[str, float | int | str]:
        """The figures of the models under flat names: ``blue_loss_start``, ``blue_loss_start_low``, ..."""
        row: dict[str, float | int | str] = {
            "run": self.run,
            "step": self.step,
            "situations": self.situations,
            "seed": self.seed,
        }
        for player, figures in self.estimates.items():
            for name, estimate in figures.items():
                row |= _flat(f"{name}_{player}", estimate)
        for label, group in (
            ("over_start", self.over_start),
            ("over_cloned", self.over_cloned),
            ("reduction", self.reductions),
        ):
            for name, estimate in group.items():
                row |= _flat(f"{name}_{label}", estimate)
        for opponent, found in self.duels.items():
            for defender, estimate in found.items():
                row |= _flat(f"duel_loss_{defender}_vs_{opponent}", estimate)
        for defender in DEFENDERS if self.headline else ():
            opponent, estimate = self.worst(defender)
            row |= _flat(f"headline_{defender}", estimate) | {f"headline_{defender}_opponent": opponent}
        return row

    def worst(self, defender: str) -> tuple[str, Estimate]:
        """The opponent against whom a defender (``start`` or ``trained``) does worst, and the headline figure there."""
        opponent = min(self.headline, key=lambda name: self.headline[name][defender].value)
        return opponent, self.headline[opponent][defender]


def _flat(name: str, estimate: Estimate) -> dict[str, float | int | str]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high, f"{name}_n": estimate.n}


def suite_of(env: Env) -> Suite:
    """The environment's evaluation suite; ConfigError if it declares none."""
    suite = getattr(env, "suite", None)
    if suite is None:
        raise ConfigError(f"{env.name} declares no evaluation suite: give the environment an attribute `suite`")
    found: Suite = suite
    return found


def evaluate_run(config: EvalConfig) -> EvalReport | GraphEval:
    """Measures a run of any loop.

    Raises:
        ConfigError, CheckpointError: No such run, checkpoint or suite.
    """
    if is_selfplay(find_run(config.run)):
        return evaluate_selfplay(config)
    return evaluate_shared(config)


def evaluate_shared(config: EvalConfig) -> EvalReport:
    """Measures a run: its start, its trained policies, filtered cloning of its replies, and every bot.

    Raises:
        ConfigError, CheckpointError: No such run, checkpoint or suite.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = find_run(config.run)
    settings = replace(run_config(run), device=config.device)
    env = load_env(settings.env, rules=settings.rules, settings=settings.env_settings)
    suite = suite_of(env)
    situations = suite.situations(count=config.situations, seed=config.seed)
    checkpoint = read_checkpoint(find_checkpoint(run, config.step))
    teams = [team for team in env.teams if settings.players.get(team, "policy") == "policy"]
    learned = {policy_name(settings, team) for team in teams if team in (settings.trainable or teams)}
    say = _Say(quiet=config.quiet)

    rows: dict[str, list[Any]] = {}
    policies = build_policies(settings, teams)
    # A team that a bot or a stranger played has an adapter of its own in no checkpoint: its situations are left out.
    situations = [situation for situation in situations if policy_name(settings, situation.team) in policies]
    starts = {name: policy.state() for name, policy in policies.items()}
    say(f"start plays {len(situations)} situations")
    rows["start"] = _play(policies, settings, situations, seed=config.seed)
    cloning: CloningReport | None = None
    if config.cloning:
        say(f"cloning the best fifth of the run's replies")  # noqa: F541
        for name in sorted(learned):
            cloning = clone(
                policies[name], run, settings.optimizer, seed=config.seed,
                micro_batch_tokens=settings.loss.micro_batch_tokens, until=checkpoint.manifest.step,
            )  # fmt: skip
        rows["cloned"] = _play(policies, settings, situations, seed=config.seed)
    say("trained plays")
    restore_policies(policies, checkpoint)
    rows["trained"] = _play(policies, settings, situations, seed=config.seed)
    duels, headline = dict[str, dict[str, Estimate]](), dict[str, dict[str, Estimate]]()
    if hasattr(suite, "duels"):
        say("live opponents play")
        duels, headline = _duels(suite, policies, starts, settings, config, run, rows, situations)
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
        duels=duels, headline=headline, cloning=cloning,
        units={
            name: f"{figure.unit}, {'higher' if figure.higher_is_better else 'lower'} is better"
            for name, figure in figures.items()
        },
    )  # fmt: skip


class _Say:
    """Progress on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            print(f"eval: {text}", file=sys.stderr, flush=True)


def _play(
    policies: Mapping[str, CausalLM], settings: SharedConfig, situations: Sequence[Situation], *, seed: int
) -> list[Any]:
    """Every situation, decided by the policy of its team; in the order of the situations."""
    results: list[Any] = [None] * len(situations)
    for name, policy in policies.items():
        mine = [i for i, situation in enumerate(situations) if policy_name(settings, situation.team) == name]
        played = play_policy(policy, [situations[i] for i in mine], settings.sampling, seed=seed)
        for i, result in zip(mine, played, strict=True):
            results[i] = result
    return results


def _duels(
    suite: Any, policies: Mapping[str, CausalLM], starts: Mapping[str, Mapping[str, torch.Tensor]], settings: SharedConfig,
    config: EvalConfig, run: Path, panel: Mapping[str, Sequence[Any]], situations: Sequence[Situation],
) -> tuple[dict[str, dict[str, Estimate]], dict[str, dict[str, Estimate]]]:  # fmt: skip
    """Start and trained defenders against every live attacker: what they lose, and the headline figure.

    Attackers: start, trained, the run's older checkpoints, the configuration's opponents. Leaves the policies trained,
    as it found them.
    """
    duels = suite.duels(count=max(20, config.situations // 4), seed=config.seed)
    sides = [policy_name(settings, team) for team in (duels[0].attacker_team, duels[0].team)]
    if not set(sides) <= set(policies):
        return {}, {}
    attacker, defender = policies[sides[0]], policies[sides[1]]
    weights = {"start": starts, "trained": {name: policy.state() for name, policy in policies.items()}}
    attacks: dict[str, list[Any]] = {}

    def attack(opponent: str, policy: CausalLM) -> None:
        attacks[opponent] = write_attacks(policy, duels, settings.sampling, seed=config.seed)

    for opponent, held in weights.items():
        attacker.load_state(held[attacker.name])
        attack(opponent, attacker)
    newest = find_checkpoint(run, config.step)
    for place in [place for place in list_checkpoints(newest.parent) if place.name < newest.name]:
        restore_policies({attacker.name: attacker}, read_checkpoint(place))
        attack(f"past_{place.name}", attacker)
    for name in config.opponents:
        attack(name, load_policy(name, training=False, device=config.device))
    keys = [situation.key for situation in situations]
    bootstrap = Bootstrap([duel.key for duel in duels], seed=config.seed)
    joint = Bootstrap([*keys, *(duel.key for duel in duels)], seed=config.seed)
    lost: dict[str, dict[str, Estimate]] = {opponent: {} for opponent in attacks}
    headline: dict[str, dict[str, Estimate]] = {opponent: {} for opponent in ("scripted", *attacks)}
    for side in DEFENDERS:
        defender.load_state(weights[side][defender.name])
        headline["scripted"][side] = Bootstrap(keys, seed=config.seed).estimate(suite.headline, panel[side])
        for opponent, written in attacks.items():
            rows = answer_attacks(defender, duels, written, settings.sampling, seed=config.seed + 1)
            lost[opponent][side] = bootstrap.estimate(suite.duel_figure, rows)
            headline[opponent][side] = joint.estimate(suite.duel_headline, [*panel[side], *rows])
    if attacker is not defender:
        attacker.load_state(weights["trained"][attacker.name])
    return lost, headline


def _estimates(bootstrap: Bootstrap, figures: Mapping[str, Figure], rows: Sequence[Any]) -> dict[str, Estimate]:
    return {name: bootstrap.estimate(figure, rows) for name, figure in figures.items()}


def _differences(
    bootstrap: Bootstrap, figures: Mapping[str, Figure], rows: Sequence[Any], other: Sequence[Any]
) -> dict[str, Estimate]:
    return {name: bootstrap.difference(figure, rows, other) for name, figure in figures.items()}


def rendered(report: EvalReport) -> str:
    """The report as tables for people: the models with intervals, then the bots."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(120, Console().width), record=True, file=io.StringIO())
    models = [player for player in MODELS if player in report.estimates]
    title = f"{report.run}, checkpoint {report.step}: {report.situations} held-out situations, 95 % intervals"
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for player in models:
        table.add_column(player, justify="right")
    for label in ("trained - start", "trained - cloned") if report.over_cloned else ("trained - start",):
        table.add_column(label, justify="right")
    table.add_column("n", justify="right")
    for name, unit in report.units.items():
        cells = [_cell(report.estimates[player][name]) for player in models]
        changes = [group[name] for group in (report.over_start, report.over_cloned) if group]
        table.add_row(f"{name}\n[dim]{unit}[/]", *cells, *map(_change, changes), str(changes[0].n))
    console.print(table)
    if report.duels:
        duels = Table(
            title="Against each opponent, the same opportunities: credits lost an opportunity, and the headline figure",
            title_justify="left",
        )
        for column in ("opponent", "start loses", "trained loses", "headline, start", "headline, trained"):
            duels.add_column(column)
        for opponent, defenders in report.headline.items():
            losses = map(_cell, report.duels[opponent].values()) if opponent in report.duels else ("(above)", "(above)")
            duels.add_row(opponent, *losses, *map(_cell, defenders.values()))
        worst = {side: report.worst(side) for side in DEFENDERS}
        duels.add_section()
        duels.add_row(
            "worst",
            *(f"[dim]{worst[side][0]}[/]" for side in DEFENDERS),
            *(_cell(worst[side][1]) for side in DEFENDERS),
        )
        console.print(duels)
    bots = {player.removeprefix("bot_"): found for player, found in report.estimates.items() if player not in models}
    if bots:
        beside = Table(title="Scripted bots on the same panel", title_justify="left")
        beside.add_column("bot")
        for name in report.units:
            beside.add_column(name, justify="right")
        for bot, found in bots.items():
            beside.add_row(bot, *(f"{found[name].value:.2f}" for name in report.units))
        console.print(beside)
    return console.export_text(styles=sys.stdout.isatty())


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} [dim]({estimate.low:.2f}, {estimate.high:.2f})[/]"


def _change(estimate: Estimate) -> str:
    """Bold when the interval excludes zero."""
    text = f"{estimate.value:+.2f} ({estimate.low:+.2f}, {estimate.high:+.2f})"
    return f"[bold]{text}[/]" if estimate.excludes_zero else text
