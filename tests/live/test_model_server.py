"""The model server over real HTTP: what it says is what was sampled, and a swap stops nobody."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sparring import models
from sparring.checkpoints import write_checkpoint
from sparring.config import to_toml
from sparring.config_live import FeedConfig
from sparring.policies.contract import ScoreRow
from sparring.publishing import Change, SuiteResult, current, publish, rollback

ASK = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "temperature": 0.8, "logprobs": True}


@pytest.fixture(scope="module")
def policy() -> Any:
    return models.load("tiny", training=False)


@pytest.fixture
def served(start: Any) -> Any:
    process, url = start("model", "tiny", "--threads", "1", "--most-waiting", "8", "--most-running", "8")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        yield process, client


def test_log_probs_are_the_learners_and_ids_are_exact(served: Any, policy: Any) -> None:
    _, client = served
    for top_p in (1.0, 0.7):
        found = client.post("/v1/chat/completions", json=ASK | {"top_p": top_p, "seed": 4, "n": 2}).json()
        assert found["policy_version"] == "v1.0" and found["model"] == "policy-v1-0"
        for choice in found["choices"]:
            prompt, ids = tuple(found["prompt_token_ids"]), tuple(choice["token_ids"])
            said = [row["logprob"] for row in choice["logprobs"]["content"]]
            row = ScoreRow(token_ids=(*prompt, *ids), positions=tuple(range(len(prompt), len(prompt) + len(ids))))
            with torch.no_grad():
                scored = policy.log_probs([row], temperature=0.8, top_p=top_p)
            assert torch.allclose(torch.tensor(said), scored, atol=1e-3)
            assert choice["message"]["content"] == policy.chat.decode(ids)
            assert found["usage"]["prompt_tokens"] == len(prompt)


def test_a_stream_says_what_a_whole_answer_says(served: Any) -> None:
    _, client = served
    whole = client.post("/v1/chat/completions", json=ASK | {"seed": 9}).json()["choices"][0]
    ids, text, log_probs, finish = [], "", [], None
    with client.stream("POST", "/v1/chat/completions", json=ASK | {"seed": 9, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    first = json.loads(lines[0])
    assert first["prompt_token_ids"] and first["choices"][0]["delta"]["role"] == "assistant"
    for line in lines[1:-1]:
        choice = json.loads(line)["choices"][0]
        ids += choice["token_ids"]
        text += choice["delta"]["content"]
        log_probs += [row["logprob"] for row in choice["logprobs"]["content"]]
        finish = choice["finish_reason"]
    assert ids == whole["token_ids"] and text == whole["message"]["content"] and finish == whole["finish_reason"]
    assert log_probs == pytest.approx([row["logprob"] for row in whole["logprobs"]["content"]], abs=1e-4)


def test_a_reply_does_not_depend_on_who_else_asks(served: Any) -> None:
    _, client = served
    alone = client.post("/v1/chat/completions", json=ASK | {"seed": 1}).json()["choices"][0]["token_ids"]
    found: list[Any] = []

    def ask(seed: int) -> None:
        body = ASK | {"seed": seed, "max_tokens": 12 if seed == 1 else 5 + seed}
        found.append((seed, client.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"]))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(found)[1] == alone and len(found) == 6


def test_limits_and_errors_name_the_field(served: Any) -> None:
    _, client = served
    for body, status, words in [
        ({"messages": []}, 400, "messages"), (ASK | {"model": "gpt"}, 404, "no model 'gpt'"),
        (ASK | {"temperature": -1}, 400, "temperature"), (ASK | {"n": 99}, 400, "n: give"),
        (ASK | {"best": 2}, 400, "best"), (ASK | {"max_tokens": 4096}, 400, "exceed the context"),
        (ASK | {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "exceed the context"),
        (ASK | {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages[0]"),
        (ASK | {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {}}}}, 400, "strict"),
    ]:  # fmt: skip
        found = client.post("/v1/chat/completions", json=body)
        assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text
    assert client.post("/v1/completions", json={"prompt": [10**9]}).status_code == 400
    assert client.post("/v1/chat/completions", content=b"{").status_code == 400
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "x"}).status_code == 400
    shown = client.get("/v1/models").json()["data"]
    assert [row["id"] for row in shown] == ["policy", "policy-v1-0"]
    found = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "logprobs": 1}).json()
    assert len(found["choices"][0]["token_ids"]) == len(found["choices"][0]["logprobs"]["token_logprobs"])
    checked = ASK | {"response_format": {"type": "json_object"}}
    assert isinstance(client.post("/v1/chat/completions", json=checked).json()["choices"][0]["format_valid"], bool)


def test_too_many_are_told_to_come_again(served: Any) -> None:
    _, client = served
    codes: list[int] = []

    def ask() -> None:
        codes.append(client.post("/v1/chat/completions", json=ASK | {"max_tokens": 60, "n": 8}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {200, 429} and codes.count(200) >= 1 and 429 in codes
    assert client.post("/v1/chat/completions", json=ASK).status_code == 200


def a_run(place: Path, policy: Any, steps: int) -> Path:
    """A run of ``train feed`` with checkpoints of different weights."""
    run = place / "runs" / "live"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(FeedConfig(source="log.sqlite")))
    for step in range(steps):
        weights = {name: tensor * (1.0 + 0.01 * step) for name, tensor in policy.state().items()}
        write_checkpoint(
            run / "checkpoints", step, tensors={"policy-shared.safetensors": weights}, documents={}, consumed={}
        )
    return run


def put(run: Path, step: int, *, worse: bool = False) -> Any:
    now = current(run)
    against = now.current.version if now is not None else None
    change = Change(value=-0.2, low=-0.3, high=-0.1, n=50) if worse else Change(value=0.0, low=-0.1, high=0.1, n=50)
    suite = SuiteResult(suite="test", against=against, changes={"headline": change} if against else {})
    return publish(run, version=f"v1.{step}", checkpoint=run / "checkpoints" / f"step-{step:06d}", suite=suite)


def test_a_swap_fails_nobody_and_a_kill_heals(start: Any, tmp_path: Path, policy: Any) -> None:
    run = a_run(tmp_path, policy, 5)
    put(run, 0)
    process, url = start("model", "runs/live", "--threads", "1")
    failed: list[str] = []
    versions: list[str] = []
    over = threading.Event()

    def ask(who: int) -> None:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            while not over.is_set():
                found = client.post("/v1/chat/completions", json=ASK | {"max_tokens": 24})
                if found.status_code != 200:
                    failed.append(found.text)
                else:
                    versions.append(found.json()["policy_version"])

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for step in (1, 2, 3):
        assert put(run, step).published
        deadline = time.monotonic() + 60
        while f"v1.{step}" not in versions and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not put(run, 4, worse=True).published
    over.set()
    for thread in threads:
        thread.join()
    assert not failed and set(versions) == {"v1.0", "v1.1", "v1.2", "v1.3"}

    process.send_signal(signal.SIGKILL)
    process.wait()
    rollback(run)
    _, url = start("model", "runs/live", "--threads", "1")
    assert httpx.get(f"{url}/health").json()["policy_version"] == "v1.2"
    assert not put(run, 3).published  # withdrawn: not by itself


def test_adapters_only_from_below_the_root(start: Any, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    lora = models.load("tiny", lora=__import__("sparring.policies.causal_lm", fromlist=["x"]).LoraSettings(rank=2))
    for name, scale in (("one", 0.5), ("two", 2.0)):
        lora.load_state({key: torch.full_like(value, 0.02 * scale) for key, value in lora.state().items()})
        lora.save_adapter(root / name)
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    _, url = start("model", "tiny", "--threads", "1", "--adapter-root", str(root))
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for path in ("../outside", "link", str(tmp_path / "outside"), "missing", "", "."):
            found = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": path})
            assert found.status_code == 400, path
        base = client.post("/v1/chat/completions", json=ASK | {"seed": 3, "temperature": 0.0}).json()
        for name in ("one", "two"):
            loaded = client.post("/v1/load_lora_adapter", json={"lora_name": f"p-{name}", "lora_path": name})
            assert loaded.status_code == 200, loaded.text
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "p-one", "lora_path": "two"}).status_code == 400
        said = [
            client.post("/v1/chat/completions", json=ASK | {"seed": 3, "temperature": 0.0, "model": f"p-{name}"}).json()
            for name in ("one", "two")
        ]
        log_probs = [row["choices"][0]["logprobs"]["content"][0]["logprob"] for row in (base, *said)]
        assert len({round(value, 6) for value in log_probs}) == 3  # three different weights
        for name in ("one", "two"):
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": f"p-{name}"}).status_code == 200
        assert client.post("/v1/chat/completions", json=ASK | {"model": "p-one"}).status_code == 404
        again = client.post("/v1/chat/completions", json=ASK | {"seed": 3, "temperature": 0.0}).json()
        assert again["choices"][0]["token_ids"] == base["choices"][0]["token_ids"]
