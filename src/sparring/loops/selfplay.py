"""A generator sets tasks on knowledge graphs, an answerer solves them, and both learn from the exact verdict of a solver.

Read ``train_selfplay`` from top to bottom: the run is one list of learner steps (round, phase, step), each on a batch that
was sampled for it. What was left out, on purpose: no reference answers from a judge (the solver knows them), no replay of
old batches, no reload of a model between phases (one resident model, its weights swapped for a moment where a past
answerer judges), and no template tasks in the place of missing ones without saying so: ``fallbacks`` counts them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from sparring.checkpoints import incarnation, latest, read_checkpoint, read_state, rotate, write_checkpoint
from sparring.config import SelfplayConfig, to_toml
from sparring.envs.graph.records import GeneratorFacts
from sparring.envs.graph.solver import task_budget
from sparring.envs.graph.views import World
from sparring.evaluation.graph_panel import GraphEval, measure
from sparring.evaluation.selfplay_files import RoundRows, answerer_row, phase_result, write_json, write_rounds
from sparring.files import read_jsonl
from sparring.inference.ask import Spoken
from sparring.league.graph_match import (
    ROLES,
    At,
    PoolTask,
    Role,
    admit,
    answerer_rewards,
    choose,
    generate,
    generator_facts,
    judge,
    play,
    policies_speak,
    policy_of,
    scripts_speak,
    trl_reward_function,
    worlds_of,
)
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate, GateState
from sparring.learning.optimizers import NamedOptimizer, OptimizerState, optimizer_state
from sparring.learning.saved import learner_tensors, restore_learners
from sparring.learning.step import learner_step
from sparring.loops.rollout import Stopwatch
from sparring.metrics import MetricsWriter, Progress, Transcript, collapse_alarms
from sparring.policies.causal_lm import CausalLM
from sparring.rewards.graph import GeneratorWeights, generator_rewards
from sparring.rundir import RunDirectory, Session, stop_on_signals
from sparring.runs import build_selfplay_policies, restore_policies, tensor_file
from sparring.types import (
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


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run but its weights, moments and gate history: what a checkpoint's ``state.json`` holds."""

    tick: int
    pool: list[PoolTask]
    rows: RoundRows
    rounds: list[dict[str, Any]]
    baselines: BaselineState
    gate: GateState
    optimizers: dict[str, OptimizerState]
    versions: dict[str, PolicyVersion]
    counts: dict[str, int]
    opponents: list[int]
    window: list[TickReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfplayReport:
    """What a run came to; ``report.json``."""

    run: str
    steps: Mapping[str, int]
    """Optimiser steps by policy."""
    completions: int
    valid_completions: int
    tasks: int
    """Distinct tasks admitted."""
    fallbacks: int
    """Scripted tasks that took the place of generated ones, because no generated one was valid."""
    solve_rates: Mapping[str, int]
    """Judged tasks by the share of attempts that were right."""
    task_budget: Mapping[int, int]
    """Distinct unambiguous path tasks of the first round's graphs, by hops."""
    evaluation: GraphEval | None
    seconds: float
    stopped: bool
    """Ended early, by a signal; resume with --resume."""
    notices: tuple[str, ...]

    def flat(self) -> dict[str, Any]:
        """With the evaluation's figures under their own names: ``accuracy_trained``, ``accuracy_trained_low``, ..."""
        row = {name: getattr(self, name) for name in self.__slots__ if name != "evaluation"}
        return row | (self.evaluation.flat() if self.evaluation is not None else {})


def train_selfplay(config: SelfplayConfig, *, resume: Path | None = None) -> SelfplayReport:
    """Runs, or resumes, self-play under ``runs/`` and returns its report.

    Raises:
        ConfigError, ModelError, CheckpointError, EnvError: Before anything is written, where that is possible.
        TrainingError: Loss or gradient was not finite; the batch lies in the run's directory.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    steps = plan(config)
    budget = Counter[int]()
    for world in worlds_of(config, 0):
        budget.update(task_budget(world.graph, config.max_hops))
    policies: dict[str, CausalLM] = {} if config.dry_run else build_selfplay_policies(config)
    starts = {name: policy.state() for name, policy in policies.items()}
    optimizers = {
        name: NamedOptimizer(policy.trainable_parameters(), policy.matrix_names(), config.optimizer, seed=config.seed)
        for name, policy in policies.items()
    }
    if config.loss.kl_coefficient > 0.0:
        for policy in policies.values():
            policy.keep_reference()  # of the whole run: the divergence is from the original base
    trl_reward = trl_reward_function(config.answerer_reward)
    gate, baselines = Gate(config.gate, seed=config.seed), BaselineState()
    speak = scripts_speak(config) if config.dry_run else policies_speak(config, policies)
    session = Session.now(device=config.device, threads=torch.get_num_threads())

    directory = RunDirectory.begin(
        resume, name=config.run, config_toml=to_toml(config), seed=config.seed, session=session, kind="selfplay"
    )
    with directory as run, stop_on_signals() as stop:
        number = incarnation(run.path)
        tick, counts, pool, rows, rounds = 0, Counter[str](), list[PoolTask](), RoundRows(), list[dict[str, Any]]()
        opponents: list[tuple[int, dict[str, torch.Tensor]]] = []
        window = deque[TickReport](maxlen=20)
        newest = latest(run.checkpoints) if resume is not None else None
        state: SavedState | None = None
        if newest is not None:
            checkpoint = read_checkpoint(newest)
            state = read_state(checkpoint, SavedState)
            restore_policies(policies, checkpoint)
            restore_learners(
                checkpoint.tensors, state.optimizers, state.gate, policies, optimizers, gate, where=str(newest)
            )
            opponents = [(n, dict(checkpoint.tensors[f"opponent-{n}.safetensors"])) for n in state.opponents]
            tick, pool, rows, rounds, baselines = state.tick, state.pool, state.rows, state.rounds, state.baselines
            counts.update(state.counts)
            window.extend(state.window)
        if resume is not None:
            run.cut_back(tick)
        run.write_config(to_toml(config))
        for name, policy in policies.items():
            step = state.versions[name].step if state is not None else 0
            policy.version = PolicyVersion(incarnation=number, step=step)

        watch, stopping, worlds, here = Stopwatch(), False, list[World](), -1
        with (
            MetricsWriter(run.metrics) as metrics,
            Progress(total=len(steps), start=tick, quiet=config.quiet) as progress,
        ):
            transcript = Transcript(run.episodes)
            for notice in run.notices:
                progress.note(notice)
            for name in sorted(policies):
                if policies[name].core.rows_because is not None:
                    progress.note(f"policy {name} goes row by row: {policies[name].core.rows_because}")
            progress.note(f"task budget of the first graphs, by hops: {dict(sorted(budget.items()))}")
            while tick < len(steps) and not stopping:
                tick_watch = Stopwatch()
                at = steps[tick]
                tick += 1
                if at.round != here:
                    worlds, here = worlds_of(config, at.round), at.round

                # The role whose phase it is speaks; the validator, or the solver, judges.
                if at.phase == "generator":
                    role: Role = "generator"
                    said = generate(config, worlds, tick, speak)
                    rates = judge(config, worlds, said, tick, speak, policies, opponents)
                    facts = [generator_facts(one, rates, worlds) for one in said]
                    rewards = generator_rewards(facts, GeneratorWeights())
                    settled = [
                        _settlement(config, role, tick, one.prompt, one.sample, 0, one.hops, one.spoken, fact, reward)
                        for one, fact, reward in zip(said, facts, rewards, strict=True)
                    ]
                    admit(config, said, rates, pool, rows, at, counts)
                else:
                    role = "answerer"
                    tasks, missing = choose(config, worlds, pool, at, tick)
                    counts["fallbacks"] += missing
                    played = play(config, tasks, config.answerer_samples, tick, 0, speak, role)
                    scored = answerer_rewards(config, played, trl_reward, anneal=1.0 - tick / len(steps))
                    settled = [
                        _settlement(config, role, tick, one.index, one.sample, turn, one.hops, spoken, fact, reward)
                        for one, (fact, reward) in zip(played, scored, strict=True)
                        for turn, spoken in enumerate(one.spoken)
                    ]
                    dataset = rows.answerer_pre_dataset if at.phase == "answerer_pre" else rows.answerer_dataset
                    dataset += [answerer_row(one.task, one.first_prompt) for one in played if one.sample == 0]
                sampling_seconds = tick_watch.seconds()

                # Advantages within each prompt's group, never across roles or hop counts; the gate; the step.
                reports: list[StepReport] = []
                if not config.dry_run:
                    groups = (
                        {s.turn.id: _group(s.turn.id) for s in settled} if config.advantages.kind == "group" else None
                    )
                    credits, baselines = credit(settled, config.advantages, baselines, groups=groups)
                    decision = gate.weigh(credits.turns)
                    name = policy_of(config, role)
                    for _ in range(config.epochs):
                        reports.append(learner_step(
                            policies[name], to_experiences(decision.turns, policy=name), config.loss, optimizers[name],
                            bad_batch_dir=run.path / "bad-batches",
                        ))  # fmt: skip

                # Reports, the round's files at the end of a phase, the checkpoint that stands for all of it.
                report = _tick_report(
                    tick, role, settled, tuple(reports), sampling_seconds, tick_watch.seconds(), window
                )
                window.append(report)
                metrics.write(report)
                progress.update(report)
                for settlement in settled if policies else ():
                    transcript.write(settlement, tick=tick, reply=_decoded(policies, settlement))
                transcript.flush()
                if at.last:
                    paths = write_rounds(run.path, at.round, rows)
                    if at.phase == "answerer":
                        rounds.append(_round_row(config, at, rows, paths, counts, run.metrics, steps))
                        rows = RoundRows()
                        if policies and config.opponents:
                            past = (at.round, policies[policy_of(config, "answerer")].state())
                            opponents = [*opponents, past][-config.opponents :]
                    write_json(run.path / "self_play_summary.json", _summary(config, rounds))
                stopping = stop()
                due = tick % config.checkpoint.every == 0 or tick == len(steps) or stopping
                if due and not config.dry_run:
                    metrics.sync()
                    transcript.sync()
                    saved_state = SavedState(
                        tick=tick, pool=pool, rows=rows, rounds=rounds, baselines=baselines, gate=gate.state()[1],
                        optimizers={name: optimizer_state(o)[1] for name, o in optimizers.items()},
                        versions={name: policy.version for name, policy in policies.items()}, counts=dict(counts),
                        opponents=[n for n, _ in opponents], window=list(window),
                    )  # fmt: skip
                    write_checkpoint(
                        run.checkpoints, tick, tensors={tensor_file(name): policy.state() for name, policy in policies.items()}
                        | {f"opponent-{n}.safetensors": weights for n, weights in opponents}
                        | learner_tensors(policies, optimizers, gate),
                        documents={"state.json": msgspec.json.encode(saved_state)}, consumed={"tick": tick},
                    )  # fmt: skip
                    rotate(run.checkpoints, config.checkpoint.keep)
        evaluation = None
        if tick == len(steps) and config.eval_tasks and policies:
            evaluation = measure(config, policies, starts, run.path, tasks=config.eval_tasks, seed=config.seed)
        final = SelfplayReport(
            run=str(run.path), steps={name: policy.version.step for name, policy in policies.items()},
            completions=counts["completions"], valid_completions=counts["valid_completions"], tasks=len(pool),
            fallbacks=counts["fallbacks"], task_budget=dict(sorted(budget.items())), evaluation=evaluation,
            solve_rates={key.partition("/")[2]: n for key, n in sorted(counts.items()) if key.startswith("rate/")},
            seconds=watch.seconds(), stopped=tick < len(steps), notices=run.notices,
        )  # fmt: skip
        run.write_report(final)
        write_json(
            run.path / "self_play_summary.json", _summary(config, rounds, final=final, newest=latest(run.checkpoints))
        )
        return final


def plan(config: SelfplayConfig) -> list[At]:
    """Every learner step of the run, in order."""
    steps = []
    for number in range(config.rounds):
        phases: list[tuple[Literal["answerer_pre", "generator", "answerer"], int]] = [
            ("generator", config.generator_steps), ("answerer", config.answerer_steps),
        ]  # fmt: skip
        if config.schedule == "answerer_generator_answerer":
            phases.insert(0, ("answerer_pre", config.answerer_steps))
        for phase, count in phases:
            steps += [At(round=number, phase=phase, last=step == count - 1) for step in range(count)]
    return steps


# ------------------------------------------------------------------------------------------------- turns, reports, state


def _settlement(
    config: SelfplayConfig, role: Role, tick: int, prompt: int, sample: int, turn: int, hops: int, spoken: Spoken,
    facts: object, reward: Reward,
) -> Settlement:  # fmt: skip
    """A reply as the learner takes it. Its team is the role and the hop count: baselines never mix either."""
    turn_id = TurnId(episode=tick, agent=f"{prompt:03d}-{sample:03d}", tick=turn)
    reply = spoken.reply
    sampled = Turn(
        id=turn_id, team=f"{role}/{hops}", policy=policy_of(config, role),
        version=reply.version if reply else PolicyVersion(incarnation=0, step=0),
        sampling=config.generator_sampling if role == "generator" else config.answerer_sampling,
        prompt_ids=spoken.prompt_ids, reply_ids=reply.token_ids if reply else (),
        log_probs=reply.log_probs if reply else (), action=None,
    )  # fmt: skip
    return Settlement(turn=sampled, outcome=Outcome(turn=turn_id, facts=facts, settled_at=tick), reward=reward)


def _group(turn: TurnId) -> str:
    """All samples of one prompt, at the same turn of their attempts."""
    return f"{turn.episode}/{turn.agent.partition('-')[0]}/{turn.tick}"


def _tick_report(
    tick: int, role: Role, settled: Sequence[Settlement], steps: tuple[StepReport, ...], sampling_seconds: float,
    seconds: float, window: Sequence[TickReport],
) -> TickReport:  # fmt: skip
    paid = [s for s in settled if s.reward.total is not None]
    parts: Counter[str] = Counter()
    for settlement in paid:
        parts.update(settlement.reward.parts)
    team = TeamReport(
        team=role, replies=len(settled), valid_replies=sum(_is_valid(s.outcome.facts) for s in settled),
        settled=len(paid), reward_mean=sum(s.reward.total or 0.0 for s in paid) / len(paid) if paid else None,
        reward_parts={name: value / len(paid) for name, value in parts.items()},
        kept_replies=sum(step.kept_replies for step in steps), action_counts={},
        reply_tokens=sum(len(s.turn.reply_ids) for s in settled),
    )  # fmt: skip
    report = TickReport(
        tick=tick, teams=(team,), steps=steps, sampled_tokens=team.reply_tokens,
        prompt_tokens=sum(len(s.turn.prompt_ids) for s in settled), sampling_seconds=sampling_seconds, seconds=seconds,
    )  # fmt: skip
    return replace(report, alarms=collapse_alarms([*window, report]))


def _is_valid(facts: Any) -> bool:
    return facts.query is not None if isinstance(facts, GeneratorFacts) else bool(facts.parsed)


def _decoded(policies: Mapping[str, CausalLM], settlement: Settlement) -> str:
    return policies[settlement.turn.policy].chat.decode(settlement.turn.reply_ids)


def _round_row(
    config: SelfplayConfig, at: At, rows: RoundRows, paths: Mapping[str, str], counts: Counter[str], metrics: Path,
    steps: Sequence[At],
) -> dict[str, Any]:  # fmt: skip
    reports = rows.validation_reports
    valid = sum(row["validation"]["is_valid"] for row in reports)
    phases: dict[str, Any] = {}
    logged = list(read_jsonl(metrics))  # a resume has cut it back to the checkpoint, so it tells the whole round
    for name in dict.fromkeys(step.phase for step in steps):
        role: Role = "generator" if name == "generator" else "answerer"
        mine = [row for row, step in zip(logged, steps, strict=False) if (step.round, step.phase) == (at.round, name)]
        phases[name] = phase_result(mine, role, policy_of(config, role), tuning_mode=_tuning(config))
    return phases | {
        "round": at.round + 1, "dry_run": config.dry_run, "phase_schedule": config.schedule,
        "generator_rows": len(rows.generator_dataset), "answerer_rows": len(rows.answerer_dataset),
        "generated_tasks": len(rows.generated_tasks), "valid_rate": valid / len(reports) if reports else 0.0,
        "fallbacks_so_far": counts["fallbacks"], "fallback_used": not rows.generated_tasks, "artifacts": dict(paths),
    }  # fmt: skip


def _tuning(config: SelfplayConfig) -> str:
    return "lora" if config.adapters == "lora" else "full"


def _summary(
    config: SelfplayConfig, rounds: Sequence[Mapping[str, Any]], *, final: SelfplayReport | None = None,
    newest: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Paths are from the run's directory; a checkpoint holds every policy."""
    saved = f"checkpoints/{newest.name}" if newest is not None else None
    return {
        "dry_run": config.dry_run, "model_topology": config.topology, "phase_schedule": config.schedule,
        "tuning_mode": _tuning(config), "initial_models": dict.fromkeys(ROLES, config.model),
        "final_models": {role: {"checkpoint": saved, "policy": policy_of(config, role)} for role in ROLES},
        "canonical_graph_mode": config.canonical_graph, "rounds": list(rounds),
        "post_training_evaluation": final.evaluation.flat() if final and final.evaluation else None,
    }  # fmt: skip
