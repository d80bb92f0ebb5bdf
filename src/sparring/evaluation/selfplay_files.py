"""The files of a self-play round, under the published version's names: JSON, two spaces, keys sorted, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.envs.graph.records import Task, Triple
from sparring.envs.graph.validate import Verdict
from sparring.files import write_atomic


class RoundRows(msgspec.Struct, kw_only=True):
    """What a round has to write so far; it travels in the checkpoint, so that a resume writes the same files."""

    generator_dataset: list[dict[str, Any]] = []
    answerer_dataset: list[dict[str, Any]] = []
    answerer_pre_dataset: list[dict[str, Any]] = []
    generated_tasks: list[dict[str, Any]] = []
    canonical_graph_candidates: list[dict[str, Any]] = []
    replay_traces: list[dict[str, Any]] = []
    validation_reports: list[dict[str, Any]] = []


def write_rounds(directory: Path, number: int, rows: RoundRows) -> dict[str, str]:
    """``round_001/*.json``; the paths by name, from the run's directory."""
    folder = directory / f"round_{number + 1:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in rows.__struct_fields__:
        content = getattr(rows, name)
        if content or name != "answerer_pre_dataset":
            write_json(folder / f"{name}.json", content)
            paths[name] = f"{folder.name}/{name}.json"
    return paths


def write_json(path: Path, content: Any) -> None:
    """Any JSON value; text that is no Unicode (a lone surrogate of a reply) is written escaped."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text.encode("utf-8", "backslashreplace") + b"\n")


def phase_result(rows: Sequence[Mapping[str, Any]], role: str, policy: str, *, tuning_mode: str) -> dict[str, Any]:
    """A phase as ``self_play_summary.json`` lists it, from its rows of ``metrics.jsonl``; without a learner's step it was
    skipped (a dry run, or groups that were all alike)."""

    def span(name: str) -> dict[str, float | None]:
        found = [float(row[name]) for row in rows if isinstance(row.get(name), float | int)]
        return {"min": min(found, default=None), "max": max(found, default=None)}

    losses = [float(row["loss"]) for row in rows if isinstance(row.get("loss"), float | int)]
    return {
        "global_step": rows[-1].get(f"step/{policy}", 0), "training_loss": sum(losses) / len(losses) if losses else None,
        "train_rows": sum(int(row[f"settled/{role}"]) for row in rows), "skipped": not losses, "tuning_mode": tuning_mode,
        "diagnostics": {name: span(name) for name in ("reward_mean", "valid_share", "grad_norm", "entropy", "kl")},
    }  # fmt: skip


def edge_rows(edges: Sequence[Triple]) -> list[dict[str, str]]:
    """Edges as JSON objects."""
    return [{"src": edge.src, "rel": edge.rel, "dst": edge.dst} for edge in edges]


def task_row(task: Task, **metadata: Any) -> dict[str, Any]:
    """A task as ``generated_tasks.json`` lists it."""
    return {
        "task_id": task.id, "task_type": task.query.kind, "question": task.question, "answer": said(task.answer),
        "supporting_edges": edge_rows(task.evidence), "metadata": {"hops": task.query.length, **metadata},
    }  # fmt: skip


def answerer_row(task: Task, prompt: str) -> dict[str, Any]:
    """A task as ``answerer_dataset.json`` lists it; these are also the columns that a TRL reward is given."""
    return {
        "prompt": prompt, "question": task.question, "answer": said(task.answer),
        "supporting_edges_json": json.dumps(edge_rows(task.evidence), ensure_ascii=False),
        "difficulty": difficulty(task), "task_type": task.query.kind, "task_id": task.id,
    }  # fmt: skip


def difficulty(task: Task) -> str:
    """easy, medium or hard, by hops."""
    return "easy" if task.query.length == 1 else "medium" if task.query.length == 2 else "hard"


def validation_row(index: int, verdict: Verdict, raw: str) -> dict[str, Any]:
    """A verdict as ``validation_reports.json`` lists it."""
    claim = verdict.completion
    return {
        "candidate_index": index, "question": claim.question if claim else "",
        "answer": said(claim.answer) if claim else "", "task_type": claim.task_type if claim else "",
        "validation": {
            "is_valid": verdict.valid, "reasons": list(verdict.codes), "stage": verdict.stage,
            "unique_derivation": verdict.unique_derivation,
            "findings": [
                {"code": f.code.value, "field": f.field, "index": f.index, "detail": f.detail} for f in verdict.findings
            ],
        },
        "raw_completion": raw,
    }  # fmt: skip


def said(answer: tuple[str, ...]) -> Any:
    """One entity as text, several as a list."""
    return answer[0] if len(answer) == 1 else list(answer)
