"""A run that was stopped and resumed is the run that never stopped, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loop_toys import assert_same_run, final_tensors, metrics, small, transcripts
from sparring.config import SharedConfig
from sparring.errors import CheckpointError, ConfigError, SparringError
from sparring.loops.shared import train_shared
from sparring.models import TINY_DIRECTORY

LATE: dict[str, Any] = {"env": "loop_toys:LateEnv", "agents_per_team": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": LATE,
    "uneven-batches": {**LATE, "min_batch": 11},
    "lora-per-team": {**LATE, "adapters": "per_team", "min_batch": 2},
    "lora-shared": {"adapters": "shared"},
    "apollo": {**LATE, "optimizer": {"kind": "apollo", "learning_rate": 1e-2, "projection_gap": 3}},
    "running-baseline": {**LATE, "advantages": {"kind": "running"}},
    "clipped": {**LATE, "loss": {"kind": "clipped", "max_version_lag": 2}},
    "bernoulli": {**LATE, "gate": {"bernoulli": True, "rate": 0.2, "warmup_replies": 10}},
    "kl-and-replies": {**LATE, "gate": {"unit": "reply", "rate": 0.5}, "loss": {"kl_coefficient": 0.1}},
    "some-teams": {**LATE, "trainable": ("blue",)},
}


def run_to(config: SharedConfig, ticks: int, name: str, *, resume: bool = False) -> Path:
    train_shared(replace(config, ticks=ticks, run=name), resume=Path("runs") / name if resume else None)
    return Path("runs") / name


@pytest.mark.parametrize("way", list(WAYS))
def test_resuming_is_never_having_stopped(way: str, model: str) -> None:
    config = small(model, checkpoint={"every": 100}, **WAYS[way])
    straight = run_to(config, 9, "straight")
    first = run_to(config, 4, "stopped")
    start = final_tensors(first)
    run_to(config, 6, "stopped", resume=True)
    run_to(config, 9, "stopped", resume=True)
    assert_same_run(straight, first)
    moved = [n for n, t in final_tensors(first).items() if n.startswith("policy-") and not torch.equal(t, start[n])]
    assert moved, "nothing was learned after the resume, so nothing was tested"
    assert len(metrics(first)) == 9 and len(transcripts(first)) >= 2


def test_a_resume_counts_incarnations_and_names_them_in_transcripts(model: str) -> None:
    from sparring.files import read_jsonl

    config = small(model, checkpoint={"every": 100})
    run_to(config, 2, "a")
    run = run_to(config, 4, "a", resume=True)
    rows = [row for file in sorted((run / "episodes").iterdir()) for row in read_jsonl(file)]
    assert {(row["tick"] > 2, str(row["version"]).partition(".")[0]) for row in rows} == {(False, "v1"), (True, "v2")}


def test_what_was_written_after_the_checkpoint_is_cut_back(model: str) -> None:
    config = small(model, checkpoint={"every": 2}, **LATE)
    straight = run_to(config, 6, "straight")
    ahead = run_to(config, 5, "ahead")
    newest = sorted((ahead / "checkpoints").iterdir())[-1]
    assert newest.name == "step-000005"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # as if it had been killed in tick 5
    assert len(metrics(ahead)) == 5
    run_to(config, 6, "ahead", resume=True)
    assert_same_run(straight, ahead)


def test_a_run_killed_before_its_first_checkpoint_begins_again(model: str) -> None:
    config = small(model, checkpoint={"every": 100})
    straight = run_to(config, 3, "straight")
    killed = run_to(config, 2, "killed")
    for checkpoint in (killed / "checkpoints").iterdir():
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    run_to(config, 3, "killed", resume=True)
    assert_same_run(straight, killed)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"worlds": 3}, ConfigError, "worlds is 3 with 1 fork.*the run has 2 tables"),
        ({"env": "market"}, SparringError, "not a snapshot"),
        ({"trainable": ("blue",), "players": {"red": "bot:quiet"}, "adapters": "shared"}, CheckpointError, "lacks|has"),
        ({"loss": {"kl_coefficient": 0.5}, "gate": {"unit": "reply"}}, CheckpointError, "reference-shared"),
        ({"optimizer": {"kind": "apollo"}}, CheckpointError, "optimizer|apollo|adamw"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], error: type[Exception], message: str, model: str
) -> None:
    config = small(model, **LATE)
    run = run_to(config, 2, "a")
    before = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and p.name not in ("lock",)}
    with pytest.raises(error, match=message):
        train_shared(small(model, **{**LATE, **change}, run="a"), resume=run)
    for path, content in before.items():
        if path.name not in ("manifest.json", "incarnation"):
            assert path.read_bytes() == content, path
    assert len(metrics(run_to(config, 3, "a", resume=True))) == 3


@pytest.mark.skipif(not (TINY_DIRECTORY / "config.json").is_file(), reason="the embedded model is not built yet")
def test_resuming_the_embedded_model_with_turns_pending_in_the_market() -> None:
    config = small(
        "tiny", reward="outcome", agents_per_team=2, sampling={"max_new_tokens": 48}, checkpoint={"every": 100}
    )
    straight = run_to(config, 7, "straight")
    stopped = run_to(config, 3, "stopped")
    run_to(config, 7, "stopped", resume=True)
    assert_same_run(straight, stopped)
