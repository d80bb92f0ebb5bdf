"""The command line and the package from Python: help without torch, exit codes, one line for an error, JSON last."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sparring as sp
from sparring import cli
from sparring.config import (
    CheckEnvConfig,
    DemoConfig,
    EvalConfig,
    ExportConfig,
    IndependentConfig,
    PlayConfig,
    SelfplayConfig,
    SharedConfig,
    WarmupConfig,
    to_toml,
)
from sparring.config_live import FeedConfig
from sparring.errors import ConfigError, TrainingError
from sparring.learning.settings import GateSettings
from sparring.types import Outcome, Turn

ROOT = Path(__file__).parents[1]


@dataclass
class Report:
    """What a faked function returns."""

    blue_loss: float = 0.25
    run: str = "runs/a"


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Stands in for a heavy module's function; returns the calls it gets."""

    def install(place: str, result: Any = None) -> Calls:
        module_name, _, name = place.partition(":")
        module = sys.modules.get(module_name) if module_name in sys.modules else None
        stand_in = types.ModuleType(module_name)
        if module is not None:
            stand_in.__dict__.update(module.__dict__)
        calls: Calls = []

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append((arguments, keywords))
            if isinstance(result, BaseException):
                raise result
            return result

        setattr(stand_in, name, call)
        monkeypatch.setitem(sys.modules, module_name, stand_in)
        return calls

    return install


# Help


@pytest.mark.parametrize(
    "arguments",
    [["--help"], [], ["-h"], ["train", "--help"], ["train", "shared", "--help"], ["--version"], ["eval", "-h"]],
)
def test_help_is_quick_and_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from sparring.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'peft', 'httpx', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - began)
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert min(times) < 0.5


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: sparring {name}" in text and "Examples:" in text and f"  sparring {name}" in text
    assert max(map(len, text.splitlines())) <= 120
    cli.main([])
    assert name in capsys.readouterr().out


def test_help_names_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", "shared", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        "--gate.rate X",
        "[default 0.03]",
        "--players.NAME",
        "--resume RUN",
        "[cpu | cuda; default cpu]",
        "--config",
    ):
        assert expected in text


def test_examples_in_the_help_are_right(
    fake: Callable[..., Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("ticks = 3\n")
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(SharedConfig()))
    (tmp_path / "runs" / "pole").mkdir()
    (tmp_path / "runs" / "pole" / "config.toml").write_text(to_toml(IndependentConfig()))
    (tmp_path / "runs" / "live").mkdir()
    (tmp_path / "runs" / "live" / "config.toml").write_text(to_toml(FeedConfig(source="live/log.sqlite")))
    (tmp_path / "runs" / "duel").mkdir()
    (tmp_path / "runs" / "duel" / "config.toml").write_text(to_toml(SelfplayConfig()))
    for place in (
        *("sparring.loops.independent:train_independent", "sparring.runs:export_onnx"),
        "sparring.loops.selfplay:train_selfplay",
        *("sparring.loops.shared:train_shared", "sparring.loops.warmup:warmup", "sparring.demo:demo"),
        *("sparring.evaluation.evaluate:evaluate_run", "sparring.evaluation.play:play", "sparring.runs:load_policy"),
        *("sparring.models:export", "sparring.models:add_smollm2", "sparring.envs.load:load_env"),
        "sparring.envs.contract:check_env",
        *(
            "sparring.loops.feed:train_feed",
            "sparring.serve:serve_model",
            "sparring.serve:serve_intake",
            "sparring.serve:serve_market",
        ),
        *("sparring.serve:look_into_log", "sparring.serve:roll_back"),
    ):
        fake(place)
    listing = fake("sparring.models:list_models", [])
    for name in ("export", "add_smollm2"):
        setattr(sys.modules["sparring.models"], name, lambda *_: "there")
    for command in cli.COMMANDS.values():
        for example in command.examples:
            assert cli.main(example.split()[1:]) == 0, example
    assert listing


# What the commands call


def test_train_shared(fake: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("sparring.loops.shared:train_shared", Report())
    assert cli.main(["train", "shared", "--ticks", "3", "--gate.rate", "0.5"]) == 0
    assert calls == [((SharedConfig(ticks=3, gate=GateSettings(rate=0.5)),), {"resume": None})]
    assert capsys.readouterr().out == "blue_loss  0.25\nrun        runs/a\n"


def test_resume_takes_the_configuration_of_the_run(
    fake: Callable[..., Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake("sparring.loops.shared:train_shared")
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a")
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(SharedConfig(seed=9, ticks=5)))
    for given in (["--resume", "a"], ["--resume=runs/a"]):
        assert cli.main(["train", "shared", *given, "--ticks", "8"]) == 0
        assert calls.pop() == ((SharedConfig(seed=9, ticks=8),), {"resume": run})
    sp.train_shared(resume="a", ticks=8)
    assert calls.pop() == ((SharedConfig(seed=9, ticks=8),), {"resume": run})
    with pytest.raises(ConfigError, match="leave config out"):
        sp.train_shared(SharedConfig(), resume="a")


@pytest.mark.parametrize(
    ("arguments", "place", "config"),
    [
        (["warmup", "--out", "x", "--epochs", "1"], "sparring.loops.warmup:warmup", WarmupConfig(out="x", epochs=1)),
        (
            ["eval", "runs/a", "--situations", "9"],
            "sparring.evaluation.evaluate:evaluate_run",
            EvalConfig(run="runs/a", situations=9),
        ),
        (
            ["eval", "--situations=9", "runs/a"],
            "sparring.evaluation.evaluate:evaluate_run",
            EvalConfig(run="runs/a", situations=9),
        ),
        (["demo", "--full"], "sparring.demo:demo", DemoConfig(full=True)),
        (["play", "market", "--team", "red"], "sparring.evaluation.play:play", PlayConfig(team="red")),
    ],
)
def test_commands_with_a_configuration(
    fake: Callable[..., Calls], arguments: list[str], place: str, config: object
) -> None:
    calls = fake(place)
    assert cli.main(arguments) == 0
    assert calls == [((config,), {})]


def test_models_export_and_check_env(fake: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    fake("sparring.models:list_models", [types.SimpleNamespace(name="tiny", present=True, note="ships")])
    assert cli.main(["models", "list"]) == 0
    assert capsys.readouterr().out == "tiny  ready: ships\n"
    fake("sparring.models:add_smollm2", Path("/m"))
    assert cli.main(["models", "add", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"added": "/m"}
    loaded, exported = fake("sparring.runs:load_policy", "POLICY"), fake("sparring.models:export", Path("out"))
    assert cli.main(["export", "a", "--format", "merged", "--out", "out", "--policy", "blue"]) == 0
    assert loaded == [(("a",), {"policy": "blue", "step": None})]
    assert exported == [(("POLICY", "merged", "out"), {})]
    made, checked = fake("sparring.envs.load:load_env", "ENV"), fake("sparring.envs.contract:check_env")
    assert cli.main(["check-env", "m:E", "--env-settings.size", "3", "--json"]) == 0
    assert made == [(("m:E",), {"settings": {"size": 3}})] and checked == [(("ENV",), {"seed": 0})]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"env": "m:E", "keeps_the_contract": True}


def test_json_is_the_last_line(fake: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    class Rendered(Report):
        def render(self) -> str:
            return "a table"

    fake("sparring.evaluation.evaluate:evaluate_run", Rendered(blue_loss=float("nan")))
    assert cli.main(["eval", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"blue_loss": None, "run": "runs/a"}
    assert cli.main(["eval", "a"]) == 0
    assert capsys.readouterr().out == "a table\n"

    class Flat(Report):
        def flat(self) -> dict[str, float]:
            return {"blue_loss_low": 0.125}

    fake("sparring.evaluation.evaluate:evaluate_run", Flat())
    assert cli.main(["eval", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"blue_loss_low": 0.125}
    fake("sparring.evaluation.evaluate:evaluate_run", {"blue_loss_start": 0.5, "rows": [1, 2], "path": Path("x")})
    assert cli.main(["eval", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"blue_loss_start": 0.5, "rows": [1, 2], "path": "x"}


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command 'trian' (did you mean 'train'?)"),
        (["train"], "train wants one of: shared"),
        (["train", "sharde"], "no command train 'sharde' (did you mean 'shared'?)"),
        (["nonsense", "--help"], "no command 'nonsense'"),
        (["train", "shared", "--gate.rat", "1"], "unknown setting --gate.rat (did you mean --gate.rate?)"),
        (["train", "shared", "--resume"], "--resume wants a value"),
        (["train", "shared", "--resume", "nothing-here"], "no run 'nothing-here'"),
        (["eval"], "run is missing"),
        (["eval", "a", "b"], "unexpected argument 'b'"),
        (["models", "add"], "models add takes one name"),
        (["models", "list", "x"], "takes no arguments"),
        (["warmup"], "out is missing: give --out"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    assert captured.err.startswith("sparring: ") and message in captured.err


def test_other_endings(fake: Callable[..., Calls], capsys: pytest.CaptureFixture[str]) -> None:
    fake("sparring.demo:demo", TrainingError("loss is nan\nthe batch is in x"))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "sparring: loss is nan the batch is in x\n"
    fake("sparring.demo:demo", KeyboardInterrupt())
    assert cli.main(["demo"]) == 130
    fake("sparring.demo:demo", ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["demo"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m sparring train shared --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage") and not done.stderr


# The process


ENV_MODULE = """
import os, sys
print(os.environ.get("MALLOC_MMAP_THRESHOLD_"), len(sys.argv), file=sys.stderr)
raise SystemExit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator's settings are glibc's")
@pytest.mark.parametrize("way", [["-m", "sparring"], [str(Path(sys.executable).parent / "sparring")]])
def test_a_command_that_computes_starts_once_more_with_the_allocator_set(tmp_path: Path, way: list[str]) -> None:
    (tmp_path / "noisy.py").write_text(ENV_MODULE)
    command = [sys.executable, "-W", "error", *way, "check-env", "noisy:Env"]
    environment = {name: value for name, value in os.environ.items() if name not in cli.ALLOCATOR}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.split() == [str(2**30), "3"] and done.returncode == 7
    environment["MALLOC_MMAP_THRESHOLD_"] = "123456789"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.split() == ["123456789", "3"], "what the user set stays"


@pytest.mark.slow  # it measures time: it wants a machine that does nothing else
def test_starting_once_more_costs_little() -> None:
    """A configuration error shows up after the restart: with and without one, the difference is its cost."""

    def seconds(**extra: str) -> float:
        environment = {name: value for name, value in os.environ.items() if name not in cli.ALLOCATOR} | extra
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "sparring", "demo", "--x"], env=environment, capture_output=True, check=False
            )
            times.append(time.perf_counter() - began)
        return min(times)

    cost = seconds() - seconds(**cli.ALLOCATOR)
    assert cost < 0.05, f"{cost * 1000:.0f} ms"  # measured at 34 ms


# From Python


def test_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, sparring as sp; sp.SharedConfig(ticks=3); sp.train_shared; sp.evaluate; sp.warmup; sp.check_env\n"
        "assert 'torch' not in sys.modules and 'train_shared' in dir(sp)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sp.nothing  # noqa: B018
    assert set(sp.__all__) <= set(dir(sp))


def user_reward(turn: Turn, outcome: Outcome) -> float:
    return 1.0


class UserEnv:
    pass


def test_from_python_settings_are_keywords(fake: Callable[..., Calls]) -> None:
    calls = fake("sparring.loops.shared:train_shared", Report())
    assert (
        sp.train_shared(env="market", model="tiny", ticks=5, gate={"rate": 0.1}, **{"loss.ratio_cap": 3.0}) == Report()
    )
    (config,), keywords = calls.pop()
    assert (config.ticks, config.gate.rate, config.loss.ratio_cap, keywords) == (5, 0.1, 3.0, {"resume": None})
    sp.train_shared(config, ticks=6)
    (changed,), _ = calls.pop()
    assert changed == SharedConfig(ticks=6, gate=config.gate, loss=config.loss)
    sp.train_shared(env=UserEnv, reward=user_reward)
    (config,), _ = calls.pop()
    assert (config.env, config.reward) == (f"{__name__}:UserEnv", f"{__name__}:user_reward")
    with pytest.raises(ConfigError, match="cannot be found by its name"):
        sp.train_shared(reward=lambda turn, outcome: 0.0)
    with pytest.raises(ConfigError, match=r"unknown setting 'tick' \(did you mean 'ticks'\?\)"):
        sp.train_shared(tick=5)
    with pytest.raises(ConfigError, match="expected a SharedConfig, got dict"):
        sp.train_shared({"ticks": 3})  # type: ignore[arg-type]


def test_evaluate_warmup_and_check_env(fake: Callable[..., Calls]) -> None:
    evaluated = fake("sparring.evaluation.evaluate:evaluate_run")
    sp.evaluate(Path("runs/a"), situations=300)
    assert evaluated == [((EvalConfig(run="runs/a", situations=300),), {})]
    warmed = fake("sparring.loops.warmup:warmup")
    sp.warmup(out=Path("models/x"), examples=10)
    assert warmed == [((WarmupConfig(out="models/x", examples=10),), {})]
    made, checked = fake("sparring.envs.load:load_env", "ENV"), fake("sparring.envs.contract:check_env")
    sp.check_env(UserEnv, env_settings={"size": 2})
    assert made == [((f"{__name__}:UserEnv",), {"settings": {"size": 2}})]
    environment = UserEnv()
    sp.check_env(environment)
    assert [arguments for arguments, _ in checked] == [("ENV",), (environment,)]
    assert CheckEnvConfig(env="x") and ExportConfig(source="a", out="b")


PLACES = [
    "sparring.loops.shared:train_shared",
    "sparring.loops.warmup:warmup",
    "sparring.evaluation.evaluate:evaluate_run",
    "sparring.demo:demo",
    "sparring.evaluation.play:play",
    "sparring.runs:load_policy",
    "sparring.models:export",
    "sparring.models:list_models",
    "sparring.models:add_smollm2",
    "sparring.envs.load:load_env",
    "sparring.envs.contract:check_env",
]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_called_is_there(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
