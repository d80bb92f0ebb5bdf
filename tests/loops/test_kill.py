"""SIGKILL at any moment, then resume: the same weights to the bit. SIGTERM and SIGINT: saved, and resumed the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loop_toys import assert_same_run, metrics, small
from sparring.config import SharedConfig, to_toml
from sparring.loops.shared import train_shared

HERE = Path(__file__).parent
LATE: dict[str, Any] = {"env": "loop_toys:LateEnv", "agents_per_team": 2}


def environment() -> dict[str, str]:
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def straight(config: SharedConfig) -> Path:
    train_shared(replace(config, run="straight"))
    return Path("runs/straight")


def killed(config: SharedConfig, *how: str) -> int:
    """Runs the configuration as ``runs/killed`` under kills; returns how many there were."""
    Path("killed.toml").write_text(to_toml(config))
    command = [sys.executable, str(HERE / "killed_run.py"), "killed.toml", *how]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", range(2))
def test_killed_between_any_two_writes(seed: int, model: str) -> None:
    """Also between a checkpoint's rename and what comes after it: rotation, the report, the next tick's lines."""
    config = small(model, **LATE, checkpoint={"every": 1, "keep": 2}, ticks=10)
    assert killed(config, "calls", str(seed)) >= 8
    assert len(list((Path("runs/killed") / "checkpoints").iterdir())) == 2
    assert_same_run(straight(config), Path("runs/killed"))


@pytest.mark.parametrize("settings", [LATE, {"adapters": "per_team", "min_batch": 2}], ids=["late", "market"])
def test_killed_at_random_moments(settings: dict[str, Any], model: str) -> None:
    config = small(model, **settings, checkpoint={"every": 1, "keep": 2}, ticks=10)
    killed(config, "moments", "1")
    assert_same_run(straight(config), Path("runs/killed"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_many_random_moments(seed: int, model: str) -> None:
    config = small(model, checkpoint={"every": 2, "keep": 1}, ticks=60, worlds=3)
    assert killed(config, "moments", str(seed)) >= 3
    assert_same_run(straight(config), Path("runs/killed"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_ends_well_and_the_run_goes_on(number: signal.Signals, model: str) -> None:
    config = small(model, ticks=2000, checkpoint={"every": 10_000}, run="told")
    Path("told.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "sparring", "train", "shared", "--json", "--config"]
    with subprocess.Popen([*command, "told.toml"], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        rows = Path("runs/told/metrics.jsonl")
        for _ in range(600):
            if rows.is_file() and rows.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    report = json.loads(output.splitlines()[-1])
    assert report["stopped"] is True and 1 <= report["ticks"] < 2000
    ended = report["ticks"]
    assert [path.name for path in Path("runs/told/checkpoints").iterdir()] == [f"step-{ended:06d}"]
    longer = replace(config, ticks=ended + 2, run=None)
    resumed = train_shared(longer, resume=Path("runs/told"))
    assert (resumed.ticks, resumed.stopped) == (ended + 2, False)
    assert [row["tick"] for row in metrics(Path("runs/told"))] == list(range(1, ended + 3))
    assert_same_run(straight(replace(longer)), Path("runs/told"))
