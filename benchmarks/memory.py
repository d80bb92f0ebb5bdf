"""Peak memory of a GRPO step and of a market tick, ours beside the others', each in a process of its own.

Usage: python benchmarks/memory.py [--prompt 300] [--new 48] [--group 8]
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import Rival, document, machine, write

HERE = Path(__file__).parent


def ours(script: str, *arguments: str) -> int:
    """Bytes that one of our benchmarks held at most, without its rival."""
    command = [sys.executable, str(HERE / script), *arguments, "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["peak_rss"])


def trl(model: str, lengths: argparse.Namespace) -> int:
    rival = Rival(
        "rival_trl.py", "--model", model, "--prompt", str(lengths.prompt), "--new", str(lengths.new), "--group",
        str(lengths.group), "--threads", str(lengths.threads),
    )  # fmt: skip
    try:
        rival.ask()
        return int(rival.ask()["peak_rss"])
    finally:
        rival.close()


def main() -> None:
    from sparring import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    lengths = [f"--{name}={getattr(chosen, name)}" for name in ("model", "prompt", "new", "group", "threads")]
    tick = [f"--model={chosen.model}", f"--threads={chosen.threads}"]
    step = f"GRPO step {chosen.prompt}/{chosen.new}/{chosen.group}"
    found: dict[str, dict[str, int]] = {
        step: {"ours": ours("grpo_step.py", *lengths, "--only-ours"), "theirs": trl(models.resolve(chosen.model), chosen)},
        "tick of 30 agents, gate 0.03": {
            "ours": ours("market_tick.py", *tick, "--only", "ours"), "theirs": ours("market_tick.py", *tick, "--only", "rows"),
        },
        "tick of 30 agents, gate off": {
            "ours": ours("market_tick.py", *tick, "--gate", "off", "--only", "ours"),
            "theirs": ours("market_tick.py", *tick, "--gate", "off", "--only", "rows"),
        },
    }  # fmt: skip
    lines = ["| | ours, GiB | theirs, GiB | share |", "|---|---|---|---|"]
    for name, row in found.items():
        share = row["ours"] / row["theirs"]
        lines.append(f"| {name} | {row['ours'] / 2**30:.2f} | {row['theirs'] / 2**30:.2f} | {share:.2f} |")
    document(
        "memory", "\n".join([*lines, "", "Theirs: TRL for the step, our own implementation by rows for the ticks."])
    )
    result: dict[str, Any] = {"name": "memory", "peak_rss": found, "versions": machine("torch", "transformers")}
    write(result)


if __name__ == "__main__":
    main()
