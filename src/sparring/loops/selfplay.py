"""A generator sets tasks on knowledge graphs, an answerer solves them, and both learn from the exact verdict of a solver.

Read ``train_selfplay`` from top to bottom: the run is one list of learner steps (round, phase, step), each on a batch that
was sampled for it. What was left out, on purpose: no reference answers from a judge (the solver knows them), no replay of
old batches, no reload of a model between phases (one resident model, its weights swapped for a moment where a past
answerer judges), and no template tasks in the place of missing ones without saying so: ``fallbacks`` counts them.
"""

from __future__ import annotations

import importlib
import json
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from sparring.checkpoints import incarnation, latest, read_checkpoint, rotate, write_checkpoint
from sparring.config import SelfplayConfig, to_toml
from sparring.envs.graph.episode import Attempt
from sparring.envs.graph.prompts import answerer_prompt, context_of, generator_prompt, packet_of
from sparring.envs.graph.records import GeneratorFacts, Query, Task, Triple
from sparring.envs.graph.scripted import scripted_answer, scripted_task
from sparring.envs.graph.solver import guess_chance, random_tasks, task_budget
from sparring.envs.graph.validate import Limits, TaskPool, Verdict, canonical_trace, validate_text
from sparring.envs.graph.views import World
from sparring.envs.graph.worlds import make_world
from sparring.errors import CheckpointError, ConfigError
from sparring.evaluation.graph_panel import GraphEval, measure
from sparring.evaluation.selfplay_files import (
    RoundRows,
    answerer_row,
    edge_rows,
    task_row,
    validation_row,
    write_json,
    write_rounds,
)
from sparring.inference.ask import Asked, Spoken, ask
from sparring.inference.sampler import InProcessSampler
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate, GateState
from sparring.learning.optimizers import NamedOptimizer, OptimizerState, load_optimizer_state, optimizer_state
from sparring.learning.step import learner_step
from sparring.loops.rollout import Stopwatch
from sparring.metrics import MetricsWriter, Progress, Transcript, collapse_alarms
from sparring.policies.causal_lm import CausalLM
from sparring.rewards.graph import AnswererWeights, GeneratorWeights, answerer_reward, generator_rewards
from sparring.rewards.graph_classic import answerer_reward as classic_answerer_reward
from sparring.rundir import RunDirectory, Session
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

Role = Literal["generator", "answerer"]
ROLES: tuple[Role, ...] = ("generator", "answerer")
DRY_RUN_CARE = 0.7
"""Share of right replies of the scripted players of a dry run."""


class At(NamedTuple):
    """A learner step's place in the run."""

    round: int
    phase: Literal["answerer_pre", "generator", "answerer"]
    last: bool
    """The phase ends with it."""


class PoolTask(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted task of the generator's, with the graph that it is on."""

    task: Task
    world: int
    """Number of its world in the ``train`` split."""
    solved: int
    attempts: int
    own_edges: tuple[Triple, ...] = ()
    """Of a canonical graph that the completion drew itself."""


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


Speak = Callable[[Role, Sequence[Asked], Sequence[Callable[[Random], str]]], list[Spoken]]
"""(role, prompts, what a script would say to each) -> replies."""


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
    for world in _worlds(config, 0):
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
    trl_reward = _trl_reward(config.answerer_reward)
    gate, baselines = Gate(config.gate, seed=config.seed), BaselineState()
    speak = _scripted(config) if config.dry_run else _speaker(config, policies)
    session = Session.now(argv=_argv(), device=config.device, threads=torch.get_num_threads(), dtype="float32")

    with _run_directory(config, resume, session) as run, _stop_on_signals() as stop:
        number = incarnation(run.path)
        tick, counts, pool, rows, rounds = 0, Counter[str](), list[PoolTask](), RoundRows(), list[dict[str, Any]]()
        opponents: list[tuple[int, dict[str, torch.Tensor]]] = []
        window = deque[TickReport](maxlen=20)
        newest = latest(run.checkpoints) if resume is not None else None
        state: SavedState | None = None
        if newest is not None:
            checkpoint = read_checkpoint(newest)
            state = _read_state(checkpoint.documents, newest)
            restore_policies(policies, checkpoint)
            for name, optimizer in optimizers.items():
                saved = checkpoint.tensors[f"optimizer-{name}.safetensors"]
                load_optimizer_state(optimizer, saved, state.optimizers[name])
                if config.loss.kl_coefficient > 0.0:
                    policies[name].load_reference(checkpoint.tensors[f"reference-{name}.safetensors"])
            histories = checkpoint.tensors.get("gate.safetensors", {})
            gate.load_state({n: t.numpy() for n, t in histories.items()}, state.gate)
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
            progress.note(f"task budget of the first graphs, by hops: {dict(sorted(budget.items()))}")
            while tick < len(steps) and not stopping:
                tick_watch = Stopwatch()
                at = steps[tick]
                tick += 1
                if at.round != here:
                    worlds, here = _worlds(config, at.round), at.round

                # The role whose phase it is speaks; the validator, or the solver, judges.
                if at.phase == "generator":
                    role: Role = "generator"
                    said = _generate(config, worlds, tick, speak)
                    rates = _judge(config, worlds, said, tick, speak, policies, opponents)
                    facts = [_generator_facts(one, rates, worlds) for one in said]
                    rewards = generator_rewards(facts, GeneratorWeights())
                    settled = [
                        _settlement(config, role, tick, one.prompt, one.sample, 0, one.hops, one.spoken, fact, reward)
                        for one, fact, reward in zip(said, facts, rewards, strict=True)
                    ]
                    _admit(config, said, rates, pool, rows, at, counts)
                else:
                    role = "answerer"
                    tasks, missing = _choose(config, worlds, pool, at, tick)
                    counts["fallbacks"] += missing
                    played = _play(config, tasks, config.answerer_samples, tick, 0, speak, role)
                    scored = _answerer_rewards(config, played, trl_reward, anneal=1.0 - tick / len(steps))
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
                    name = _policy_of(config, role)
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
                        rounds.append(_round_row(config, at, rows, paths, counts))
                        rows = RoundRows()
                        if policies and config.opponents:
                            past = (at.round, policies[_policy_of(config, "answerer")].state())
                            opponents = [*opponents, past][-config.opponents :]
                    write_json(run.path / "self_play_summary.json", _summary(config, rounds))
                stopping = stop()
                due = tick % config.checkpoint.every == 0 or tick == len(steps) or stopping
                if due and not config.dry_run:
                    metrics.sync()
                    saved_state = SavedState(
                        tick=tick, pool=pool, rows=rows, rounds=rounds, baselines=baselines, gate=gate.state()[1],
                        optimizers={name: optimizer_state(o)[1] for name, o in optimizers.items()},
                        versions={name: policy.version for name, policy in policies.items()}, counts=dict(counts),
                        opponents=[n for n, _ in opponents], window=list(window),
                    )  # fmt: skip
                    write_checkpoint(
                        run.checkpoints, tick, tensors=_tensors(config, policies, optimizers, gate, opponents),
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


# ----------------------------------------------------------------------------------------------------------- speaking


def _worlds(config: SelfplayConfig, round: int) -> list[World]:
    """The fresh graphs of a round."""
    return [_world(config, round * config.worlds + index) for index in range(config.worlds)]


def _world(config: SelfplayConfig, number: int) -> World:
    return make_world(config.world, config.world_settings, split="train", seed=config.seed, number=number)


def _policy_of(config: SelfplayConfig, role: Role) -> str:
    return role if config.topology == "dual" else "shared"


def _speaker(config: SelfplayConfig, policies: Mapping[str, CausalLM]) -> Speak:
    samplers = {name: InProcessSampler(policy) for name, policy in policies.items()}

    def speak(role: Role, asked: Sequence[Asked], scripts: Sequence[Callable[[Random], str]]) -> list[Spoken]:
        sampling = config.generator_sampling if role == "generator" else config.answerer_sampling
        return ask(samplers[_policy_of(config, role)], asked, sampling)

    return speak


def _scripted(config: SelfplayConfig) -> Speak:
    """The players of a dry run."""

    def speak(role: Role, asked: Sequence[Asked], scripts: Sequence[Callable[[Random], str]]) -> list[Spoken]:
        return [Spoken(text=say(Random(f"{one.key}"))) for one, say in zip(asked, scripts, strict=True)]

    return speak


@contextmanager
def _weights(policy: CausalLM, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The policy with other weights within the block."""
    mine = policy.state()
    try:
        policy.load_state(state)
        yield
    finally:
        policy.load_state(mine)


# ---------------------------------------------------------------------------------------------------------- generator


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """A completion, and what it was an answer to."""

    prompt: int
    sample: int
    hops: int
    world: int
    """Among the round's."""
    system: str
    user: str
    packet: tuple[Triple, ...]
    """What it was shown."""
    spoken: Spoken
    verdict: Verdict


def _generate(config: SelfplayConfig, worlds: Sequence[World], tick: int, speak: Speak) -> list[_Said]:
    """One batch of completions, judged by the validator."""
    asked, scripts, places = (
        list[Asked](),
        list[Callable[[Random], str]](),
        list[tuple[int, int, int, int, tuple[Triple, ...]]](),
    )
    lengths = range(config.min_hops, config.max_hops + 1)
    for prompt in range(config.generator_prompts):
        place, hops = prompt % len(worlds), lengths[prompt % len(lengths)]
        graph, rng = worlds[place].graph, Random(f"{config.seed}/{tick}/packet/{prompt}")
        tasks = random_tasks(graph, rng, 1, hops=(hops,), full=config.full)
        if not tasks:
            raise ConfigError(
                f"max_hops is {config.max_hops}: the graphs of {config.world} hold no path of {hops} hops"
            )
        packet = packet_of(graph, tasks[0].query, tasks[0].evidence, rng, edges=config.context_edges)
        system, user = generator_prompt(packet, hops, full=config.full)
        for sample in range(config.generator_samples):
            asked.append(Asked(system=system, user=user, key=(config.seed, tick, 0, prompt, sample)))
            scripts.append(lambda r, p=packet, h=hops: scripted_task(p, h, r, care=DRY_RUN_CARE, full=config.full))  # type: ignore[misc]
            places.append((prompt, sample, hops, place, packet))
    spoken = speak("generator", asked, scripts)
    limits = Limits(max_hops=config.max_hops)
    return [
        _Said(
            prompt=prompt, sample=sample, hops=hops, world=place, system=one.system, user=one.user, packet=packet,
            spoken=words,
            verdict=validate_text(words.text, worlds[place].graph, id=f"t{tick}_{prompt}_{sample}", limits=limits),
        )
        for (prompt, sample, hops, place, packet), one, words in zip(places, asked, spoken, strict=True)
    ]  # fmt: skip


def _judge(
    config: SelfplayConfig, worlds: Sequence[World], said: Sequence[_Said], tick: int, speak: Speak,
    policies: Mapping[str, CausalLM], opponents: Sequence[tuple[int, dict[str, torch.Tensor]]],
) -> dict[tuple[int, Query], tuple[int, int]]:  # fmt: skip
    """(solved, attempts) of every distinct valid task, under the answerer's own prompt: by the present answerer, and, where
    there are any, half as often by one of the past."""
    tasks: dict[tuple[int, Query], _Posed] = {}
    for one in said:
        if one.verdict.task is not None:
            own = one.verdict.completion.graph_edges if one.verdict.completion is not None else ()
            tasks.setdefault(
                (one.world, one.verdict.task.query),
                _Posed(task=one.verdict.task, world=worlds[one.world], own_edges=own),
            )
    rates = Counter[tuple[int, Query]]()
    attempts = config.judge_samples
    keys, posed = list(tasks), list(tasks.values())
    played = _play(config, posed, config.judge_samples, tick, 1, speak, "answerer")
    if opponents and policies:
        _, past = opponents[Random(f"{config.seed}/{tick}/opponent").randrange(len(opponents))]
        half = config.judge_samples // 2
        with _weights(policies[_policy_of(config, "answerer")], past):
            played += _play(config, posed, half, tick, 2, speak, "answerer")
        attempts += half
    for attempt in played:
        rates[keys[attempt.index]] += attempt.attempt.facts().correct
    return {key: (rates[key], attempts) for key in keys}


def _generator_facts(
    one: _Said, rates: Mapping[tuple[int, Query], tuple[int, int]], worlds: Sequence[World]
) -> GeneratorFacts:
    task = one.verdict.task
    if task is None or task.query.length != one.hops:
        # A path of another length than it was asked for is a task, but not the one: it came as far as stage 4.
        return GeneratorFacts(query=None, stage=min(4, one.verdict.stage), solved=0, attempts=0, guess_chance=1.0)
    solved, attempts = rates[one.world, task.query]
    guess = guess_chance(worlds[one.world].graph, task.query)
    return GeneratorFacts(
        query=task.query, stage=one.verdict.stage, solved=solved, attempts=attempts, guess_chance=guess
    )


def _admit(
    config: SelfplayConfig, said: Sequence[_Said], rates: Mapping[tuple[int, Query], tuple[int, int]],
    pool: list[PoolTask], rows: RoundRows, at: At, counts: Counter[str],
) -> None:  # fmt: skip
    """New tasks into the pool, each once; and the rows of the round's files."""
    known = {world: TaskPool() for world in {p.world for p in pool} | {_number(config, at, one) for one in said}}
    for kept in pool:
        known[kept.world].admit(kept.task)
    for one in said:
        index, number, task = len(rows.validation_reports), _number(config, at, one), one.verdict.task
        counts["completions"] += 1
        if one.sample == 0:
            shown = edge_rows(one.packet)
            rows.generator_dataset.append({
                "prompt": f"{one.system}\n{one.user}", "candidate_id": f"{number}-{one.prompt}",
                "shared_context_json": json.dumps(shown, ensure_ascii=False),
                "canonical_graph_json": json.dumps({"nodes": _ends(one.packet), "edges": shown}, ensure_ascii=False),
            })  # fmt: skip
        rows.validation_reports.append(validation_row(index, one.verdict, one.spoken.text))
        if task is None or one.verdict.completion is None:
            continue
        counts["valid_completions"] += 1
        if not known[number].admit(task):
            continue
        solved, attempts = rates[one.world, task.query]
        counts[f"rate/{int(10 * solved / attempts) / 10:.1f}"] += 1
        drawn = one.verdict.completion.graph_edges if config.canonical_graph == "generate" else ()
        pool.append(PoolTask(task=task, world=number, solved=solved, attempts=attempts, own_edges=drawn))
        rows.generated_tasks.append(task_row(task, solved=solved, attempts=attempts, world=number))
        graph = {"nodes": _ends(drawn), "edges": edge_rows(drawn)}
        rows.canonical_graph_candidates.append(
            {"candidate_index": index, "canonical_graph": graph, "question": task.question, "answer": list(task.answer)}
        )
        calls = canonical_trace(_world(config, number).graph, task.query, task.evidence, task.question)
        rows.replay_traces.append({
            "candidate_index": index, "question": task.question, "replayed_edges": edge_rows(task.evidence),
            "tool_trace": [{"tool_name": c.tool_name, "args": c.args, "output": c.output} for c in calls],
        })  # fmt: skip


def _ends(edges: Sequence[Triple]) -> list[str]:
    return sorted({end for edge in edges for end in (edge.src, edge.dst)})


def _number(config: SelfplayConfig, at: At, one: _Said) -> int:
    """The world's number in the split."""
    return at.round * config.worlds + one.world


# ----------------------------------------------------------------------------------------------------------- answerer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Posed:
    """A task and the graph that it is on."""

    task: Task
    world: World
    own_edges: tuple[Triple, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """An attempt that is over, with its replies in order."""

    index: int
    """Of its task in the batch."""
    sample: int
    task: Task
    attempt: Attempt
    first_prompt: str
    spoken: list[Spoken]

    @property
    def hops(self) -> int:
        return self.task.query.length


def _choose(
    config: SelfplayConfig, worlds: Sequence[World], pool: Sequence[PoolTask], at: At, tick: int
) -> tuple[list[_Posed], int]:
    """The answerer's tasks, and how many of them a script had to make up for: anchors, then the round's own generated
    tasks (those solved neither always nor never first), each on its own graph."""
    rng = Random(f"{config.seed}/{tick}/tasks")
    first = at.round * config.worlds
    fresh = [p for p in pool if p.world >= first] if at.phase == "answerer" else list(pool)
    anchors = round(config.anchor_share * config.answerer_tasks)
    wanted = config.answerer_tasks - anchors
    rng.shuffle(fresh)
    fresh.sort(key=lambda p: not 0 < p.solved < p.attempts)  # stable: the shuffle decides among equals
    best = fresh[: max(wanted, len(fresh) // 2)]
    chosen = rng.sample(best, wanted) if len(best) >= wanted else best
    missing = wanted - len(chosen)
    if chosen and missing:  # few, but real: asked again with another context
        chosen, missing = [*chosen, *rng.choices(chosen, k=missing)], 0
    posed = [_Posed(task=p.task, world=_world(config, p.world), own_edges=p.own_edges) for p in chosen]
    hops = tuple(range(config.min_hops, config.max_hops + 1))
    for number in range(anchors + missing):
        world = worlds[number % len(worlds)]
        length = hops[(number + tick) % len(hops)]
        made = random_tasks(world.graph, rng, 1, hops=(length,), full=config.full, prefix=f"anchor_{tick}_{number}")
        posed += [_Posed(task=task, world=world) for task in made]
    return posed, 0 if at.phase == "answerer_pre" else missing


def _play(
    config: SelfplayConfig, posed: Sequence[_Posed], samples: int, tick: int, use: int, speak: Speak, role: Role
) -> list[_Played]:
    """``samples`` attempts at each task, all turns of all attempts batched; ``use`` keeps random numbers apart."""
    played: list[_Played] = []
    for index, given in enumerate(posed):
        rng = Random(f"{config.seed}/{tick}/{use}/context/{index}")
        context = context_of(given.world.graph, given.task, rng, edges=config.context_edges, also=given.own_edges)
        for sample in range(samples):
            attempt = Attempt(
                given.world, given.task, context=context, tools=config.access == "tools", full=config.full,
                max_steps=config.max_steps,
            )  # fmt: skip
            first = "\n".join(attempt.prompt())
            played.append(
                _Played(index=index, sample=sample, task=given.task, attempt=attempt, first_prompt=first, spoken=[])
            )
    turn = 0
    while waiting := [one for one in played if not one.attempt.done]:
        asked, scripts = list[Asked](), list[Callable[[Random], str]]()
        for one in waiting:
            system, user = one.attempt.prompt()
            key = (config.seed, tick, 1 + use, one.index, one.sample, turn)
            asked.append(Asked(system=system, user=user, key=key))
            context, query = one.attempt.context, one.task.query
            scripts.append(lambda r, c=context, q=query: scripted_answer(c, q, r, care=DRY_RUN_CARE))  # type: ignore[misc]
        for one, spoken in zip(waiting, speak(role, asked, scripts), strict=True):
            cut = spoken.reply is not None and spoken.reply.truncated
            one.attempt.take("" if cut else spoken.text)  # a reply that never ended says nothing
            one.spoken.append(spoken)
        turn += 1
    return played


def _answerer_rewards(
    config: SelfplayConfig, played: Sequence[_Played], trl_reward: Callable[..., Any] | None, *, anneal: float
) -> list[tuple[object, Reward]]:
    """(facts, reward) of each attempt."""
    facts = [one.attempt.facts() for one in played]
    if config.answerer_reward == "outcome":
        return [(fact, answerer_reward(fact, AnswererWeights(), anneal=anneal)) for fact in facts]
    texts = [one.spoken[-1].text for one in played]
    if trl_reward is None:
        totals = [
            classic_answerer_reward(
                text, question=one.task.question, answer=one.task.answer[0], evidence=one.task.evidence
            )
            for one, text in zip(played, texts, strict=True)
        ]
    else:
        columns = [answerer_row(one.task, one.first_prompt) for one in played]
        totals = trl_reward(
            prompts=[_chat(one) for one in played],
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            completion_ids=[list(one.spoken[-1].reply.token_ids) if one.spoken[-1].reply else [] for one in played],
            **{name: [row[name] for row in columns] for name in columns[0] if name != "prompt"},
        )
        if len(totals) != len(played):
            raise ConfigError(f"answerer_reward returned {len(totals)} rewards for {len(played)} completions")
    return [
        (fact, Reward(total=None if total is None else float(total))) for fact, total in zip(facts, totals, strict=True)
    ]


def _chat(one: _Played) -> list[dict[str, str]]:
    system, user = answerer_prompt(one.task.question, one.attempt.context, full=one.attempt.full)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _trl_reward(name: str) -> Callable[..., Any] | None:
    """A function with the signature of TRL's reward functions: keywords prompts, completions, columns of the dataset;
    a list of numbers or None."""
    if ":" not in name:
        return None
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"answerer_reward is {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"answerer_reward is {name!r}: it cannot be called")
    made: Callable[..., Any] = found
    return made


# ------------------------------------------------------------------------------------------------- turns, reports, state


def _settlement(
    config: SelfplayConfig, role: Role, tick: int, prompt: int, sample: int, turn: int, hops: int, spoken: Spoken,
    facts: object, reward: Reward,
) -> Settlement:  # fmt: skip
    """A reply as the learner takes it. Its team is the role and the hop count: baselines never mix either."""
    turn_id = TurnId(episode=tick, agent=f"{prompt:03d}-{sample:03d}", tick=turn)
    reply = spoken.reply
    sampled = Turn(
        id=turn_id, team=f"{role}/{hops}", policy=_policy_of(config, role),
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
    config: SelfplayConfig, at: At, rows: RoundRows, paths: Mapping[str, str], counts: Counter[str]
) -> dict[str, Any]:
    reports = rows.validation_reports
    valid = sum(row["validation"]["is_valid"] for row in reports)
    return {
        "round": at.round + 1, "dry_run": config.dry_run, "phase_schedule": config.schedule,
        "generator_rows": len(rows.generator_dataset), "answerer_rows": len(rows.answerer_dataset),
        "generated_tasks": len(rows.generated_tasks), "valid_rate": valid / len(reports) if reports else 0.0,
        "fallbacks_so_far": counts["fallbacks"], "fallback_used": not rows.generated_tasks, "artifacts": dict(paths),
    }  # fmt: skip


def _summary(config: SelfplayConfig, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "dry_run": config.dry_run, "model_topology": config.topology, "phase_schedule": config.schedule,
        "tuning_mode": "lora" if config.adapters == "lora" else "full", "initial_model": config.model,
        "canonical_graph_mode": config.canonical_graph, "rounds": list(rounds),
    }  # fmt: skip


def _tensors(
    config: SelfplayConfig, policies: Mapping[str, CausalLM], optimizers: Mapping[str, NamedOptimizer], gate: Gate,
    opponents: Sequence[tuple[int, dict[str, torch.Tensor]]],
) -> dict[str, Mapping[str, torch.Tensor]]:  # fmt: skip
    files: dict[str, Mapping[str, torch.Tensor]] = {tensor_file(name): p.state() for name, p in policies.items()}
    for name, optimizer in optimizers.items():
        files[f"optimizer-{name}.safetensors"] = optimizer_state(optimizer)[0]
        reference = policies[name].reference_state() if config.loss.kl_coefficient > 0.0 else None
        if reference is not None:
            files[f"reference-{name}.safetensors"] = reference
    files |= {f"opponent-{number}.safetensors": state for number, state in opponents}
    files["gate.safetensors"] = {name: torch.from_numpy(array) for name, array in gate.state()[0].items()}
    return files


def _read_state(documents: Mapping[str, bytes], path: Path) -> SavedState:
    try:
        return msgspec.json.decode(documents["state.json"], type=SavedState)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: state.json is missing or of another version ({error})") from error


def _run_directory(config: SelfplayConfig, resume: Path | None, session: Session) -> RunDirectory:
    if resume is not None:
        return RunDirectory.open(resume, session=session)
    return RunDirectory.create(
        config.run, config_toml=to_toml(config), seed=config.seed, session=session, kind="selfplay"
    )


def _argv() -> tuple[str, ...]:
    import sys

    return tuple(sys.argv)


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM end the run after the step, with a checkpoint; a second SIGINT ends it at once."""
    asked = False

    def stop(signum: int, frame: object) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller's program has the signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
