"""Adapter swaps under load: a model server in a process of its own, clients that never stop asking, and the latency of
what they ask with and without swaps, in alternating stretches.

A swap is what a trainer does: load the next version under its own name, send new requests there, unload the old one,
which finishes what it began. That no reply comes from two versions is checked three ways: by the model's name, by
``policy_version``, and by scoring replies anew with the adapter that they should come from (every token's log-prob).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from common import machine, write

from sparring import models
from sparring.policies.causal_lm import CausalLM, LoraSettings
from sparring.policies.contract import ScoreRow

FILES = 4
"""Different adapters, in turn: neighbouring versions never have the same weights."""
RULES = "You are a trader in a market of many. Be brief, name a price, and never pay whom you do not know. " * 3


def save_adapters(root: Path) -> None:
    policy = models.load("tiny", lora=LoraSettings(rank=8))
    for number in range(FILES):
        generator = torch.Generator().manual_seed(number)
        state = {name: 0.03 * torch.randn(value.shape, generator=generator) for name, value in policy.state().items()}
        policy.load_state(state)
        policy.save_adapter(root / f"a{number}")


class Load:
    """Clients that ask one after the other for the newest version, until they are stopped."""

    def __init__(self, url: str, clients: int, new_tokens: int) -> None:
        self.url, self.new_tokens = url, new_tokens
        self.newest = ""
        self.phase = "warm"
        self.seconds: dict[str, list[float]] = {"warm": [], "without": [], "with": []}
        self.failed: list[str] = []
        self.mixed: list[str] = []
        self.replies: list[tuple[int, dict[str, Any]]] = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=600.0) as client:
            while not self.over.is_set():
                name, phase = self.newest, self.phase
                body = {
                    "model": name, "max_tokens": self.new_tokens, "logprobs": True,
                    "messages": [{"role": "system", "content": RULES},
                                 {"role": "user", "content": f"I am {number}. Offer {rng.randrange(1000)}?"}],
                }  # fmt: skip
                started = time.perf_counter()
                try:
                    found = client.post("/v1/chat/completions", json=body)
                except httpx.HTTPError as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    continue
                if found.status_code == 404 and name != self.newest:
                    # Unloaded between our reading of the name and the request: the caller's race, counted as a failure.
                    self.failed.append(f"{name} was unloaded before it was asked")
                    continue
                if found.status_code != 200:
                    self.failed.append(found.text[:200])
                    continue
                if phase == self.phase:
                    self.seconds[phase].append(time.perf_counter() - started)
                content = found.json()
                version = int(name.rpartition("-")[2])
                if content["model"] != name or content["policy_version"] != f"v1.{version}":
                    self.mixed.append(f"{name} was answered by {content['model']}, {content['policy_version']}")
                self.replies.append((version, content))


def swap(client: httpx.Client, load: Load, version: int, grace: float) -> float:
    """The next version into service, the old one out of it; returns the seconds of loading."""
    before, name = load.newest, f"policy-v1-{version}"
    started = time.perf_counter()
    client.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": f"a{version % FILES}"}
    ).raise_for_status()
    took = time.perf_counter() - started
    load.newest = name
    if before:
        time.sleep(grace)  # who has read the old name has asked by now
        client.post("/v1/unload_lora_adapter", json={"lora_name": before}).raise_for_status()
    return took


def rescored(policy: CausalLM, root: Path, load: Load, most: int) -> tuple[int, float]:
    """Replies scored anew with the adapter they should come from: how many, and the worst |ratio - 1| of a token."""
    worst = 0.0
    chosen = random.Random(0).sample(load.replies, min(most, len(load.replies)))
    for number in range(FILES):
        adapter = policy.load_adapter(f"check{number}", root / f"a{number}")
        for version, content in chosen:
            if version % FILES != number:
                continue
            choice, prompt = content["choices"][0], content["prompt_token_ids"]
            said = [row["logprob"] for row in choice["logprobs"]["content"]]
            positions = tuple(range(len(prompt), len(prompt) + len(said)))
            with torch.no_grad():
                row = ScoreRow(token_ids=(*prompt, *choice["token_ids"]), positions=positions)
                scored = adapter.log_probs([row], temperature=1.0).tolist()
            worst = max(worst, *(abs(math.exp(a - b) - 1) for a, b in zip(scored, said, strict=True)))
    return len(chosen), worst


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--every", type=float, default=0.4, help="seconds between two swaps")
    parser.add_argument("--stretches", type=int, default=5, help="alternating stretches of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_adapters(root)
        command = [sys.executable, "-m", "sparring", "serve", "model", "tiny", "--port", "0", "--adapter-root", folder]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [*command, "--threads", "1"], stdout=subprocess.PIPE, text=True, env=environment
        ) as server:
            try:
                assert server.stdout is not None
                found = re.search(r"http://\S+", server.stdout.readline())
                assert found is not None
                result = measure(found[0], root, arguments)
            finally:
                server.terminate()
    write(result)
    if result["failed"] or result["mixed"] or result["ratio"] > 2.0 or result["worst_ratio_of_a_token"] > 1e-3:
        raise SystemExit(1)


def measure(url: str, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    load, version, loading = Load(url, arguments.clients, arguments.new_tokens), 1, list[float]()  # v1-0: the base
    with httpx.Client(base_url=url, timeout=600.0) as client:
        swap(client, load, version, 0.0)
        for thread in load.threads:
            thread.start()
        time.sleep(3.0)
        a_stretch = arguments.swaps // arguments.stretches
        for _ in range(arguments.stretches):
            load.phase = "without"
            time.sleep(a_stretch * arguments.every)
            load.phase = "with"
            for _ in range(a_stretch):
                started = time.perf_counter()
                version += 1
                loading.append(swap(client, load, version, arguments.every / 2))
                time.sleep(max(0.0, arguments.every - (time.perf_counter() - started)))
        load.over.set()
        for thread in load.threads:
            thread.join()
        lines = client.get("/metrics").text.splitlines()
    checked, worst = rescored(models.load("tiny", training=False), root, load, 200)
    without, with_swaps = load.seconds["without"], load.seconds["with"]
    figures = {
        kind: {name: round(quantile(values, share), 4) for name, share in (("p50", 0.5), ("p99", 0.99))}
        | {"replies": len(values)}
        for kind, values in (("without", without), ("with", with_swaps))
    }  # fmt: skip
    wanted = ("sparring_steps_total", "sparring_reply_tokens_total", "sparring_weights_loaded")
    return {
        "name": "swap", "ratio": round(quantile(with_swaps, 0.99) / quantile(without, 0.99), 3), "swaps": len(loading),
        "failed": len(load.failed), "failures": load.failed[:3], "mixed": len(load.mixed), "n": len(load.replies),
        "ours": figures["with"], "theirs": figures["without"], "rescored": checked,
        "worst_ratio_of_a_token": float(f"{worst:.2e}"),
        "loading_p50": round(quantile(loading, 0.5), 4), "loading_max": round(max(loading), 4),
        "server": {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(wanted)},
        "settings": vars(arguments), "versions": machine("torch", "transformers", "peft", "uvicorn", "httpx"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
