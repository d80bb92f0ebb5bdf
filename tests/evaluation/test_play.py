"""A person's seat, with piped input."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from loop_toys import random_model, small
from sparring.cli import main
from sparring.config import PlayConfig
from sparring.errors import ConfigError
from sparring.evaluation.play import PlayReport, play
from sparring.loops.shared import train_shared


def played(*lines: str, **settings: Any) -> tuple[PlayReport, str]:
    screen = io.StringIO()
    config = PlayConfig(**{"others": "bot:honest", **settings})
    return play(config, stdin=io.StringIO("\n".join([*lines, ""])), stdout=screen), screen.getvalue()


def test_a_whole_episode_by_bots_and_json() -> None:
    report, text = played(*['{"action":"wait"}', "honest"] * 20)
    assert report.finished and report.ticks == report.settled == 16
    assert text.count("Settled: your turn of tick") == 16 and "Tick 0" in text and "You are blue" in text
    assert sum(report.reward_parts.values()) == pytest.approx(report.reward_total)
    assert "The episode is over. 16 of your 16 turns settled" in report.render()


def test_help_mistakes_blank_lines_and_leaving() -> None:
    report, text = played("help", "", "waiit", '{"action":"wat"}', "honst", "careless", "quit", "honest", team="red")
    assert (report.ticks, report.finished) == (1, False) and "You left." in report.render()
    assert '"action":"withdraw"' in text, "the full rules name every action"
    assert text.count("That is no action") == 3 and "did you mean 'honest'" in text and "(schema)" in text


def test_the_end_of_the_input_is_leaving() -> None:
    assert played()[0] == PlayReport(
        env="market", team="blue", ticks=0, settled=0, reward_total=0.0, reward_parts={}, finished=False
    )


def test_any_environment_and_the_same_seed_is_the_same_game() -> None:
    one, text = played(
        "quiet", "quiet", "quiet", "quiet", "quiet", env="loop_toys:LateEnv", others="bot:quiet", team="red"
    )
    assert one.finished and one.ticks == 5 and "there are none" not in text
    first, second = (played("honest", "careless", seed=4)[1] for _ in range(2))
    assert first == second != played("honest", "careless", seed=5)[1]


def test_others_may_be_a_model_or_a_run(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    assert played("honest", others=model)[0].ticks == 1
    run = train_shared(small(model, ticks=1, adapters="per_team", min_batch=1)).run
    assert played("honest", "honest", others=run)[0].ticks == 2


def test_mistakes_of_the_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="team is 'bleu': market has red, blue, gray"):
        played(team="bleu")
    with pytest.raises(ConfigError, match="has no bot 'honst'"):
        played(others="bot:honst")
    monkeypatch.setattr("sys.stdin", io.StringIO("honest\n"))
    assert main(["play", "market", "--others", "bot:honest"]) == 0
    assert "You left." in capsys.readouterr().out
