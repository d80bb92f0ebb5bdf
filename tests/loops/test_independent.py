"""Independent, shared and centralised PPO: they learn, repeat, resume to the bit after SIGKILL, and export what they are."""

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

import numpy as np
import pytest
import torch

from sparring.checkpoints import latest, read_checkpoint
from sparring.cli import main
from sparring.config import IndependentConfig, to_toml
from sparring.errors import ConfigError
from sparring.learning import ppo_update
from sparring.loops.independent import IndependentReport, train_independent
from sparring.metrics import read_metrics
from sparring.settings_io import from_settings

HERE = Path(__file__).parent
TIMES = ("seconds", "collect_seconds")
SMALL: dict[str, Any] = {
    "env": "agent_toys:Match", "steps": 1600, "copies": 4, "rollout": 20, "net": {"hidden": (16,)}, "quiet": True,
    "ppo": {"minibatch": 20, "epochs": 4, "learning_rate": 1e-2}, "checkpoint": {"every": 1000},
}  # fmt: skip


def small(**settings: Any) -> IndependentConfig:
    merged = dict(SMALL)
    for name, value in settings.items():
        merged[name] = {**merged[name], **value} if isinstance(value, dict) and name in merged else value
    return from_settings(IndependentConfig, merged)


def train(config: IndependentConfig, name: str, *, resume: bool = False) -> IndependentReport:
    return train_independent(replace(config, run=name), resume=Path("runs") / name if resume else None)


def assert_same_run(one: str, two: str) -> None:
    """Tensors, documents and metrics to the bit; times apart."""
    first, second = (read_checkpoint(latest(Path("runs") / name / "checkpoints") or Path()) for name in (one, two))
    assert first.manifest.step == second.manifest.step and first.tensors.keys() == second.tensors.keys()
    for file, tensors in first.tensors.items():
        assert tensors.keys() == second.tensors[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.tensors[file][name]), (file, name)
    states = [json.loads(each.documents["state.json"]) for each in (first, second)]
    for state in states:  # incarnations count starts
        state["carried"] = [{lane: v[1] for lane, v in lanes.items()} for lanes in state["carried"]]
    assert states[0] == states[1]
    rows = [
        [{n: v for n, v in row.items() if n not in TIMES} for row in read_metrics(Path("runs") / name)]
        for name in (one, two)
    ]
    assert rows[0] == rows[1] and rows[0]


def test_it_learns_what_is_to_be_learned() -> None:
    """stable-baselines3's identity test: nine of ten signs named rightly after 1,600 steps; chance is a third."""
    report = train(small(), "a")
    assert report.return_mean["agent"] / 8 > 0.9
    assert report.env_steps == 1600 and report.updates == {"agent": 20} and report.failed_updates == {"agent": 0}
    assert report.submissions["agent/ready"] == 20 and report.submissions["agent/accepted"] == 60


@pytest.mark.parametrize("algorithm", ["ippo", "mappo", "reinforce"])
def test_agents_of_all_kinds_learn_side_by_side(algorithm: str) -> None:
    """Three kinds of spaces, masks, numbers, one that dies, one that joins, one that takes every other turn: nothing
    stalls, and everybody who can learn does (traps 1, 4, 5, 8)."""
    steps, rate = (8_000, 1e-2) if algorithm == "reinforce" else (4_000, 5e-3)
    config = small(env="agent_toys:Crowd", algorithm=algorithm, steps=steps, rollout=30, ppo={"learning_rate": rate})
    report = train(config, "crowd")
    assert set(report.updates) == set("abcd") and min(report.updates.values()) == report.iterations
    assert report.return_mean["a"] > 7.5  # of 9; chance with one of three forbidden is 4.5
    assert report.return_mean["c"] > -1.5 and report.return_mean["d"] == pytest.approx(2.25)
    row = read_metrics(Path("runs/crowd"))[-1]
    for name in "abcd":  # a curve for each
        assert {f"{n}/{name}" for n in ("return_mean", "policy_loss", "kl", "entropy", "passes")} <= set(row)
    assert row["length_mean/b"] < row["length_mean/a"] == 9.0  # type: ignore[operator]


def test_agents_alike_may_share_a_policy() -> None:
    report = train(small(env="agent_toys:Crowd", share="spaces", steps=2_000), "shared")
    assert set(report.updates) == {"like-a", "like-c", "like-d"}
    report = train(small(env="agent_toys:Crowd", policies={"a": "team", "b": "team"}, steps=400), "mapped")
    assert set(report.updates) == {"team", "c", "d"}
    with pytest.raises(ConfigError, match=r"policies\.zed"):
        train(small(policies={"zed": "x"}), "zed")


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"ppo": {"normalize_observations": True, "normalize_values": True, "target_kl": 0.01}},
    "crowd": {"env": "agent_toys:Crowd"},
    "mappo": {"env": "agent_toys:Crowd", "algorithm": "mappo", "share": "spaces"},
    "state": {"env": "agent_toys:Crowd", "algorithm": "mappo", "critic": "state"},
    "waits": {"env": "agent_toys:Crowd", "ready": {"min_steps": 170}, "ppo": {"max_version_lag": 3, "correction": "vtrace"}},
    "overlap": {"overlap": True},
    "duel": {"env": "agent_toys:Duel", "opponents": {"share": 0.5, "every": 2, "keep": 3}},
    "cartpole": {"env": "CartPole-v1"},
    "turns": {"env": "pettingzoo:mpe2.simple_spread_v3#aec", "copies": 2},
}  # fmt: skip


@pytest.mark.parametrize("way", list(WAYS))
def test_resuming_is_never_having_stopped(way: str) -> None:
    """Trap 32: weights, moments, statistics, chance, versions, open paths and episodes, opponents, what waits."""
    config = small(**WAYS[way], checkpoint={"every": 3})
    per_iteration = config.rollout * config.copies
    train(replace(config, steps=8 * per_iteration), "straight")
    # What was learned may depend on the length of the run (schedules): none is set here.
    train(replace(config, steps=8 * per_iteration), "stopped")
    for step in (6, 8, 9):
        broken = Path("runs/stopped/checkpoints") / f"step-{step:06d}"
        if broken.exists() and step > 3:
            import shutil

            shutil.rmtree(broken)
    report = train(replace(config, steps=8 * per_iteration), "stopped", resume=True)
    assert report.iterations == 8 and report.notices == ()
    assert_same_run("straight", "stopped")


def test_killed_at_random_moments() -> None:
    """SIGKILL, whenever it comes; then on from the newest checkpoint."""
    config = small(env="agent_toys:Crowd", checkpoint={"every": 1, "keep": 2}, steps=1200)
    Path("c.toml").write_text(to_toml(replace(config, run="killed")))
    code = (
        "import sys; from pathlib import Path; from sparring.config import *; "
        "from sparring.loops.independent import train_independent as t\n"
        "c = load_config(IndependentConfig, toml=Path('c.toml')); r = Path('runs/killed')\n"
        "import os, random, signal, time\n"
        "rng, kills = random.Random(0), 0\n"
        "while True:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            t(c, resume=r if (r / 'config.toml').is_file() else None); os._exit(0)\n"
        "        except BaseException as e:\n"
        "            print(repr(e), file=sys.stderr, flush=True); os._exit(1)\n"
        "    if kills < 6:\n"
        "        time.sleep(rng.uniform(0.05, 0.4)); os.kill(pid, signal.SIGKILL)\n"
        "    _, status = os.waitpid(pid, 0)\n"
        "    if os.WIFEXITED(status): sys.exit(os.WEXITSTATUS(status) or (0 if kills else 3))\n"
        "    kills += 1\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    train(config, "straight")
    assert_same_run("straight", "killed")


def test_a_signal_saves_and_the_run_goes_on() -> None:
    config = small(steps=10_000_000, checkpoint={"every": 1_000_000})
    Path("told.toml").write_text(to_toml(replace(config, run="told")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "sparring", "train", "independent", "--json", "--config", "told.toml"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        rows = Path("runs/told/metrics.jsonl")
        for _ in range(600):
            if rows.is_file() and rows.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    report = json.loads(output.splitlines()[-1])
    assert report["stopped"] is True and report["env_steps"] < 10_000_000
    longer = replace(config, steps=report["env_steps"] + 160)
    assert train(longer, "told", resume=True).iterations == report["iterations"] + 2


def test_an_overlapped_run_learns_from_data_one_update_old() -> None:
    report = train(small(overlap=True), "o")
    rows = read_metrics(Path("runs/o"))
    assert rows[5]["version_lag/agent"] == 1.0 and report.return_mean["agent"] / 8 > 0.8
    assert read_metrics(Path("runs/o"))[0].get("version_lag/agent") is None  # nothing was ready yet
    with pytest.raises(ConfigError, match="overlap is true"):
        small(overlap=True, ppo={"max_version_lag": 0})


def test_a_vector_environment_of_gymnasiums_own() -> None:
    report = train(small(env="CartPole-v1", vector=True, steps=2_000), "v")
    assert report.return_mean["agent"] > 15 and report.notices == ()
    again = train(small(env="CartPole-v1", vector=True, steps=2_400), "v", resume=True)
    assert "open episodes begin anew" in again.notices[0]


def test_past_policies_play_and_are_not_trained() -> None:
    """In half of the duels one of the two is a past policy: a quarter of all seats gives nothing to learn."""
    config = small(env="agent_toys:Duel", opponents={"share": 0.5, "every": 1}, steps=4_000)
    report = train(config, "d")
    rows = read_metrics(Path("runs/d"))
    share = sum(float(row[f"steps/{n}"]) for row in rows for n in ("one", "two")) / (2 * report.env_steps)  # type: ignore[arg-type]
    assert share == pytest.approx(0.75, abs=0.03)
    assert sum(report.episodes.values()) == 2 * report.env_steps
    with pytest.raises(ConfigError, match=r"opponents\.share"):
        train(small(opponents={"share": 0.5}), "one-agent")


def test_a_learner_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ppo_update._credit

    def poisoned(learner: Any, *rest: Any) -> Any:
        credit = real(learner, *rest)
        if "a" in learner.policies.names and learner.versions[0].step == 2:
            credit.advantages[0] = np.nan
        return credit

    monkeypatch.setattr(ppo_update, "_credit", poisoned)
    report = train(small(env="agent_toys:Crowd", steps=800), "f")
    assert report.failed_updates == {"a": report.iterations - 2, "b": 0, "c": 0, "d": 0}
    assert report.updates["a"] == 2 and report.updates["b"] == report.iterations


@pytest.mark.parametrize(
    ("env", "ppo"),
    [
        ("agent_toys:Crowd", {"normalize_observations": True}),
        ("Pendulum-v1", {"normalize_observations": True}),
    ],
)
def test_exports_say_what_the_policies_say(env: str, ppo: dict[str, Any]) -> None:
    """Traps 6, 21, 33 and 37: every agent's, of its own activation, normaliser and mask inside, compared after writing;
    hot reload by version."""
    from sparring.policies.acting import act, for_environment
    from sparring.policies.onnx_policy import OnnxPolicy
    from sparring.runs import load_small_policies

    pendulum = env == "Pendulum-v1"
    net = {"squash": pendulum, "activation": "tanh" if pendulum else "relu"}
    train(small(env=env, ppo=ppo, steps=400, net=net), "e")
    assert main(["export", "e", "--format", "onnx", "--out", "out"]) == 0
    policies = load_small_policies("e")
    assert {path.stem for path in Path("out").iterdir()} == set(policies)
    rng = np.random.default_rng(0)
    for name, (weights, row) in policies.items():
        loaded = OnnxPolicy(Path("out") / f"{name}.onnx")
        seen = rng.normal(size=(50, weights.spaces.observation_size)).astype(np.float32)
        actions, _ = act(weights.rows(np.array([row])), seen[None], None, None)
        np.testing.assert_allclose(loaded.run(seen).action, for_environment(weights, actions)[0], atol=1e-4)
        assert loaded.version == str(weights.versions[row]) and weights.mean is not None
    if pendulum:
        return
    path = Path("out/a.onnx")
    loaded, old = OnnxPolicy(path), OnnxPolicy(path).version
    assert loaded.reload() is False
    train(small(env=env, ppo=ppo, steps=800, net=net), "e", resume=True)
    main(["export", "e", "--format", "onnx", "--policy", "a", "--out", "newer"])
    os.replace("newer/a.onnx", path)
    assert loaded.version == old and loaded.reload() is True and loaded.version != old
    path.write_bytes(b"no model")
    from sparring.errors import ModelError

    newest = loaded.version
    with pytest.raises(ModelError, match="cannot be loaded as ONNX"):
        loaded.reload()
    assert loaded.version == newest and loaded.run(np.zeros((1, 3), np.float32)).version == newest


def test_an_export_that_says_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparring.errors import ModelError
    from sparring.policies import onnx_policy
    from sparring.runs import load_small_policies

    train(small(steps=160), "e")
    weights, row = load_small_policies("e")["agent"]
    other = replace(weights, head=(weights.head[0], weights.head[1] + np.array([[[1.0, 0.0, 0.0]]], np.float32)))
    real = onnx_policy._model
    monkeypatch.setattr(onnx_policy, "_model", lambda _: real(other))
    with pytest.raises(ModelError, match="says something else"):
        onnx_policy.export(tmp_path / "x.onnx", weights, row)
    assert not any(path.suffix == ".onnx" or path.name.startswith(".tmp") for path in tmp_path.iterdir())


def test_the_same_from_python_and_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    import sparring as sp

    Path("c.toml").write_text(to_toml(small(steps=160)))
    assert main(["train", "independent", "--config", "c.toml", "--run", "cli", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = sp.train_independent(small(steps=160), run="python")
    assert shown["return_mean"] == report.return_mean and shown["iterations"] == 2
    assert_same_run("cli", "python")
    assert main(["train", "independent", "--env", "Nope-v1", "--run", "x"]) == 2
    assert "Gymnasium cannot make it" in capsys.readouterr().err
    assert not Path("runs/x").exists()
