"""Self-play with the embedded model on three seeds, judged on held-out graphs: chats of careless players, a supervised
start, a run a seed, all figures pooled by task. Writes its table into docs/benchmarks.md.

What is there already (runs/selfplay-start, runs/selfplay-seed-N with a report) is not made again, so that a stopped
benchmark goes on where it was. The settings were chosen on seed 100 with 300 tasks of the same held-out panel.

Usage: python benchmarks/selfplay_seeds.py [--seeds 3] [--tasks 400] [--threads 2]
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import document, machine, write

from sparring.config import EvalConfig, WarmupConfig, from_settings
from sparring.config import SelfplayConfig as Config
from sparring.evaluation.graph_panel import GraphEval, evaluate_seeds
from sparring.loops.selfplay import train_selfplay
from sparring.loops.warmup import warmup

HERE = Path(__file__).parent
START, CHATS = Path("runs/selfplay-start"), Path("runs/selfplay-chats.jsonl")
PLAYERS = ("base", "cloned", "trained", "second_edge", "random", "majority", "solver")


def settings(seed: int, threads: int) -> Config:
    return from_settings(Config, {
        "model": str(START), "topology": "dual", "rounds": 3, "generator_steps": 16, "answerer_steps": 40,
        "generator_prompts": 12, "answerer_tasks": 16, "opponents": 1, "seed": seed, "eval_tasks": 0, "threads": threads,
        "optimizer": {"learning_rate": 5e-4, "decay_steps": 130}, "run": f"selfplay-seed-{seed}",
    })  # fmt: skip


def start(threads: int) -> None:
    """The warmed-up model."""
    if START.is_dir():
        return
    CHATS.parent.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, str(HERE.parent / "recipes" / "graph_chats.py"), "--count", "24000", "--generator-share", "0.6",
         "--out", str(CHATS)], check=True,
    )  # fmt: skip
    warmup(WarmupConfig(
        model="tiny", chats=CHATS, examples=24000, batch_size=32, learning_rate=2e-3, out=str(START), threads=threads
    ))  # fmt: skip


def table(found: list[GraphEval], pooled: GraphEval, seconds: list[float], fallbacks: list[int]) -> str:
    head = (
        "| | "
        + " | ".join(f"seed {n}" for n in range(len(found)))
        + " | pooled |\n"
        + "|---" * (len(found) + 2)
        + "|\n"
    )

    def cell(value: float, low: float, high: float) -> str:
        return f"{value:.3f} ({low:.3f} to {high:.3f})"

    lines = []
    for name in PLAYERS:
        cells = [cell(e.value, e.low, e.high) for e in (one.accuracy[name] for one in (*found, pooled))]
        lines.append(f"| accuracy, {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    for name in pooled.gains:
        cells = [cell(e.value, e.low, e.high) for e in (one.gains[name] for one in (*found, pooled))]
        lines.append(f"| trained minus {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    for name in ("start", "end"):
        cells = [cell(e.value, e.low, e.high) for e in (one.valid_rate[name] for one in (*found, pooled))]
        lines.append(f"| generator's valid rate, {name} | " + " | ".join(cells) + " |")
    cells = [cell(e.value, e.low, e.high) for e in (one.valid_rate_gain for one in (*found, pooled))]
    lines.append("| valid rate, gain | " + " | ".join(cells) + " |")
    lines.append("| minutes of training | " + " | ".join(f"{s / 60:.1f}" for s in seconds) + " | |")
    lines.append("| tasks made up for | " + " | ".join(map(str, fallbacks)) + " | |")
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    start(chosen.threads)
    seconds, fallbacks, evaluated = [], [], []
    for seed in range(chosen.seeds):
        run = Path("runs") / f"selfplay-seed-{seed}"
        if not (run / "report.json").exists():
            train_selfplay(settings(seed, chosen.threads), resume=run if run.exists() else None)
        report = json.loads((run / "report.json").read_text())
        seconds.append(report["seconds"])
        fallbacks.append(report["fallbacks"])
        evaluated.append(EvalConfig(run=str(run), situations=chosen.tasks, seed=0, threads=chosen.threads))
    found, pooled = evaluate_seeds(evaluated)
    page = (
        f"{chosen.seeds} seeds, {chosen.tasks} held-out tasks each (the same ones), 95 % bootstrap intervals by task.\n\n"
        f"{table(found, pooled, seconds, fallbacks)}"
    )
    document("selfplay_seeds", page)
    flat = pooled.flat() | {"fallbacks": sum(fallbacks), "seeds": chosen.seeds}
    write({
        "name": "selfplay_seeds", **flat, "per_seed": [one.flat() for one in found],
        "versions": machine("torch", "transformers"),
    })  # fmt: skip


if __name__ == "__main__":
    main()
