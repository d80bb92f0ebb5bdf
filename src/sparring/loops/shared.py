"""Many agents in teams learn with one shared model (or one adapter a team): policy gradient on the tokens worth it.

Read ``train_shared`` from top to bottom. What was left out of the textbook method, on purpose: no value function (the
baseline is the team's own batch), no replay (a settled turn is trained once), no epochs over a batch, and no backward
pass for tokens that the gate drops. Turns are trained when they have *settled*, some ticks after they were sampled;
importance weights correct for the steps between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from sparring.checkpoints import incarnation, latest, read_checkpoint, read_state, rotate, write_checkpoint
from sparring.config import SharedConfig, to_toml
from sparring.envs.contract import Env
from sparring.envs.load import load_env
from sparring.errors import ConfigError, SparringError, nearest
from sparring.inference.remote import RemoteChat
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import split_stale, to_experiences
from sparring.learning.gate import Gate, GateDecision, GateState
from sparring.learning.optimizers import NamedOptimizer, OptimizerState, optimizer_state
from sparring.learning.saved import learner_tensors, restore_learners
from sparring.learning.settings import usual_learning_rate
from sparring.learning.step import learner_step
from sparring.loops.rollout import (
    BotPlayer,
    Player,
    PolicyPlayer,
    RemotePlayer,
    SavedTable,
    SavedTurn,
    Stopwatch,
    Table,
    advance,
    decide,
    fork,
    load_table,
    load_turn,
    open_table,
    save_table,
    save_turn,
)
from sparring.metrics import MetricsWriter, Progress, Transcript, collapse_alarms
from sparring.policies.causal_lm import CausalLM
from sparring.rewards.load import RewardFunction, load_reward
from sparring.rundir import RunDirectory, Session, stop_on_signals
from sparring.runs import build_policies, load_policy, policy_name, restore_policies, tensor_file
from sparring.types import (
    EpisodeReport,
    Outcome,
    PolicyVersion,
    Reward,
    Settlement,
    StepReport,
    TeamReport,
    TickReport,
    Turn,
    TurnId,
)

ALARM_WINDOW = 20
"""Ticks that the collapse alarms look back on."""


class SavedSettlement(msgspec.Struct, frozen=True, kw_only=True):
    """A settled turn that still waits for its batch."""

    turn: SavedTurn
    settled_at: int
    reward: Reward


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run but its weights, moments and gate history: what a checkpoint's ``state.json`` holds."""

    tick: int
    next_episode: int
    tables: list[SavedTable]
    ready: list[SavedSettlement]
    baselines: BaselineState
    gate: GateState
    optimizers: dict[str, OptimizerState]
    versions: dict[str, PolicyVersion]
    counts: dict[str, float]
    window: list[TickReport]
    """What the alarms look back on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedReport:
    """What a run came to; ``report.json``."""

    run: str
    ticks: int
    episodes: int
    steps: Mapping[str, int]
    """Optimiser steps by policy."""
    replies: int
    valid_share: float
    """Of replies of policies."""
    trained_replies: int
    graded_tokens: int
    eligible_tokens: int
    stale_replies: int
    """Settled too many versions late, and left out."""
    unscored: Mapping[str, int]
    """Turns a reward function failed on, by reason."""
    reward_mean: Mapping[str, float]
    """By team, over all settled turns."""
    seconds: float
    stopped: bool
    """Ended early, by a signal; resume with --resume."""
    notices: tuple[str, ...]


def train_shared(config: SharedConfig, *, resume: Path | None = None) -> SharedReport:
    """Runs, or resumes, a training run under ``runs/`` and returns its report.

    Raises:
        ConfigError, ModelError, CheckpointError, EnvError: Before anything is written, where that is possible.
        TrainingError: Loss or gradient was not finite; the batch lies in the run's directory.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    forks = config.advantages.forks if config.advantages.kind == "group" else 1
    envs = [_make_env(config) for _ in range(config.worlds * forks)]
    env = envs[0]
    players, policies = _seat_players(config, env)
    trained = {name for name, policy in policies.items() if _is_trained(policy, players)}
    config = _with_learning_rate(config, [policies[name] for name in sorted(trained)])
    optimizers = {
        name: NamedOptimizer(policy.trainable_parameters(), policy.matrix_names(), config.optimizer, seed=config.seed)
        for name, policy in policies.items()
        if name in trained
    }
    if config.loss.kl_coefficient > 0.0:
        for name in optimizers:
            policies[name].keep_reference()
    gate, baselines = Gate(config.gate, seed=config.seed), BaselineState()
    reward = load_reward(config.reward, env=env)
    session = Session.now(device=config.device, threads=torch.get_num_threads())

    directory = RunDirectory.begin(
        resume, name=config.run, config_toml=to_toml(config), seed=config.seed, session=session, kind="shared"
    )
    with directory as run, stop_on_signals() as stop:
        number = incarnation(run.path)
        tick, next_episode, ready, counts = 0, 0, list[Settlement](), Counter[str]()
        newest = latest(run.checkpoints) if resume is not None else None
        checkpoint = None if newest is None else read_checkpoint(newest)
        window = deque[TickReport](maxlen=ALARM_WINDOW)
        if checkpoint is None:
            if resume is not None:
                run.cut_back(0)  # killed before its first checkpoint: the same run, from its start
            tables = []
            for world in range(config.worlds):
                tables += _open(config, envs[world * forks : (world + 1) * forks], world, next_episode)
                next_episode += forks
        else:
            state = read_state(checkpoint, SavedState)
            _check_fits(state, config)
            restore_policies(policies, checkpoint)
            restore_learners(
                checkpoint.tensors, state.optimizers, state.gate, policies, optimizers, gate, where=str(checkpoint.path)
            )
            baselines, tick, next_episode = state.baselines, state.tick, state.next_episode
            counts.update({key: int(value) if value.is_integer() else value for key, value in state.counts.items()})
            tables = [load_table(saved, own, policies) for saved, own in zip(state.tables, envs, strict=True)]
            ready = [_load_settlement(saved, policies, env) for saved in state.ready]
            window.extend(state.window)
            run.cut_back(tick)
        run.write_config(to_toml(config))
        for name, policy in policies.items():
            step = state.versions[name].step if checkpoint is not None else 0
            policy.version = PolicyVersion(incarnation=number, step=step)

        watch = Stopwatch()
        with (
            MetricsWriter(run.metrics) as metrics,
            Progress(total=config.ticks, start=tick, quiet=config.quiet) as progress,
        ):
            transcript = Transcript(run.episodes)
            for notice in run.notices:
                progress.note(notice)
            for name in sorted(trained):
                if policies[name].core.rows_because is not None:
                    progress.note(f"policy {name} goes row by row: {policies[name].core.rows_because}")

            saved_at = tick

            def save(done: int) -> None:
                """The checkpoint that stands for all ticks up to ``done``."""
                nonlocal saved_at
                saved_at = done
                metrics.sync()
                transcript.sync()
                saved = _state(done, next_episode, tables, ready, baselines, gate, optimizers, policies, counts, window)
                write_checkpoint(
                    run.checkpoints, done, tensors={tensor_file(name): policy.state() for name, policy in policies.items()}
                    | learner_tensors(policies, optimizers, gate),
                    documents={"state.json": msgspec.json.encode(saved)},
                    consumed={"tick": done, "episodes": next_episode},
                )  # fmt: skip
                rotate(run.checkpoints, config.checkpoint.keep)

            stopping = False
            while tick < config.ticks and not stopping:
                tick_watch = Stopwatch()
                tick += 1

                # Every agent decides; what settles comes back with its reward.
                before = {name: _sampled(players, name) for name in policies}
                try:
                    decided = decide(tables, players, config.sampling, seed=config.seed)
                except SparringError:  # an opponent elsewhere that fails: nothing of this tick has happened yet
                    if tick - 1 > saved_at:
                        save(tick - 1)
                    raise
                sampling_seconds = tick_watch.seconds()
                came: list[tuple[Turn, Outcome]] = []
                episodes: list[EpisodeReport] = []
                for index, table in enumerate(tables):
                    if not table.done:  # a fork may be over before the others of its world
                        came += advance(table, decided[index], players)
                settled = reward.settle(came)
                turns = [turn for one in decided for turn in one.turns]
                for world in range(config.worlds):
                    here = slice(world * forks, (world + 1) * forks)
                    first, own_envs = tables[here.start], [table.env for table in tables[here]]
                    if forks > 1 and any(table.pending for table in tables[here]):
                        continue  # forks go on until all that they differ in has settled
                    if first.done:
                        episodes.append(EpisodeReport(episode=first.world_episode, ticks=first.tick, figures={}))
                        tables[here] = _open(config, own_envs, world, next_episode)
                        next_episode += forks
                    elif forks > 1:
                        tables[here] = fork(first, own_envs, first_episode=next_episode)
                        next_episode += forks

                # Advantages over the whole batch, the gate, one step for each policy.
                ready += settled
                reports: list[StepReport] = []
                kept = Counter[str]()
                whole = ready if forks == 1 else _whole_groups(ready, tables, forks)
                waiting = Counter(s.turn.policy for s in whole)
                due = [name for name in sorted(trained) if waiting[name] >= config.min_batch]
                if due:
                    fresh: list[Settlement] = []
                    for name in due:
                        mine = [s for s in whole if s.turn.policy == name]
                        current, stale = split_stale(mine, policies[name].version, config.loss.max_version_lag)
                        fresh += current
                        counts["stale_replies"] += len(stale)
                    taken = {s.turn.id for s in whole if s.turn.policy in due}
                    ready = [s for s in ready if s.turn.id not in taken]
                    groups = {s.turn.id: _group(s.turn.id, forks) for s in fresh} if forks > 1 else None
                    credits, baselines = credit(fresh, config.advantages, baselines, groups=groups)
                    decision = gate.weigh(credits.turns)
                    kept = _kept_by_team(decision)
                    for name in due:
                        reports.append(learner_step(
                            policies[name], to_experiences(decision.turns, policy=name), config.loss, optimizers[name],
                            bad_batch_dir=run.path / "bad-batches",
                        ))  # fmt: skip

                # Reports, and the checkpoint that stands for all of it.
                report = _tick_report(
                    tick, env.teams, turns, settled, kept, tuple(reports), sampling_seconds=sampling_seconds,
                    prompt_tokens=sum(_sampled(players, name) - before[name] for name in policies),
                    seconds=tick_watch.seconds(), window=window,
                )  # fmt: skip
                window.append(report)
                _count(counts, report, settled)
                metrics.write(report, episodes)
                progress.update(report)
                for settlement in settled:
                    policy = policies[settlement.turn.policy]
                    transcript.write(settlement, tick=tick, reply=policy.chat.decode(settlement.turn.reply_ids))
                transcript.flush()
                stopping = stop()  # asked once a tick: a signal after this is answered by the next one
                if tick % config.checkpoint.every == 0 or tick == config.ticks or stopping:
                    save(tick)
        final = _report(
            run, tick, next_episode, policies, counts, reward, env.teams, watch, stopped=tick < config.ticks
        )
        run.write_report(final)
        return final


# ------------------------------------------------------------------------------------------------------- beginning


def _with_learning_rate(config: SharedConfig, trained: Sequence[CausalLM]) -> SharedConfig:
    """The same with a learning rate for the largest of the policies, where none was set."""
    if config.optimizer.learning_rate is not None or not trained:
        return config
    size = max(policy.parameter_count for policy in trained)
    rate = usual_learning_rate(size, adapters=config.adapters != "none")
    return replace(config, optimizer=replace(config.optimizer, learning_rate=rate))


def _make_env(config: SharedConfig) -> Env:
    return load_env(config.env, rules=config.rules, settings=config.env_settings)


def _open(config: SharedConfig, envs: Sequence[Env], number: int, episode: int) -> list[Table]:
    """A new episode of one world: a table, or one for each fork."""
    table = open_table(
        envs[0], number=number, episode=episode, seed=config.seed, agents_per_team=config.agents_per_team
    )
    return [table] if len(envs) == 1 else fork(table, envs, first_episode=episode)


def _group(turn: TurnId, forks: int) -> str:
    """The group of a turn: the same agent and tick in all forks of one world, whose numbers are consecutive."""
    return str(replace(turn, episode=turn.episode // forks * forks))


def _whole_groups(ready: Sequence[Settlement], tables: Sequence[Table], forks: int) -> list[Settlement]:
    """What has settled in forks that are no longer played: a group is credited when all of it is in."""
    playing = {table.episode // forks for table in tables}
    return [s for s in ready if s.turn.id.episode // forks not in playing]


def _seat_players(config: SharedConfig, env: Env) -> tuple[dict[str, Player], dict[str, CausalLM]]:
    """Who plays each team, and the policies in play that may learn, by name."""
    for team in (*config.players, *config.trainable):
        if team not in env.teams:
            raise ConfigError(
                f"players or trainable names team {team!r}, which {env.name} has not{nearest(team, env.teams)}"
            )
    kinds = {team: config.players.get(team, "policy") for team in env.teams}
    learning = [team for team, kind in kinds.items() if kind == "policy"]
    if not learning:
        raise ConfigError("players: no team is played by a policy, so there is nothing to train")
    trainable = set(config.trainable) or set(learning)
    policies = build_policies(config, learning)
    bots: Mapping[str, Any] = getattr(env, "bots", {})
    players: dict[str, Player] = {}
    frozen: dict[str, PolicyPlayer] = {}
    by_policy: dict[tuple[str, bool], PolicyPlayer] = {}
    for team, kind in kinds.items():
        word, _, rest = kind.partition(":")
        if word == "policy":
            name = policy_name(config, team)
            key = (name, team in trainable)
            by_policy.setdefault(key, PolicyPlayer.of(policies[name], trained=team in trainable, kv=config.kv))
            players[team] = by_policy[key]
        elif word == "bot":
            if rest not in bots:
                raise ConfigError(f"players.{team}: {env.name} has no bot {rest!r}{nearest(rest, bots)}")
            players[team] = BotPlayer(name=rest, bot=bots[rest])
        elif word == "frozen":
            if rest not in frozen:
                opponent = load_policy(rest, training=False, device=config.device)
                opponent.name = f"frozen:{rest}"
                frozen[rest] = PolicyPlayer.of(opponent, trained=False, kv=config.kv)
            players[team] = frozen[rest]
        else:
            url, _, model = rest.partition("#")
            full = load_env(config.env, rules="full", settings=config.env_settings).rules
            players[team] = RemotePlayer(client=RemoteChat(url, model), rules=full)
    return players, policies


def _is_trained(policy: CausalLM, players: Mapping[str, Player]) -> bool:
    return any(isinstance(p, PolicyPlayer) and p.trained and p.policy is policy for p in players.values())


# ---------------------------------------------------------------------------------------------------------- saving


def _state(
    tick: int, next_episode: int, tables: Sequence[Table], ready: Sequence[Settlement], baselines: BaselineState,
    gate: Gate, optimizers: Mapping[str, NamedOptimizer], policies: Mapping[str, CausalLM], counts: Counter[str],
    window: Sequence[TickReport],
) -> SavedState:  # fmt: skip
    return SavedState(
        tick=tick, next_episode=next_episode, tables=[save_table(table) for table in tables],
        ready=[
            SavedSettlement(turn=save_turn(s.turn), settled_at=s.outcome.settled_at, reward=s.reward) for s in ready
        ],
        baselines=baselines, gate=gate.state()[1],
        optimizers={name: optimizer_state(optimizer)[1] for name, optimizer in optimizers.items()},
        versions={name: policy.version for name, policy in policies.items()},
        counts={key: float(value) for key, value in counts.items()}, window=list(window),
    )  # fmt: skip


def _check_fits(state: SavedState, config: SharedConfig) -> None:
    """A resume may change much of the configuration, but not how many tables there are."""
    forks = config.advantages.forks if config.advantages.kind == "group" else 1
    if len(state.tables) != config.worlds * forks:
        raise ConfigError(
            f"worlds is {config.worlds} with {forks} fork(s) each, the run has {len(state.tables)} tables in all: that "
            "cannot change in a resume"
        )


def _load_settlement(saved: SavedSettlement, policies: Mapping[str, CausalLM], env: Env) -> Settlement:
    turn = load_turn(saved.turn, policies[saved.turn.policy], env.action_type)
    return Settlement(
        turn=turn, outcome=Outcome(turn=turn.id, facts=None, settled_at=saved.settled_at), reward=saved.reward
    )


# --------------------------------------------------------------------------------------------------------- reports


def _sampled(players: Mapping[str, Player], policy: str) -> int:
    """Prompt tokens that a policy's samplers have read so far."""
    samplers = {
        id(p.sampler): p.sampler for p in players.values() if isinstance(p, PolicyPlayer) and p.policy.name == policy
    }
    return sum(sampler.statistics.prompt_tokens for sampler in samplers.values())


def _kept_by_team(decision: GateDecision) -> Counter[str]:
    kept: Counter[str] = Counter()
    for turn in decision.turns:
        if any(turn.weights):
            kept[turn.credited.settlement.turn.team] += 1
    return kept


def _tick_report(
    tick: int, teams: Sequence[str], turns: Sequence[Turn], settled: Sequence[Settlement], kept: Counter[str],
    steps: tuple[StepReport, ...], *, sampling_seconds: float, prompt_tokens: int, seconds: float,
    window: Sequence[TickReport],
) -> TickReport:  # fmt: skip
    rows = []
    for team in teams:
        mine = [turn for turn in turns if turn.team == team]
        back = [s for s in settled if s.turn.team == team and s.reward.total is not None]
        parts: Counter[str] = Counter()
        for settlement in back:
            parts.update(settlement.reward.parts)
        rows.append(TeamReport(
            team=team, replies=len(mine), valid_replies=sum(turn.valid for turn in mine), settled=len(back),
            reward_mean=sum(s.reward.total or 0.0 for s in back) / len(back) if back else None,
            reward_parts={name: value / len(back) for name, value in parts.items()},
            kept_replies=kept[team], action_counts=Counter(_action_name(turn) for turn in mine),
            reply_tokens=sum(len(turn.reply_ids) for turn in mine),
        ))  # fmt: skip
    report = TickReport(
        tick=tick, teams=tuple(rows), steps=steps, sampled_tokens=sum(len(turn.reply_ids) for turn in turns),
        prompt_tokens=prompt_tokens, sampling_seconds=sampling_seconds, seconds=seconds,
    )  # fmt: skip
    return replace(report, alarms=collapse_alarms([*window, report]))


def _action_name(turn: Turn) -> str:
    if not turn.valid:
        return "parse_failure"
    tag = getattr(getattr(turn.action, "__struct_config__", None), "tag", None)
    return str(tag or type(turn.action).__name__)


def _count(counts: Counter[str], report: TickReport, settled: Sequence[Settlement]) -> None:
    for team in report.teams:
        counts["replies"] += team.replies
        counts["valid_replies"] += team.valid_replies
    for step in report.steps:
        counts["trained_replies"] += step.eligible_replies
        counts["graded_tokens"] += step.graded_tokens
        counts["eligible_tokens"] += step.eligible_tokens
    for settlement in settled:
        if settlement.reward.total is not None:
            counts[f"settled/{settlement.turn.team}"] += 1
            counts[f"reward/{settlement.turn.team}"] += settlement.reward.total  # type: ignore[assignment]


def _report(
    run: RunDirectory, tick: int, episodes: int, policies: Mapping[str, CausalLM], counts: Counter[str],
    reward: RewardFunction, teams: Sequence[str], watch: Stopwatch, *, stopped: bool,
) -> SharedReport:  # fmt: skip
    return SharedReport(
        run=str(run.path), ticks=tick, episodes=episodes, steps={name: p.version.step for name, p in policies.items()},
        replies=counts["replies"], valid_share=counts["valid_replies"] / max(1, counts["replies"]),
        trained_replies=counts["trained_replies"], graded_tokens=counts["graded_tokens"],
        eligible_tokens=counts["eligible_tokens"], stale_replies=counts["stale_replies"], unscored=dict(reward.unscored),
        reward_mean={t: counts[f"reward/{t}"] / counts[f"settled/{t}"] for t in teams if counts[f"settled/{t}"]},
        seconds=watch.seconds(), stopped=stopped, notices=run.notices,
    )  # fmt: skip
