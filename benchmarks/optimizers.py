"""AdamW (torch's, fused), APOLLO and APOLLO-Mini on one model and one text: bytes of state, loss curve, time of a step.

The embedded model learns English prose (the Python reference that every Python carries), supervised, from the same weights, on
the same batches in the same order. They take turns step by step, so that the machine's noise falls on all of them.

Usage: python benchmarks/optimizers.py [--steps 150] [--batch 8] [--length 128] [--docs]
``--docs`` writes docs/optimizers.md. The last line is one JSON object; ``ratio`` is AdamW's state over each one's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from common import machine, write

from sparring import models
from sparring.learning.optimizers import NamedOptimizer, optimizer_state
from sparring.learning.settings import OptimizerSettings
from sparring.learning.step import supervised_step
from sparring.policies.contract import ScoreRow

DOCS = Path(__file__).parent.parent / "docs"
KINDS = {
    "adamw": OptimizerSettings(kind="adamw", learning_rate=1e-3),
    "apollo": OptimizerSettings(kind="apollo", learning_rate=3e-3, rank=32, scale=1.0, scaling="channel"),
    "apollo_mini": OptimizerSettings(kind="apollo", learning_rate=1e-3, rank=1, scale=128.0, scaling="tensor"),
}


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(chosen.threads)
    policies = {name: models.load(chosen.model, name="shared") for name in KINDS}
    optimizers = {
        name: NamedOptimizer(policies[name].trainable_parameters(), policies[name].matrix_names(), settings, seed=0)
        for name, settings in KINDS.items()
    }
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = policies["adamw"].chat.tokenizer(text[:400_000], add_special_tokens=False)["input_ids"]
    rng = random.Random(0)
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for step in range(chosen.steps):
        starts = [rng.randrange(len(ids) - chosen.length) for _ in range(chosen.batch)]
        rows = [
            ScoreRow(token_ids=tuple(ids[s : s + chosen.length]), positions=tuple(range(1, chosen.length)))
            for s in starts
        ]
        for name, policy in policies.items():
            report = supervised_step(policy, rows, optimizers[name], bad_batch_dir=Path(tempfile.gettempdir()))
            losses[name].append(report.loss)
            seconds[name].append(report.seconds)
        if (step + 1) % 25 == 0:
            print(
                f"step {step + 1}: " + ", ".join(f"{n} {statistics.mean(v[-10:]):.3f}" for n, v in losses.items()),
                flush=True,
            )
    rows_by_kind = {}
    for name, optimizer in optimizers.items():
        tensors, _ = optimizer_state(optimizer)
        matrices = set(policies[name].matrix_names())
        in_matrices = sum(t.nbytes for key, t in tensors.items() if key.rpartition("/")[0] in matrices)
        rows_by_kind[name] = {
            "state_bytes": sum(t.nbytes for t in tensors.values()),
            "state_bytes_of_matrices": in_matrices,
            "loss": {str(i): statistics.mean(losses[name][max(0, i - 10) : i]) for i in _marks(chosen.steps)},
            "ms_per_step": 1000.0 * statistics.median(seconds[name]),
            "learning_rate": KINDS[name].learning_rate, "rank": KINDS[name].rank if name != "adamw" else None,
        }  # fmt: skip
    adamw = rows_by_kind["adamw"]
    return {
        "name": "optimizers",
        "ratio": {
            n: round(adamw["state_bytes"] / r["state_bytes"], 2) for n, r in rows_by_kind.items() if n != "adamw"
        },
        "ours": {name: row for name, row in rows_by_kind.items() if name != "adamw"},
        "theirs": {"adamw": adamw},
        "n": chosen.steps,
        "settings": {k: getattr(chosen, k) for k in ("model", "steps", "batch", "length", "threads")},
        "versions": machine("torch", "transformers"),
    }


def _marks(steps: int) -> list[int]:
    return sorted({max(1, steps * part // 5) for part in range(1, 6)})


def document(found: dict[str, Any]) -> str:
    about, rows = found["settings"], {**found["theirs"], **found["ours"]}
    marks = list(rows["adamw"]["loss"])
    lines = [
        f"| {name} | {row['rank'] or ''} | {row['state_bytes']:,} | {row['state_bytes_of_matrices']:,} | "
        + " | ".join(f"{row['loss'][mark]:.3f}" for mark in marks)
        + f" | {row['ms_per_step']:.0f} |"
        for name, row in rows.items()
    ]
    return (
        "# Optimisers\n\n"
        f"Made by `python benchmarks/optimizers.py --steps {about['steps']} --batch {about['batch']} --length {about['length']} "
        f"--docs`: the model `{about['model']}` on English prose, the same batches for all; loss in nats a token, mean of the "
        "ten steps up to the one named. Embeddings, output layer and norms get full Adam in all of them.\n\n"
        "| optimiser | rank | state, bytes | of the matrices | "
        + " | ".join(f"loss, step {m}" for m in marks)
        + " | ms a step |\n"
        "|---|---|---|---|" + "---|" * len(marks) + "---|\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="write docs/optimizers.md")
    chosen = parser.parse_args()
    found = measure(chosen)
    if chosen.docs:
        (DOCS / "optimizers.md").write_text(document(found), encoding="utf-8")
    write(found)


if __name__ == "__main__":
    main()
