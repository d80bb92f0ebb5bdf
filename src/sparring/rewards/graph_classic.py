"""The rewards of the published version (v2), exactly, for comparison: its arithmetic, with the ways to game it.

A wrong answer with boasted telemetry beats a right one without; see ``tests/rewards/test_graph.py``. Train with it only
to compare. Formulas: spec 1.8, 3.2, 3.3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparring.envs.graph.records import Triple

GENERATOR_WEIGHTS = {"validity": 0.45, "hardness": 0.20, "diversity": 0.15, "consistency": 0.20}
PENALTIES = {
    "missing_question_or_answer": 0.35, "malformed_support_edges": 0.25, "non_replayable_tool_calls": 0.25,
    "non_unique_derivation_path": 0.20, "unseen_nodes_or_edges": 0.25, "answer_leakage": 0.30,
    "duplicate_or_near_duplicate": 0.15, "context_or_support_budget_overflow": 0.15,
}  # fmt: skip
OTHER_PENALTY = 0.10
SCHEMA_KEYS = ("question", "answer", "task_type", "supporting_edges", "subagent_outputs", "orchestrator")


def squash(x: float) -> float:
    """1 / (1 + exp(-x / 2)).

    >>> squash(0.0)
    0.5
    """
    return 1.0 / (1.0 + math.exp(-x / 2.0))


def team_shaping(*, spawned: int, finished: int, critical: int, breadth: int, depth: int, hint: int = 3) -> float:
    """The PARL auxiliary of v2 at anneal 1.

    >>> round(team_shaping(spawned=2, finished=2, critical=1, breadth=2, depth=1), 4)
    0.3252
    """
    parallel = math.tanh(spawned / 4.0) * (0.7 + 0.3 * min(1.0, spawned / hint))
    ended = min(1.0, finished / spawned) if spawned > 0 else 0.0
    latency = 0.05 / max(1, critical)
    wide, deep = 0.04 * math.tanh(breadth / 6.0), -0.03 * math.tanh(max(0, depth - 1) / 4.0)
    return 0.15 * parallel + 0.20 * ended + latency + wide + deep


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicAnswer:
    """What v2's answer reward reads, for a hard task and one step, without tool outputs."""

    answer: str
    right: bool
    named_edges: int
    """After the cut to the number of gold edges."""
    gold_named: int
    gold_edges: int
    deducible: bool
    connectivity: float
    """In [-1, 1]; 0 with fewer than two seeds."""
    distinct_relations: int = 0
    information: float = 0.0
    """0.12 * (relation information - 0.5) + 0.12 * (entity information - 0.5) of the named edges; 0 without edges."""


def answer_reward(facts: ClassicAnswer) -> float:
    """Of one answer, without telemetry, squashed.

    >>> bare = ClassicAnswer(answer="b", right=True, named_edges=0, gold_named=0, gold_edges=2, deducible=False,
    ...     connectivity=-1.0)
    >>> round(answer_reward(bare), 4)
    0.6071
    """
    precision = facts.gold_named / facts.named_edges if facts.named_edges else 0.0
    recall = facts.gold_named / facts.gold_edges if facts.gold_edges else 0.0
    both_empty = not facts.named_edges and not facts.gold_edges
    f1 = 1.0 if both_empty else 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    repeated = 1.0 - facts.distinct_relations / facts.named_edges if facts.named_edges else 0.0
    return squash(
        (0.15 if facts.answer else -0.55)
        + (1.15 if facts.right else -1.0)
        + (0.50 if facts.deducible else -0.25)
        + 0.30 * facts.connectivity
        + 0.55 * f1
        + 0.12
        - 0.05 * max(0, facts.named_edges - facts.gold_edges)
        + facts.information
        - 0.10 * repeated
    )


_SEED = re.compile(r"\b(?:alias|user|org|loc|post|thr|thread|event)_[A-Za-z0-9_]+")


def answerer_reward(text: str, *, question: str, answer: str, evidence: Sequence[Triple]) -> float:
    """v2's reward of an answerer's whole reply: :func:`answer_reward` and the telemetry that the reply claims of itself.

    Edges beyond the number of gold edges are cut, and edges merely mentioned count, as published.
    """
    said = _object(text)
    given = str(said.get("answer", "")).strip()
    gold = [(edge.src, edge.rel, edge.dst) for edge in evidence]
    listed = said.get("supporting_edges")
    named = [edge for item in (listed if isinstance(listed, list) else []) if (edge := _edge(item)) is not None]
    named = named[: len(gold)] or [edge for edge in gold if all(part in text for part in edge)]
    hits = len(set(named) & set(gold))
    seeds = {*_SEED.findall(question), answer}
    facts = ClassicAnswer(
        answer=given, right=given == answer, named_edges=len(named), gold_named=hits, gold_edges=len(gold),
        deducible=given == answer and (hits > 0 or _connected(named, seeds) > 1),
        connectivity=_scaled(len(seeds), _connected(named, seeds)), distinct_relations=len({rel for _, rel, _ in named}),
    )  # fmt: skip
    return answer_reward(facts) + _claimed_team(said.get("orchestrator"))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _edge(item: Any) -> tuple[str, str, str] | None:
    if isinstance(item, list) and len(item) == 3:
        item = dict(zip(("src", "rel", "dst"), item, strict=True))
    if not isinstance(item, dict) or not all(item.get(name) for name in ("src", "rel", "dst")):
        return None
    return str(item["src"]), str(item["rel"]), str(item["dst"])


def _connected(edges: Sequence[tuple[str, str, str]], seeds: set[str]) -> int:
    """The largest number of seeds that the edges, undirected, connect; 1 without any."""
    largest = 1
    for seed in seeds:
        met, before = {seed}, 0
        while len(met) > before:
            before = len(met)
            met |= {end for src, _, dst in edges if {src, dst} & met for end in (src, dst)}
        largest = max(largest, len(met & seeds))
    return largest


def _scaled(seeds: int, connected: int) -> float:
    if seeds <= 1:
        return 0.0
    low, high = -(seeds // 2), -(-seeds // 2) - 1
    raw = low + max(0, connected - 1)
    return 2.0 * (raw - low) / (high - low) - 1.0


def _claimed_team(claim: Any) -> float:
    def number(name: str, least: int) -> int:
        value = claim.get(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return max(least, int(value)) if fits else least

    if not isinstance(claim, dict):
        return 0.0
    return team_shaping(
        spawned=number("spawn_count", 0), finished=number("finished_subtasks", 0), critical=number("critical_steps", 1),
        breadth=number("breadth", 0), depth=number("depth", 0),
    )  # fmt: skip


def text_signal(text: str) -> float:
    """What v2 pays for looking like JSON, at most 0.25 (defect 14)."""
    pieces = (
        0.03 * (min(2, text.count("{")) + min(2, text.count("}"))),
        0.01 * (min(4, text.count("[")) + min(4, text.count("]"))),
        0.015 * sum(f'"{key}"' in text for key in SCHEMA_KEYS),
        min(0.04, len(set(text.split())) / 800.0),
        min(0.03, len(text) / 8000.0),
    )
    return min(0.25, math.fsum(pieces))


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))


def valid_reward(
    *, judge_right: bool, diversity: float, pressure: float, parallel: float, finished: float, signal: float
) -> float:
    """Of a valid completion, v2. Arguments in [0, 1]; ``signal`` as of :func:`text_signal`."""
    hardness = -0.4 if judge_right else 1.0
    total = (
        GENERATOR_WEIGHTS["validity"]
        + GENERATOR_WEIGHTS["hardness"] * _clamp((hardness + 0.4) / 1.4)
        + GENERATOR_WEIGHTS["diversity"] * diversity
        + GENERATOR_WEIGHTS["consistency"] * _clamp(0.55 * pressure + 0.25 * parallel + 0.20 * finished)
        + 0.05 * _clamp(signal / 0.25)
    )
    return min(1.2, max(-1.8, total))


def invalid_reward(
    codes: Sequence[str],
    *,
    question: bool,
    answer: bool,
    edges: int,
    calls: int,
    outputs: bool,
    graph: bool,
    signal: float,
) -> float:
    """Of a completion that v2's validator refuses: partial credit less penalties, clipped to [-1.25, -0.02].

    >>> wrong = ("missing_question_or_answer", "malformed_support_edges", "non_replayable_tool_calls",
    ...     "non_unique_derivation_path")
    >>> round(invalid_reward(wrong, question=False, answer=False, edges=0, calls=0, outputs=False, graph=False,
    ...     signal=0.0), 3)
    -1.15
    """
    penalty = 0.10 + math.fsum(PENALTIES.get(code, OTHER_PENALTY) for code in codes)
    credit = 0.25 * question + 0.25 * answer + min(0.36, 0.12 * edges) + min(0.20, 0.05 * calls)
    credit += 0.10 * outputs + 0.12 * graph
    return min(-0.02, max(-1.25, credit - penalty + signal))
