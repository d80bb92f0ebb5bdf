"""Real servers in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``sparring serve ...`` on a free port, and returns the process and its address."""
    yield from _starting(tmp_path)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same for all tests of a module."""
    yield from _starting(tmp_path_factory.mktemp("served"))


def _starting(place: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparring", "serve", *words, "--port", "0"], stdout=subprocess.PIPE, text=True,
            cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://" in line, line
        return process, line.rsplit(" ", 1)[1].strip()

    yield begin
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
