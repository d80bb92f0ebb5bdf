"""What is played in self-play, and by whom: prompts of both roles, who judges a task, which tasks the answerer gets.

``loops/selfplay.py`` says in which order.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from sparring.config import SelfplayConfig
from sparring.envs.graph.episode import Attempt, TeamLimits
from sparring.envs.graph.prompts import answerer_prompt, context_of, generator_prompt, packet_of
from sparring.envs.graph.records import GeneratorFacts, Query, Task, Triple
from sparring.envs.graph.scripted import scripted_answer, scripted_task
from sparring.envs.graph.solver import guess_chance, random_tasks
from sparring.envs.graph.validate import Limits, TaskPool, Verdict, canonical_trace, validate_text
from sparring.envs.graph.views import World
from sparring.envs.graph.worlds import make_world
from sparring.errors import ConfigError
from sparring.evaluation.selfplay_files import RoundRows, answerer_row, edge_rows, task_row, validation_row
from sparring.inference.ask import Asked, Spoken, ask
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.rewards.graph import AnswererWeights, answerer_reward
from sparring.rewards.graph_classic import answerer_reward as classic_answerer_reward
from sparring.types import Reward

Role = Literal["generator", "answerer"]
ROLES: tuple[Role, ...] = ("generator", "answerer")


class At(NamedTuple):
    """A learner step's place in the run."""

    round: int
    phase: Literal["answerer_pre", "generator", "answerer"]
    last: bool
    """The phase ends with it."""


TEAM_WEIGHT = 0.1
"""What sub-agents earn at the beginning of a run, as measured; it falls to 0 by its end."""
DRY_RUN_CARE = 0.7
"""Share of right replies of the scripted players of a dry run."""


class PoolTask(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted task of the generator's, with the graph that it is on."""

    task: Task
    world: int
    """Number of its world in the ``train`` split."""
    solved: int
    attempts: int
    own_edges: tuple[Triple, ...] = ()
    """Of a canonical graph that the completion drew itself."""


Speak = Callable[[Role, Sequence[Asked], Sequence[Callable[[Random], str]]], list[Spoken]]
"""(role, prompts, what a script would say to each) -> replies."""


# ----------------------------------------------------------------------------------------------------------- speaking


def worlds_of(config: SelfplayConfig, round: int) -> list[World]:
    """The fresh graphs of a round."""
    return [world_of(config, round * config.worlds + index) for index in range(config.worlds)]


def world_of(config: SelfplayConfig, number: int) -> World:
    return make_world(config.world, config.world_settings, split="train", seed=config.seed, number=number)


def policy_of(config: SelfplayConfig, role: Role) -> str:
    return role if config.topology == "dual" else "shared"


def policies_speak(config: SelfplayConfig, policies: Mapping[str, CausalLM]) -> Speak:
    samplers = {name: InProcessSampler(policy) for name, policy in policies.items()}

    def speak(role: Role, asked: Sequence[Asked], scripts: Sequence[Callable[[Random], str]]) -> list[Spoken]:
        sampling = config.generator_sampling if role == "generator" else config.answerer_sampling
        return ask(samplers[policy_of(config, role)], asked, sampling)

    return speak


def scripts_speak(config: SelfplayConfig) -> Speak:
    """The players of a dry run."""

    def speak(role: Role, asked: Sequence[Asked], scripts: Sequence[Callable[[Random], str]]) -> list[Spoken]:
        return [Spoken(text=say(Random(f"{one.key}"))) for one, say in zip(asked, scripts, strict=True)]

    return speak


@contextmanager
def weights_of(policy: CausalLM, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The policy with other weights within the block."""
    mine = policy.state()
    try:
        policy.load_state(state)
        yield
    finally:
        policy.load_state(mine)


# ---------------------------------------------------------------------------------------------------------- generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
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


def generate(config: SelfplayConfig, worlds: Sequence[World], tick: int, speak: Speak) -> list[Said]:
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
        system, user = generator_prompt(packet, hops, full=config.full, draws=config.draws)
        for sample in range(config.generator_samples):
            asked.append(Asked(system=system, user=user, key=(config.seed, tick, 0, prompt, sample)))
            scripts.append(
                partial(
                    scripted_task, packet, hops, care=DRY_RUN_CARE, full=config.full, draws=config.draws
                )
            )  # fmt: skip
            places.append((prompt, sample, hops, place, packet))
    spoken = speak("generator", asked, scripts)
    limits = Limits(max_hops=config.max_hops)
    return [
        Said(
            prompt=prompt, sample=sample, hops=hops, world=place, system=one.system, user=one.user, packet=packet,
            spoken=words,
            verdict=validate_text(words.text, worlds[place].graph, id=f"t{tick}_{prompt}_{sample}", limits=limits),
        )
        for (prompt, sample, hops, place, packet), one, words in zip(places, asked, spoken, strict=True)
    ]  # fmt: skip


def judge(
    config: SelfplayConfig, worlds: Sequence[World], said: Sequence[Said], tick: int, speak: Speak,
    policies: Mapping[str, CausalLM], opponents: Sequence[tuple[int, dict[str, torch.Tensor]]],
) -> dict[tuple[int, Query], tuple[int, int]]:  # fmt: skip
    """(solved, attempts) of every distinct valid task, under the answerer's own prompt: by the present answerer, and, where
    there are any, half as often by one of the past."""
    tasks: dict[tuple[int, Query], Posed] = {}
    for one in said:
        if one.verdict.task is not None:
            own = one.verdict.completion.graph_edges if one.verdict.completion is not None else ()
            tasks.setdefault(
                (one.world, one.verdict.task.query),
                Posed(task=one.verdict.task, world=worlds[one.world], own_edges=own),
            )
    rates = Counter[tuple[int, Query]]()
    attempts = config.judge_samples
    keys, posed = list(tasks), list(tasks.values())
    played = play(config, posed, config.judge_samples, tick, 1, speak, "answerer")
    if opponents and policies:
        _, past = opponents[Random(f"{config.seed}/{tick}/opponent").randrange(len(opponents))]
        half = config.judge_samples // 2
        with weights_of(policies[policy_of(config, "answerer")], past):
            played += play(config, posed, half, tick, 2, speak, "answerer")
        attempts += half
    for attempt in played:
        rates[keys[attempt.index]] += attempt.attempt.facts().correct
    return {key: (rates[key], attempts) for key in keys}


def generator_facts(
    one: Said, rates: Mapping[tuple[int, Query], tuple[int, int]], worlds: Sequence[World]
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


def admit(
    config: SelfplayConfig, said: Sequence[Said], rates: Mapping[tuple[int, Query], tuple[int, int]],
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
        drawn = one.verdict.completion.graph_edges if config.draws else ()
        pool.append(PoolTask(task=task, world=number, solved=solved, attempts=attempts, own_edges=drawn))
        rows.generated_tasks.append(task_row(task, solved=solved, attempts=attempts, world=number))
        graph = {"nodes": _ends(drawn), "edges": edge_rows(drawn)}
        rows.canonical_graph_candidates.append(
            {"candidate_index": index, "canonical_graph": graph, "question": task.question, "answer": list(task.answer)}
        )
        calls = canonical_trace(world_of(config, number).graph, task.query, task.evidence, task.question)
        rows.replay_traces.append({
            "candidate_index": index, "question": task.question, "replayed_edges": edge_rows(task.evidence),
            "tool_trace": [{"tool_name": c.tool_name, "args": c.args, "output": c.output} for c in calls],
        })  # fmt: skip


def _ends(edges: Sequence[Triple]) -> list[str]:
    return sorted({end for edge in edges for end in (edge.src, edge.dst)})


def _number(config: SelfplayConfig, at: At, one: Said) -> int:
    """The world's number in the split."""
    return at.round * config.worlds + one.world


# ----------------------------------------------------------------------------------------------------------- answerer


@dataclass(frozen=True, kw_only=True, slots=True)
class Posed:
    """A task and the graph that it is on."""

    task: Task
    world: World
    own_edges: tuple[Triple, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An attempt that is over, with its replies in order."""

    index: int
    """Of its task in the batch."""
    sample: int
    task: Task
    attempt: Attempt
    first_prompt: str
    spoken: list[Spoken]
    """The answerer's own replies."""

    @property
    def hops(self) -> int:
        return self.task.query.length


def choose(
    config: SelfplayConfig, worlds: Sequence[World], pool: Sequence[PoolTask], at: At, tick: int
) -> tuple[list[Posed], int]:
    """The answerer's tasks, and how many of them a script had to make up for: anchors, then the round's own generated
    tasks (those solved neither always nor never first), each on its own graph."""
    rng = Random(f"{config.seed}/{tick}/tasks")
    first = at.round * config.worlds
    fresh = [p for p in pool if p.world >= first] if at.phase == "answerer" else list(pool)
    anchors = round(config.anchor_share * config.answerer_tasks)
    wanted = config.answerer_tasks - anchors
    rng.shuffle(fresh)
    fresh.sort(key=lambda p: not 0 < p.solved < p.attempts)  # stable: the shuffle decides among equals
    lengths = range(config.min_hops, config.max_hops + 1)
    by_length = {length: [p for p in fresh if p.task.query.length == length] for length in lengths}
    chosen: list[PoolTask] = []
    # Every hop count in turn, as often as it has tasks: a generator that sets short tasks only must not teach short answers.
    while len(chosen) < wanted and any(by_length.values()):
        chosen += [tasks.pop(0) for tasks in by_length.values() if tasks][: wanted - len(chosen)]
    missing = wanted - len(chosen)
    if chosen and missing:  # few, but real: asked again with another context
        chosen, missing = [*chosen, *rng.choices(chosen, k=missing)], 0
    posed = [Posed(task=p.task, world=world_of(config, p.world), own_edges=p.own_edges) for p in chosen]
    counts = Counter(dict.fromkeys(lengths, 0))
    counts.update(one.task.query.length for one in posed)
    for number in range(anchors + missing):
        world = worlds[number % len(worlds)]
        length = min(lengths, key=lambda hops: (counts[hops], (hops + tick) % len(lengths)))  # what is rare so far
        counts[length] += 1
        made = random_tasks(world.graph, rng, 1, hops=(length,), full=config.full, prefix=f"anchor_{tick}_{number}")
        posed += [Posed(task=task, world=world) for task in made]
    return posed, 0 if at.phase == "answerer_pre" else missing


def play(
    config: SelfplayConfig, posed: Sequence[Posed], samples: int, tick: int, use: int, speak: Speak, role: Role
) -> list[Played]:
    """``samples`` attempts at each task, everybody who is ready batched; ``use`` keeps random numbers apart."""
    played: list[Played] = []
    for index, given in enumerate(posed):
        rng = Random(f"{config.seed}/{tick}/{use}/context/{index}")
        context = context_of(given.world.graph, given.task, rng, edges=config.context_edges, also=given.own_edges)
        for sample in range(samples):
            attempt = new_attempt(config, given.world, given.task, context)
            first = "\n".join(attempt.prompt())
            played.append(
                Played(index=index, sample=sample, task=given.task, attempt=attempt, first_prompt=first, spoken=[])
            )

    def say(asked: Sequence[tuple[int, int, int, str, str]]) -> list[Spoken]:
        prompts, scripts = list[Asked](), list[Callable[[Random], str]]()
        for number, who, turn, system, user in asked:
            one = played[number]
            key = (config.seed, tick, 1 + use, one.index, one.sample, turn, who)
            prompts.append(Asked(system=system, user=user, key=key))
            context, query = one.attempt.context, one.task.query
            scripts.append(lambda r, c=context, q=query: scripted_answer(c, q, r, care=DRY_RUN_CARE))  # type: ignore[misc]
        return speak(role, prompts, scripts)

    own = play_out([one.attempt for one in played], say)
    for one, spoken in zip(played, own, strict=True):
        one.spoken.extend(spoken)
    return played


def new_attempt(config: SelfplayConfig, world: World, task: Task, context: tuple[Triple, ...]) -> Attempt:
    """An attempt as the configuration has it."""
    return Attempt(
        world, task, context=context, tools=config.access == "tools", full=config.full, max_steps=config.max_steps,
        team=TeamLimits(agents=config.subagents, steps=config.subagent_steps),
    )  # fmt: skip


def play_out(
    attempts: Sequence[Attempt], say: Callable[[Sequence[tuple[int, int, int, str, str]]], list[Spoken]]
) -> list[list[Spoken]]:
    """Plays all attempts to their end. ``say`` takes (number of the attempt, who, turn, system, user) of everybody who is
    ready. Returns each answerer's own replies, in order; those of sub-agents are played, not learned from."""
    own: list[list[Spoken]] = [[] for _ in attempts]
    turn = 0
    while ready := [(number, who) for number, attempt in enumerate(attempts) for who in attempt.ready()]:
        spoken = say([(number, who, turn, *attempts[number].prompt(who)) for number, who in ready])
        for (number, who), words in zip(ready, spoken, strict=True):
            cut = words.reply is not None and words.reply.truncated
            attempts[number].take("" if cut else words.text, who)  # a reply that never ended says nothing
            if who == 0:
                own[number].append(words)
        turn += 1
    return own


def answerer_rewards(
    config: SelfplayConfig, played: Sequence[Played], trl_reward: Callable[..., Any] | None, *, anneal: float
) -> list[tuple[object, Reward]]:
    """(facts, reward) of each attempt."""
    facts = [one.attempt.facts() for one in played]
    if config.answerer_reward == "outcome":
        weights = AnswererWeights(telemetry=TEAM_WEIGHT if config.subagents else 0.0)
        return [(fact, answerer_reward(fact, weights, anneal=anneal)) for fact in facts]
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


def _chat(one: Played) -> list[dict[str, str]]:
    system, user = answerer_prompt(one.task.question, one.attempt.context, full=one.attempt.full)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def trl_reward_function(name: str) -> Callable[..., Any] | None:
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
