"""The whole way round: an OpenAI client speaks through the proxy, rewards come late, the loop learns, the server follows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from sparring.intake.server import Gateway
from sparring.intake.trajectory_log import TrajectoryLog
from sparring.intake.wire import decode_body

ASK = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8, "seed": 5}


def test_calls_are_recorded_exactly_rewarded_late_and_learned_from(start: Any, tmp_path: Path) -> None:
    log_path = tmp_path / "log.sqlite"
    _, model = start("model", "tiny", "--threads", "1")
    gateway, url = start("intake", str(log_path), "--upstream", f"{model}/v1")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        first = client.post("/sessions/s1/v1/chat/completions", json=ASK | {"agent": "a1"}).json()
        assert first["choices"][0]["logprobs"] is None and first["policy_version"] == "v1.0"  # nobody asked for them
        said = first["choices"][0]["message"]["content"]
        history = [*ASK["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]  # type: ignore[misc]
        second = client.post("/sessions/s1/v1/chat/completions", json=ASK | {"agent": "a1", "messages": history})
        assert second.status_code == 200
        rewritten = [{"role": "user", "content": "a summary of it all"}]  # a compacted history: a branch of its own
        client.post("/sessions/s1/v1/chat/completions", json=ASK | {"agent": "a1", "messages": rewritten})
        headers = {"Idempotency-Key": "once"}
        assert (
            client.post(
                "/sessions/s1/v1/completions", json={"prompt": "abc", "max_tokens": 3, "agent": "a2"}, headers=headers
            ).status_code
            == 200
        )
        assert client.post("/sessions/s1/v1/completions", json={"prompt": "abc"}, headers=headers).status_code == 409
        with client.stream(
            "POST", "/sessions/s2/v1/chat/completions", json=ASK | {"stream": True, "agent": "b"}
        ) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert lines[-1] == "[DONE]" and json.loads(lines[0])["choices"][0]["delta"]["content"] == said
        tree = client.get("/sessions/s1").json()["calls"]
        assert len(tree) == 4 and all(call["exact"] for call in tree)
        assert client.get("/sessions/s1/v1/models").json()["data"][0]["id"] == "policy"
        assert client.post("/sessions/nobody/reward", json={"reward": 1}).status_code == 404
        assert client.post("/sessions/s1/reward", json={"reward": float(10)}).json()["status"] == "accepted"

        gateway.send_signal(signal.SIGKILL)  # what was answered is on disk
        gateway.wait()
    _, url = start("intake", str(log_path), "--upstream", f"{model}/v1")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        assert client.post("/sessions/s1/reward", json={"reward": 1.0}).json()["status"] == "revised"
        assert client.post("/sessions/s1/reward", json={"reward": -1.0, "agent": "a2"}).status_code == 200
        for session in ("s1", "s2"):
            assert client.post(f"/sessions/{session}/end").status_code == 200
        assert client.post("/sessions/s2/reward", json={"reward": 0.5}).status_code == 200

        command = [
            sys.executable, "-m", "sparring", "train", "feed", str(log_path), "--run", "live", "--batches", "1", "--least", "5",
            "--publish", "false", "--gate.mode", "off", "--threads", "1", "--quiet", "true", "--json",
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True
        )
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["trajectories"], report["calls"], report["retokenised"], report["step"]) == (5, 5, 0, 1)
        assert client.post("/sessions/s1/reward", json={"reward": 2.0}).status_code == 409
    with TrajectoryLog(log_path) as log:
        assert log.counts()["trained"] == 5
        rewards = {item.agent: item.reward for item in log.calls("s1")}
        assert rewards == {"a1": 1.0, "a2": -1.0}
        kept = decode_body(log.calls("s1")[0].body).calls[0]
        assert list(kept.reply_ids) == first["choices"][0]["token_ids"] and kept.version == "v1.0"
        assert len(kept.log_probs) == len(kept.reply_ids) and kept.prompt_ids == tuple(first["prompt_token_ids"])
    shown = subprocess.run(
        [sys.executable, "-m", "sparring", "log", str(log_path), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(shown.stdout)["counts"]["trained"] == 5


def test_what_the_client_left_out_is_said_upstream(tmp_path: Path) -> None:
    """A server's own default temperature would make the record untrue."""
    asked: list[dict[str, Any]] = []

    def upstream(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    async def ask() -> httpx.Response:
        with TrajectoryLog(tmp_path / "log.sqlite") as log:
            gateway = Gateway(log, upstream="http://model/v1")
            gateway._client = httpx.AsyncClient(transport=httpx.MockTransport(upstream))
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(gateway.app()), base_url="http://gateway"
            ) as client:
                return await client.post("/sessions/s/v1/chat/completions", json=ASK | {"top_p": 0.5, "policy": "red"})

    assert asyncio.run(ask()).status_code == 200
    assert (asked[0]["temperature"], asked[0]["top_p"]) == (1.0, 0.5) and "policy" not in asked[0]
    with TrajectoryLog(tmp_path / "log.sqlite") as log:
        (kept,) = log.calls("s")
        assert decode_body(kept.body).policy == "red" and decode_body(kept.body).calls[0].top_p == 0.5


def test_a_model_server_that_is_away_is_said(start: Any, tmp_path: Path) -> None:
    _, url = start("intake", str(tmp_path / "log.sqlite"), "--upstream", "http://127.0.0.1:9/v1")
    found = httpx.post(f"{url}/sessions/s/v1/chat/completions", json=ASK, timeout=30.0)
    assert found.status_code == 502 and "model server does not answer" in found.json()["error"]["message"]
    _, alone = start("intake", str(tmp_path / "other.sqlite"))
    assert httpx.post(f"{alone}/sessions/s/v1/chat/completions", json=ASK).status_code == 404
