"""The contract of ``tests/contract_openai.py``, kept by our own server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract_openai import *  # noqa: F403
from contract_openai import Server
from sparring import models
from sparring.policies.causal_lm import LoraSettings
from sparring.policies.contract import ScoreRow


def save_adapters(root: Path, count: int = 2) -> dict[str, Path]:
    """LoRA adapters of ``tiny``, different from the base and from each other."""
    policy = models.load("tiny", lora=LoraSettings(rank=4))
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        policy.load_state(
            {name: 0.05 * torch.randn(value.shape, generator=generator) for name, value in policy.state().items()}
        )
        policy.save_adapter(root / f"a{number}")
    return {f"a{number}": Path(f"a{number}") for number in range(count)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("adapters")
    adapters = save_adapters(root)
    command = [sys.executable, "-m", "sparring", "serve", "model", "tiny", "--port", "0", "--threads", "1"]
    command += ["--adapter-root", str(root), "--token-variable", "CONTRACT_TOKEN"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CONTRACT_TOKEN": "s3cret"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    policy = models.load("tiny", training=False)

    def scored(prompt: Sequence[int], reply: Sequence[int], temperature: float) -> list[float]:
        row = ScoreRow(token_ids=(*prompt, *reply), positions=tuple(range(len(prompt), len(prompt) + len(reply))))
        with torch.no_grad():
            return policy.log_probs([row], temperature=temperature).tolist()

    yield Server(
        base_url=found[0], model="policy", api_key="s3cret", scored=scored, adapters=adapters, versions=True,
        exact_in_company=True,
    )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) in (0, -signal.SIGTERM)  # uvicorn stops in order, and then as the signal says
    process.stdout.close()
