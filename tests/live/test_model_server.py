"""The model server over real HTTP: what it says is what was sampled, and a swap stops nobody."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sparring import models
from sparring.checkpoints import read_checkpoint, verify_checkpoint, write_checkpoint
from sparring.config import LoraSettings as RunLora
from sparring.config import to_toml
from sparring.config_live import FeedConfig
from sparring.policies.causal_lm import LoraSettings
from sparring.policies.contract import ScoreRow
from sparring.publishing import publish, rollback
from sparring.suite_results import SuiteFigure, SuiteResult
from sparring.types import PolicyVersion

ASK = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "temperature": 0.8, "logprobs": True}


@pytest.fixture(scope="module")
def policy() -> Any:
    return models.load("tiny", training=False)


@pytest.fixture(scope="module")
def served(started: Any) -> Any:
    process, url = started("model", "tiny", "--threads", "1", "--most-waiting", "8", "--most-running", "8")
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


def a_run(place: Path, policy: Any, steps: int, **settings: Any) -> Path:
    """A run of ``train feed`` with checkpoints of different weights."""
    run = place / "runs" / "live"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(FeedConfig(source="log.sqlite", **settings)))
    for step in range(steps):
        weights = {name: tensor * (1.0 + 0.01 * step) for name, tensor in policy.state().items()}
        write_checkpoint(
            run / "checkpoints", step, tensors={"policy-shared.safetensors": weights}, documents={}, consumed={}
        )
    return run


KEYS = tuple(f"probe-{number}" for number in range(40))


def put(run: Path, step: int, *, worse: bool = False) -> Any:
    place = run / "checkpoints" / f"step-{step:06d}"
    values = tuple(float(number % 2 == 0 and not worse) for number in range(len(KEYS)))
    figure = SuiteFigure(measures=(values,), higher_is_better=True, unit="share")
    suite = SuiteResult(
        checkpoint=verify_checkpoint(place)[1], panel="p", keys=KEYS, figures={"right": figure}, seconds=0.0
    )
    return publish(run, place, suite, version=PolicyVersion(incarnation=1, step=step))


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
    lora = models.load("tiny", lora=LoraSettings(rank=2))
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


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"sparring_{name} ")))


def test_who_hangs_up_frees_its_rows_and_odd_requests_never_answer_500(served: Any) -> None:
    _, client = served
    long = ASK | {"max_tokens": 900, "temperature": 8.0, "n": 4}
    with client.stream("POST", "/v1/chat/completions", json=long | {"stream": True}) as stream:
        lines = stream.iter_lines()
        while '"token_ids":[]' in (line := next(lines)) or not line:
            pass  # until the first token
        assert metric(client, "requests_running") >= 1
    with pytest.raises(httpx.TimeoutException):
        client.post("/v1/chat/completions", json=long, timeout=0.3)
    deadline = time.monotonic() + 20
    while metric(client, "requests_running") + metric(client, "requests_waiting") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metric(client, "requests_running") == metric(client, "requests_waiting") == 0
    assert metric(client, "requests_cancelled_total") >= 5

    rng = random.Random(11)
    base = json.dumps(
        ASK | {"max_tokens": 2, "stop": ["x"], "seed": 3, "stream": False, "n": 1, "tools": [{"function": {"name": "f"}}],
               "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}
    ).encode()  # fmt: skip
    odd = [
        b'"',
        b"[",
        b"}",
        b"1e999",
        b"null",
        b"\xff",
        b"-1",
        b"\\ud800",
        b"{" * 400,
        b"true",
        b"9" * 30,
        b"[]",
        b"{}",
    ]
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    for number in range(400):
        data = bytearray(base)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(0, 8)] = rng.choice(odd)
        found = client.post(rng.choice(paths[: 1 + 3 * (number % 4 == 0)]), content=bytes(data), timeout=30.0)
        assert found.status_code < 500, (number, bytes(data), found.text)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/chat/completions", content=b"[" * (9 << 20)).status_code == 413


def test_another_address_than_loopback_wants_a_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparring", "serve", "model", "tiny", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 2 and "token_variable" in done.stderr and "Traceback" not in done.stderr


def test_killed_in_the_middle_of_swaps_it_serves_what_is_published_when_it_is_back(
    start: Any, tmp_path: Path, policy: Any
) -> None:
    run = a_run(tmp_path, policy, 5)
    put(run, 0)
    process, url = start("model", "runs/live", "--threads", "1")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        assert client.get("/health").json()["policy_version"] == "v1.0"
        put(run, 1)
        put(run, 2)
        process.send_signal(signal.SIGKILL)  # it has seen at most one of them
        process.wait()
    # Somebody changes a file of the newest publication: it is not served, and the one before is, and that is said.
    weights = run / "checkpoints" / "step-000002" / "policy-shared.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    _, url = start("model", "runs/live", "--threads", "1")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        health = client.get("/health").json()
        assert health["policy_version"] == "v1.1" and "its hash differs" in health["trouble"]
        assert metric(client, "publication_ok") == 0
        weights.write_bytes(whole)  # put right: it is served with no more ado
        deadline = time.monotonic() + 60
        while client.get("/health").json()["policy_version"] != "v1.2" and time.monotonic() < deadline:
            time.sleep(0.1)
        health = client.get("/health").json()
        assert health["policy_version"] == "v1.2" and health["trouble"] is None
        assert client.post("/v1/chat/completions", json=ASK).json()["policy_version"] == "v1.2"


def test_a_run_that_guards_its_publications_serves_nothing_before_the_first(tmp_path: Path, policy: Any) -> None:
    a_run(tmp_path, policy, 1)
    command = [sys.executable, "-m", "sparring", "serve", "model", "runs/live", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 2 and "has published nothing yet" in done.stderr


def test_adapters_of_a_run_go_onto_one_base_and_a_rollback_is_followed(start: Any, tmp_path: Path) -> None:
    lora = models.load("tiny", name="shared", lora=LoraSettings(rank=2, alpha=4.0), training=False)
    generator = torch.Generator().manual_seed(0)
    lora.load_state({name: 0.2 * torch.randn(t.shape, generator=generator) for name, t in lora.state().items()})
    run = a_run(tmp_path, lora, 3, adapters="shared", lora=RunLora(rank=2, alpha=4.0))
    put(run, 0)
    _, url = start("model", "runs/live", "--threads", "1")
    with httpx.Client(base_url=url, timeout=60.0) as client:

        def reply_of(version: str) -> Any:
            deadline = time.monotonic() + 60
            while client.get("/health").json()["policy_version"] != version and time.monotonic() < deadline:
                time.sleep(0.05)
            found = client.post("/v1/chat/completions", json=ASK | {"temperature": 1.0}).json()
            assert found["policy_version"] == version
            return found

        for step, follow in ((0, None), (1, put), (2, put), (1, rollback)):
            if follow is not None:
                assert follow(run, step) if follow is put else follow(run)
            found = reply_of(f"v1.{step}")
            prompt, choice = found["prompt_token_ids"], found["choices"][0]
            lora.load_state(
                read_checkpoint(run / "checkpoints" / f"step-{step:06d}").tensors["policy-shared.safetensors"]
            )
            positions = tuple(range(len(prompt), len(prompt) + len(choice["token_ids"])))
            with torch.no_grad():
                row = ScoreRow(token_ids=(*prompt, *choice["token_ids"]), positions=positions)
                scored = lora.log_probs([row], temperature=1.0)
            said = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
            assert torch.allclose((said - scored).exp(), torch.ones(len(said)), atol=1e-3)
        deadline = time.monotonic() + 20
        while metric(client, "weights_loaded") > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert metric(client, "weights_loaded") == 1  # the others were taken off the base again
        assert metric(client, "swaps_total") == 3
