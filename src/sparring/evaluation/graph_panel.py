"""Base, cloned and trained answerer on held-out graphs, beside what needs no learning; with intervals.

Every player answers the same tasks, shown the same edges in the same order. Replies are sampled as in training, and read
strictly (the figure) and leniently (beside it). Graphs are of the ``test`` split: none was seen in training or warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from sparring.checkpoints import read_checkpoint
from sparring.config import EvalConfig, SelfplayConfig
from sparring.envs.contract import Figure
from sparring.envs.graph.completion import read_answer_leniently
from sparring.envs.graph.prompts import context_of, generator_prompt, packet_of
from sparring.envs.graph.records import Task, Triple
from sparring.envs.graph.scripted import BASELINES
from sparring.envs.graph.solver import random_tasks
from sparring.envs.graph.validate import Limits, validate_text
from sparring.envs.graph.views import World
from sparring.envs.graph.worlds import make_world
from sparring.errors import ConfigError
from sparring.evaluation.cloning import clone
from sparring.evaluation.statistics import Bootstrap, Estimate, flat
from sparring.inference.ask import Asked, Spoken, ask
from sparring.inference.sampler import InProcessSampler
from sparring.league.graph_match import new_attempt, play_out
from sparring.policies.causal_lm import CausalLM
from sparring.rundir import find_run
from sparring.runs import build_selfplay_policies, find_checkpoint, restore_policies, selfplay_config

TASKS_A_WORLD = 12
EVAL = 1_000_003
"""Begins the keys of an evaluation's random numbers, so that they are none of training's."""
MODELS = ("base", "cloned", "trained")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A held-out task as it is shown."""

    key: str
    world: World
    task: Task
    context: tuple[Triple, ...]
    packet: tuple[Triple, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """How one task went."""

    strict: bool
    lenient: bool
    valid: bool | None = None
    """Of the completion that a generator wrote for the same graph."""


STRICT = Figure(of=(lambda row: float(row.strict),), unit="share", higher_is_better=True)
LENIENT = Figure(of=(lambda row: float(row.lenient),), unit="share", higher_is_better=True)
VALID = Figure(of=(lambda row: None if row.valid is None else float(row.valid),), unit="share", higher_is_better=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphEval:
    """Figures with 95 % intervals, and what training changed, paired by task."""

    tasks: int
    accuracy: Mapping[str, Estimate]
    """By player: base, cloned, trained, random, majority, second_edge, solver; read strictly."""
    accuracy_lenient: Mapping[str, Estimate]
    """Of the models, read leniently."""
    gains: Mapping[str, Estimate]
    """Trained minus each other, but the solver."""
    valid_rate: Mapping[str, Estimate]
    """Of the generator: start, end."""
    valid_rate_gain: Estimate

    def flat(self) -> dict[str, Any]:
        """``accuracy_trained``, ``accuracy_trained_low``, ``gain_over_base``, ``valid_rate_end``, ..."""
        return flat(
            {f"accuracy_{name}": found for name, found in self.accuracy.items()}
            | {f"accuracy_lenient_{name}": found for name, found in self.accuracy_lenient.items()}
            | {f"gain_over_{name}": found for name, found in self.gains.items()}
            | {f"valid_rate_{name}": found for name, found in self.valid_rate.items()}
            | {"valid_rate_gain": self.valid_rate_gain}
        )

    def render(self) -> str:
        """As a table for people."""
        lines = [f"{self.tasks} tasks on held-out graphs, 95 % intervals"]
        lines += [f"  {name:<12} {_shown(found)}" for name, found in self.accuracy.items()]
        lines += ["trained minus"]
        lines += [f"  {name:<12} {_shown(found)}" for name, found in self.gains.items()]
        lines += ["valid tasks of the generator"]
        lines += [f"  {name:<12} {_shown(found)}" for name, found in self.valid_rate.items()]
        return "\n".join(lines)


def _shown(found: Estimate) -> str:
    return f"{found.value:.3f} ({found.low:.3f}, {found.high:.3f})"


def evaluate_selfplay(config: EvalConfig) -> GraphEval:
    """``sparring eval`` of a self-play run.

    Raises:
        ConfigError, CheckpointError: No such run or checkpoint.
    """
    keys, rows = _panel_of_run(config)
    return summarise(keys, rows, seed=config.seed)


def evaluate_seeds(configs: Sequence[EvalConfig]) -> tuple[list[GraphEval], GraphEval]:
    """Runs of several seeds on their common panel, each and pooled: of the pool, each task's results of all seeds are drawn
    together, so that the intervals are those of other tasks for the mean of these runs.

    Raises:
        ConfigError, CheckpointError: As ``evaluate_selfplay``; or the runs were not measured on the same tasks.
    """
    found = [_panel_of_run(config) for config in configs]
    keys = found[0][0]
    if any(other != keys for other, _ in found):
        raise ConfigError("the runs were not measured on the same tasks: their worlds or hops differ")
    players = [name for name in found[0][1] if all(name in rows for _, rows in found)]
    pooled = {name: [row for _, rows in found for row in rows[name]] for name in players}
    each = [summarise(keys, rows, seed=config.seed) for config, (_, rows) in zip(configs, found, strict=True)]
    return each, summarise(keys * len(found), pooled, seed=configs[0].seed)


def _panel_of_run(config: EvalConfig) -> tuple[list[str], dict[str, list[_Row]]]:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = find_run(config.run)
    settings = selfplay_config(run)
    policies = build_selfplay_policies(settings, device=config.device)
    starts = {name: policy.state() for name, policy in policies.items()}
    restore_policies(policies, read_checkpoint(find_checkpoint(run, config.step)))
    return play_panel(
        settings, policies, starts, run, tasks=config.situations, seed=config.seed, cloning=config.cloning
    )  # fmt: skip


def measure(
    config: SelfplayConfig, policies: Mapping[str, CausalLM], starts: Mapping[str, Mapping[str, torch.Tensor]], run: Path,
    *, tasks: int, seed: int, cloning: bool = True,
) -> GraphEval:  # fmt: skip
    """Measures the policies as they are against their starts; leaves them as they were. Arguments as ``play_panel``'s."""
    keys, rows = play_panel(config, policies, starts, run, tasks=tasks, seed=seed, cloning=cloning)
    return summarise(keys, rows, seed=seed)


def play_panel(
    config: SelfplayConfig, policies: Mapping[str, CausalLM], starts: Mapping[str, Mapping[str, torch.Tensor]], run: Path,
    *, tasks: int, seed: int, cloning: bool = True,
) -> tuple[list[str], dict[str, list[_Row]]]:  # fmt: skip
    """Everybody on the same held-out tasks: the tasks' keys, and rows by player in their order.

    Args:
        starts: The weights at the beginning of the run, by policy.
        run: The run's directory, whose transcripts are cloned from.
        tasks: How many held-out tasks.
        seed: Of the replies and the bootstrap; the panel is the same for every seed of a run.
    """
    items = held_out(config, tasks)
    answerer, generator = (
        policies["shared" if config.topology == "shared" else role] for role in ("answerer", "generator")
    )
    ends = {name: policy.state() for name, policy in policies.items()}
    rows: dict[str, list[_Row]] = {"trained": _played(config, answerer, generator, items, seed)}

    def load(states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, policy in policies.items():
            policy.load_state(states[name])

    load(starts)
    rows["base"] = _played(config, answerer, generator, items, seed)
    if cloning:
        clone(
            answerer, run, config.optimizer, seed=seed, micro_batch_tokens=config.loss.micro_batch_tokens
        )  # fmt: skip
        rows["cloned"] = _played(config, answerer, None, items, seed)
    load(ends)
    for name, answer in BASELINES.items():
        rng = Random(f"{seed}/{name}")
        right = [item.task.accepts(answer(item.context, item.task.query, rng)) for item in items]
        rows[name] = [_Row(strict=hit, lenient=hit) for hit in right]
    return [item.key for item in items], rows


def summarise(keys: Sequence[str], rows: Mapping[str, Sequence[_Row]], *, seed: int) -> GraphEval:
    """Figures of rows by player, in the order of the keys; what has the same key is drawn together."""
    bootstrap = Bootstrap(keys, seed=seed)
    shown = [name for name in (*MODELS, *BASELINES) if name in rows]
    return GraphEval(
        tasks=len(keys),
        accuracy={name: bootstrap.estimate(STRICT, rows[name]) for name in shown},
        accuracy_lenient={name: bootstrap.estimate(LENIENT, rows[name]) for name in MODELS if name in rows},
        gains={
            name: bootstrap.difference(STRICT, rows["trained"], rows[name])
            for name in shown
            if name not in ("trained", "solver")
        },
        valid_rate={
            "start": bootstrap.estimate(VALID, rows["base"]), "end": bootstrap.estimate(VALID, rows["trained"])
        },
        valid_rate_gain=bootstrap.difference(VALID, rows["trained"], rows["base"]),
    )  # fmt: skip


def held_out(config: SelfplayConfig, count: int) -> list[_Item]:
    """Tasks of every hop count in turn, on graphs of the test split, shown once and for all."""
    lengths = tuple(range(config.min_hops, config.max_hops + 1))
    items: list[_Item] = []
    number = 0
    while len(items) < count:
        world = make_world(config.world, config.world_settings, split="test", seed=0, number=number)
        rng = Random(f"held-out/{number}")
        for task in random_tasks(world.graph, rng, TASKS_A_WORLD, hops=lengths, full=config.full):
            items.append(_Item(
                key=f"{task.query.length}hop-{len(items)}", world=world, task=task,
                context=context_of(world.graph, task, rng, edges=config.context_edges),
                packet=packet_of(world.graph, task.query, task.evidence, rng, edges=config.context_edges),
            ))  # fmt: skip
        number += 1
    return items[:count]


def _played(
    config: SelfplayConfig, answerer: CausalLM, generator: CausalLM | None, items: Sequence[_Item], seed: int
) -> list[_Row]:
    attempts = [new_attempt(config, item.world, item.task, item.context) for item in items]
    sampler = InProcessSampler(answerer)

    def say(asked: Sequence[tuple[int, int, int, str, str]]) -> list[Spoken]:
        prompts = [
            Asked(system=system, user=user, key=(EVAL, seed, 0, number, turn, who))
            for number, who, turn, system, user in asked
        ]
        return ask(sampler, prompts, config.answerer_sampling)

    last = [spoken[-1].text for spoken in play_out(attempts, say)]
    valid: list[bool | None] = [None] * len(items)
    if generator is not None:
        asked = []
        for index, item in enumerate(items):
            system, user = generator_prompt(item.packet, item.task.query.length, full=config.full, draws=config.draws)
            asked.append(Asked(system=system, user=user, key=(EVAL, seed, 1, index)))
        limits = Limits(max_hops=config.max_hops)
        for index, spoken in enumerate(ask(InProcessSampler(generator), asked, config.generator_sampling)):
            verdict = validate_text(spoken.text, items[index].world.graph, id="g", limits=limits)
            valid[index] = verdict.task is not None and verdict.task.query.length == items[index].task.query.length
    rows = []
    for index, attempt in enumerate(attempts):
        patient = read_answer_leniently(last[index])
        strict = attempt.facts().correct
        lenient = strict or (patient is not None and items[index].task.accepts(patient.answer))
        rows.append(_Row(strict=strict, lenient=lenient, valid=valid[index]))
    return rows
