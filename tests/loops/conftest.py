"""One random model for all tests of the loops, one thread, and a working folder of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loop_toys import random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``runs/`` below it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
