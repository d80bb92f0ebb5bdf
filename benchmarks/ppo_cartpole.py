"""CartPole-v1 by PPO beside stable-baselines3's, seed by seed in turns, with the same hyper-parameters and one thread.

``--setting defaults``: stable-baselines3's own (8 environments, 2,048 steps each, minibatch 64, 10 epochs).
``--setting zoo``: those of rl-baselines3-zoo (100,000 steps; its figure is 500).

Every seed's two runs are a line of ``--store`` (JSON lines): a benchmark that was stopped goes on. The last line of
output is one JSON object: ``ratio`` of environment steps a second, learning included, theirs and ours in CPU time of the
process (what else runs on the machine counts for neither), the same by the clock, steps to a mean of 475, final return.

Usage: python benchmarks/ppo_cartpole.py --setting zoo [--seeds 5] [--steps 100000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, machine, write

import sparring.envs.gymnasium  # noqa: F401  (the rival's imports are not timed either)
from sparring.config import CheckpointSettings, IndependentConfig
from sparring.envs.load_agents import load_array_env
from sparring.learning.settings import PPOSettings
from sparring.loops.independent import train_independent
from sparring.metrics import read_metrics
from sparring.policies.acting import act
from sparring.runs import load_small_policies

DEFAULTS = IndependentConfig(
    env="CartPole-v1", copies=8, rollout=2048, quiet=True, checkpoint=CheckpointSettings(every=10**6)
)
ZOO = replace(
    DEFAULTS, rollout=32,
    ppo=PPOSettings(
        minibatch=256, gae_lambda=0.8, gamma=0.98, epochs=20, learning_rate=1e-3, learning_rate_end=0.0, clip_end=0.0
    ),
)  # fmt: skip


def ours(setting: str, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    import os

    config = replace(ZOO if setting == "zoo" else DEFAULTS, seed=seed, steps=steps, run="bench")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            began, cpu = time.perf_counter(), time.process_time()
            report = train_independent(config)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            rows = read_metrics(Path("runs/bench"))
            final = evaluate(episodes, seed)
        finally:
            os.chdir(before)
    curve = [[row["env_steps"], row["return_recent/agent"]] for row in rows if "return_recent/agent" in row]
    return {
        "env_steps": report.env_steps, "seconds": seconds, "cpu_seconds": cpu_seconds, "final": final, "curve": curve
    }  # fmt: skip


def evaluate(episodes: int, seed: int) -> float:
    """Mean return of the most likely actions, over the first episodes that end, the same number in each copy."""
    weights, _ = load_small_policies("bench")["agent"]
    env = load_array_env("CartPole-v1", 8, seed=1000 + seed)
    env.reset()
    each, running = -(-episodes // 8), np.zeros(8)
    returns: list[list[float]] = [[] for _ in range(8)]
    while min(map(len, returns)) < each:
        actions, _ = act(weights, env.groups[0].observations, None, None)
        env.step([actions])
        running += env.groups[0].rewards[0]
        for copy in np.flatnonzero(env.groups[0].terminated[0] | env.groups[0].truncated[0]).tolist():
            returns[copy].append(float(running[copy]))
            running[copy] = 0.0
    return float(np.mean([value for own in returns for value in own[:each]]))


def theirs(setting: str, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    python = ROOT / ".venv-sb3" / "bin" / "python"
    if not python.is_file():
        raise SystemExit(f"{python} is not there: run `make bench-sb3-venv` first")
    command = [str(python), str(Path(__file__).parent / "rival_sb3.py"), "--seed", str(seed), "--setting", setting]
    command += ["--steps", str(steps), "--episodes", str(episodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def steps_to(run: dict[str, Any], bar: float) -> float:
    """Environment steps until the mean of the last 100 episodes is at least so much; infinite if it never is."""
    return next((step for step, value in run["curve"] if value >= bar), float("inf"))


def interval(differences: list[float], seed: int = 0) -> list[float]:
    """95 % bootstrap interval of the mean of paired differences."""
    rng = np.random.default_rng(seed)
    values = np.array(differences)
    means = rng.choice(values, (4000, len(values))).mean(axis=1)
    return [round(float(q), 3) for q in np.quantile(means, [0.025, 0.975])]


def iqm(values: list[float]) -> float:
    """Mean of the middle half (of all, below four values)."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=["defaults", "zoo"], default="zoo")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--store", type=Path, default=None, help="JSON lines of the runs that are done")
    parser.add_argument("--only-ours", action="store_true")
    chosen = parser.parse_args()
    store = chosen.store or ROOT / "runs" / f"bench-cartpole-{chosen.setting}-{chosen.steps}.jsonl"
    store.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    done = {row["seed"]: row for row in map(json.loads, store.read_text().splitlines())} if store.exists() else {}
    for seed in range(chosen.seeds):
        if seed in done:
            continue
        row: dict[str, Any] = {"seed": seed, "ours": ours(chosen.setting, seed, chosen.steps, chosen.episodes)}
        if not chosen.only_ours:
            row["theirs"] = theirs(chosen.setting, seed, chosen.steps, chosen.episodes)
        for who in ("ours", "theirs"):
            if who in row:
                run = row[who]
                print(
                    f"seed {seed} {who}: {run['env_steps'] / run['cpu_seconds']:.0f} steps/s of CPU, "
                    f"{run['env_steps'] / run['seconds']:.0f} by the clock, to 475: {steps_to(run, 475)}, final {run['final']}",
                    flush=True,
                )
        with store.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done[seed] = row
    rows = [done[seed] for seed in sorted(done)][: chosen.seeds]
    result: dict[str, Any] = {"name": f"ppo_cartpole {chosen.setting}", "n": len(rows), "steps": chosen.steps}
    sides = ["ours"] if chosen.only_ours else ["ours", "theirs"]
    for side in sides:
        runs = [row[side] for row in rows]
        result[side] = {
            "steps_per_cpu_second": round(iqm([r["env_steps"] / r["cpu_seconds"] for r in runs]), 1),
            "steps_per_second": round(iqm([r["env_steps"] / r["seconds"] for r in runs]), 1),
            "steps_to_475": [step if (step := steps_to(r, 475)) < float("inf") else None for r in runs],
            "final": [r["final"] for r in runs],
            "final_iqm": round(iqm([r["final"] for r in runs]), 2),
        }  # fmt: skip
    if not chosen.only_ours:
        for key, name in (("cpu_seconds", "ratio"), ("seconds", "ratio_by_the_clock")):
            pairs = [
                (row["ours"]["env_steps"] / row["ours"][key]) / (row["theirs"]["env_steps"] / row["theirs"][key])
                for row in rows
            ]
            result[name] = round(iqm(pairs), 3)
            result[f"{name}_each"] = [round(pair, 3) for pair in pairs]
        result["final_difference"] = interval([row["ours"]["final"] - row["theirs"]["final"] for row in rows])
        # A run that never got there counts as having needed all of its steps.
        capped = [[min(steps_to(row[side], 475), chosen.steps) for side in ("ours", "theirs")] for row in rows]
        result["steps_to_475_difference"] = interval([float(a - b) for a, b in capped])
        result["versions_theirs"] = rows[0]["theirs"]["versions"]
    result["versions"] = machine("torch", "gymnasium", "numpy")
    write(result)


if __name__ == "__main__":
    from sparring.cli import restart_with_allocator

    restart_with_allocator()
    main()
