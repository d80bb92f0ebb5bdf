"""Rewards of self-play on graphs, from recorded facts alone: pure functions, the same whatever came before or beside.

The answerer is paid for the exact set of answers; the rest shapes, and all of it together is worth less than being right.
The generator is paid for tasks that its answerer solves about half of the time, with the evidence at hand, and that no
guess solves as often; and a little for not asking what the rest of the batch asks. What was asked in earlier batches
counts for the task pool, never here: a perfect policy is worth as much in its second epoch as in its first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparring.envs.graph.records import STAGES, AnswerFacts, GeneratorFacts, Query, Telemetry
from sparring.errors import ConfigError
from sparring.types import Reward

LARGEST_GUESS = 0.5
"""A task whose best guess is right this often has too small an answer space to teach anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswererWeights:
    """What each part is worth; correctness dominates.

    >>> AnswererWeights().correct
    1.0
    """

    correct: float = 1.0
    format: float = 0.1
    """The reply was read as an answer."""
    evidence: float = 0.2
    """F1 of the edges named."""
    efficiency: float = 0.05
    """Turns left over, as a share."""
    telemetry: float = 0.0
    """Sub-agents as the runtime measured them, before it is annealed."""

    def __post_init__(self) -> None:
        parts = (self.format, self.evidence, self.efficiency, self.telemetry)
        if not all(math.isfinite(part) and part >= 0.0 for part in (self.correct, *parts)):
            raise ConfigError("answerer weights must be finite and at least 0")
        if sum(parts) >= self.correct:
            raise ConfigError(
                f"answerer.correct is {self.correct:g} and the other weights sum to {sum(parts):g}: give correct more "
                "than the others together, or a wrong answer could beat a right one"
            )


def answerer_reward(facts: AnswerFacts, weights: AnswererWeights, *, anneal: float = 0.0) -> Reward:
    """Reward of one attempt. ``anneal`` in [0, 1] scales what telemetry earns; it falls to 0 over a run (PARL, Kimi
    K2.5, arXiv 2602.02276).

    >>> right = AnswerFacts(parsed=True, correct=True, evidence_f1=0.0, steps=1, max_steps=1)
    >>> answerer_reward(right, AnswererWeights()).total
    1.1
    """
    unused = (facts.max_steps - facts.steps) / facts.max_steps if facts.parsed else 0.0
    parts = {
        "correct": weights.correct * facts.correct,
        "format": weights.format * facts.parsed,
        "evidence": weights.evidence * facts.evidence_f1 if facts.parsed else 0.0,
        "efficiency": weights.efficiency * unused,
    }
    if facts.telemetry is not None and anneal > 0.0:
        parts["telemetry"] = weights.telemetry * anneal * team_work(facts.telemetry)
    return Reward(total=math.fsum(parts.values()), parts=parts)


def team_work(telemetry: Telemetry) -> float:
    """How far sub-agents were spawned and brought to an end, in [0, 1]: the PARL terms against serial collapse and
    against spurious parallelism, half each.

    >>> team_work(Telemetry(spawned=0, finished=0, critical_steps=1, breadth=0, depth=0))
    0.0
    """
    if telemetry.spawned <= 0:
        return 0.0
    finished = min(1.0, max(0, telemetry.finished) / telemetry.spawned)
    return 0.5 * math.tanh(telemetry.spawned / 4.0) * finished + 0.5 * finished


# ------------------------------------------------------------------------------------------------------------ generator


def learnability(solved: int, attempts: int) -> float:
    """4 p (1 - p) with p = solved / attempts: 1 at half, 0 at never and at always.

    The variance of a right answer, scaled: what a group of answers has to teach (R-Zero, arXiv 2508.05004, peaks there
    too; SPICE, arXiv 2510.24684, pays the variance).

    >>> [learnability(k, 8) for k in (0, 2, 4, 8)]
    [0.0, 0.75, 1.0, 0.0]
    """
    if not 0 <= solved <= attempts or attempts < 1:
        raise ValueError(f"{solved} solved of {attempts} attempts")
    return 4.0 * solved * (attempts - solved) / attempts**2


def similarity(one: Query, other: Query) -> float:
    """Of two tasks, symmetric, in [0, 1]; 1 only for the same task.

    0.3 for the same kind and start, 0.5 for the share of hops that agree in place (both paths of an intersection), 0.2
    only when all is the same.
    """
    if one == other:
        return 1.0
    mine, theirs = (*one.hops, *one.other_hops), (*other.hops, *other.other_hops)
    agree = sum(a == b for a, b in zip(mine, theirs, strict=False)) / max(len(mine), len(theirs))
    same_start = one.kind == other.kind and one.start == other.start
    return 0.3 * same_start + 0.5 * agree


def diversity(queries: Sequence[Query | None]) -> list[float | None]:
    """1 - mean similarity to the other valid tasks of the batch; 1 for one alone, None for what is not valid.

    Symmetric: equal tasks get equal values, and the order of the batch changes nothing.
    """
    valid = [query for query in queries if query is not None]
    found: dict[Query, float] = {}
    for query in dict.fromkeys(valid):
        alike = math.fsum(similarity(query, other) for other in valid) - 1.0  # itself, once
        found[query] = 1.0 - alike / (len(valid) - 1) if len(valid) > 1 else 1.0
    return [None if query is None else found[query] for query in queries]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorWeights:
    """What each part is worth. What is not valid earns less than 0, by how far it got.

    >>> GeneratorWeights().learnability
    1.0
    """

    valid: float = 0.25
    learnability: float = 1.0
    diversity: float = 0.1
    invalid: float = 1.0
    """Taken from a completion that holds no JSON; less from one that came further."""

    def __post_init__(self) -> None:
        if not all(
            math.isfinite(part) and part >= 0.0
            for part in (self.valid, self.learnability, self.diversity, self.invalid)
        ):
            raise ConfigError("generator weights must be finite and at least 0")
        if self.valid + self.invalid == 0.0:
            raise ConfigError("generator.valid and generator.invalid are both 0: a valid task must be worth more")


def generator_rewards(batch: Sequence[GeneratorFacts], weights: GeneratorWeights) -> list[Reward]:
    """Rewards of one batch, in its order. Equal facts earn the same wherever they stand."""
    spread = diversity([facts.query for facts in batch])
    return [_generator_reward(facts, own, weights) for facts, own in zip(batch, spread, strict=True)]


def _generator_reward(facts: GeneratorFacts, spread: float | None, weights: GeneratorWeights) -> Reward:
    if facts.query is None or spread is None:
        parts = {"invalid": -weights.invalid * (1.0 - facts.stage / (STAGES + 1))}
    else:
        large = facts.guess_chance < LARGEST_GUESS
        taught = learnability(facts.solved, facts.attempts) if large and facts.attempts else 0.0
        parts = {
            "valid": weights.valid,
            "learnability": weights.learnability * taught,
            "diversity": weights.diversity * spread,
        }
    return Reward(total=math.fsum(parts.values()), parts=parts)
