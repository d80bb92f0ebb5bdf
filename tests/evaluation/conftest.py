"""One thread, and a working folder of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``runs/`` below it."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
