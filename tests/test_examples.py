"""The examples outside the package: short, right, and trained from the command line and from Python."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest
import torch

import sparring as sp
from loop_toys import random_model
from sparring.cli import main
from sparring.models import TINY_DIRECTORY

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    torch.set_num_threads(1)


def test_the_environment_has_60_lines_and_keeps_the_contract() -> None:
    assert len((ROOT / "examples/number_duel.py").read_text().splitlines()) <= 60
    sp.check_env("examples.number_duel:NumberDuel")


def test_it_is_trained_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tmp_path / "model")
    settings = [
        "--ticks",
        "5",
        "--worlds",
        "2",
        "--agents-per-team",
        "2",
        "--sampling.max-new-tokens",
        "8",
        "--min-batch",
        "4",
    ]
    named = ["--env", "examples.number_duel:NumberDuel", "--reward", "env", "--model", model, "--run", "duel"]
    assert main(["train", "shared", *named, *settings, "--quiet", "true", "--json"]) == 0
    assert '"replies":40' in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("best\n"))
    assert main(["play", "examples.number_duel:NumberDuel", "--team", "left", "--others", "bot:best"]) == 0


def test_claims_win_within_the_limit() -> None:
    from examples.number_duel import Claim, NumberDuel

    from sparring.types import Seat

    env = NumberDuel()
    env.reset(seats=[Seat(agent="a", team="left"), Seat(agent="b", team="right")], seed=0, episode=0)
    limit = env.observe()["a"].limit

    def rewards(left: object, right: object) -> list[float]:
        return [outcome.facts.reward for outcome in env.step({"a": left, "b": right}).outcomes]

    saved = env.snapshot()
    assert rewards(Claim(limit), Claim(limit - 1)) == [1.0, 0.0]
    env.restore(saved)
    assert rewards(Claim(limit + 1), Claim(1)) == [0.0, 1.0]
    env.restore(saved)
    assert rewards("no claim", Claim(0)) == [0.0, 0.0]


def test_five_lines_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself; on a random model, and shorter, where the embedded one is not there."""
    lines = (ROOT / "examples/five_lines.py").read_text().splitlines()
    code = [line for line in lines if line and not line.startswith('"""')]
    assert len(code) <= 5
    real = sp.train_shared

    def shorter(**settings: object) -> object:
        model = "tiny" if (TINY_DIRECTORY / "config.json").is_file() else random_model(tmp_path / "model")
        return real(**{**settings, "model": model, "ticks": 3, "worlds": 2, "quiet": True})

    monkeypatch.setattr(sp, "train_shared", shorter, raising=False)
    runpy.run_path(str(ROOT / "examples/five_lines.py"), run_name="__main__")
    assert "runs/" in capsys.readouterr().out.replace("\\", "/")
    assert "examples.number_duel" in sys.modules
