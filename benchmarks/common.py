"""What the benchmarks share: medians with their spread, versions, a model with prompts of given lengths."""

from __future__ import annotations

import json
import platform
import random
import resource
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RIVALS = ROOT / ".venv-bench"
"""The environment of the tools that we measure against: ``make bench-venv``."""


def summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median, least and greatest of repeated measurements.

    >>> summary([3.0, 1.0, 2.0])["median"]
    2.0
    """
    return {
        "median": round(statistics.median(seconds), 4),
        "least": round(min(seconds), 4),
        "greatest": round(max(seconds), 4),
        "n": len(seconds),
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float | int]:
    """How many times faster we are: the ratio of the medians, and the least and greatest of the paired ratios."""
    pairs = [t / o for t, o in zip(theirs, ours, strict=True)]
    return {
        "value": round(statistics.median(theirs) / statistics.median(ours), 3),
        "least": round(min(pairs), 3),
        "greatest": round(max(pairs), 3),
        "n": len(pairs),
    }


def peak_rss() -> int:
    """Bytes of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine(*packages: str) -> dict[str, str | int]:
    import torch

    return {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in packages},
    }


def write(result: dict[str, Any]) -> None:
    """The last line of a benchmark."""
    print(json.dumps(result), flush=True)


def document(name: str, text: str) -> None:
    """Put ``text`` in the place of this name in docs/benchmarks.md, between its two marks."""
    page = ROOT / "docs" / "benchmarks.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for {name!r}: add the lines <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")


def token_words(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Random ids, none of the first thousand (special tokens and single bytes)."""
    return tuple(rng.randrange(1000, vocabulary) for _ in range(count))


class Rival:
    """A tool in another environment, asked over its standard input; it answers with a line of JSON each time."""

    def __init__(self, script: str, *arguments: str) -> None:
        python = RIVALS / "bin" / "python"
        if not python.is_file():
            raise SystemExit(f"{python} is not there: run `make bench-venv` first")
        self.process = subprocess.Popen(
            [str(python), str(Path(__file__).parent / script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.about = self.answer()

    def ask(self, what: str = "go") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"the other tool ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
