"""The gateway over real HTTP: what is acknowledged is kept, once; what is wrong is told; nothing answers 500."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zstandard

from sparring.intake.codec import encode as encode_rollouts
from sparring.intake.trajectory_log import TrajectoryLog
from sparring.intake.wire import decode_body
from sparring.types import PolicyVersion, Rollout


def trajectory(key: str, **more: Any) -> dict[str, Any]:
    call = {"prompt_ids": [1, 2, 3], "reply_ids": [4, 5], "log_probs": [-0.5, -0.25], "version": "v1.3"}
    return {"key": key, "agent": "a1", "team": "blue", "reward": 1.0, "calls": [call]} | more


@pytest.fixture
def gateway(start: Any, tmp_path: Path) -> Any:
    process, url = start("intake", str(tmp_path / "log.sqlite"))
    with httpx.Client(base_url=url, timeout=30.0) as client:
        yield process, client


def post(client: httpx.Client, *rows: Any, **how: Any) -> httpx.Response:
    return client.post("/v1/trajectories", json={"trajectories": list(rows)}, **how)


def test_each_is_kept_once_and_each_error_is_its_own(gateway: Any, tmp_path: Path) -> None:
    process, client = gateway
    bad = trajectory("bad", calls=[{"prompt_ids": [1], "reply_ids": [2, 3], "log_probs": [-0.1]}])
    found = post(client, trajectory("a"), bad, trajectory("a"), trajectory("a", reward=2.0), {"key": "x"})
    assert found.status_code == 207
    rows = found.json()["results"]
    assert [row["status"] for row in rows] == ["accepted", "invalid", "duplicate", "conflict", "invalid"]
    assert "trajectories[1].calls[0].log_probs: 1 for 2 reply_ids" in rows[1]["error"]
    assert "trajectories[4]" in rows[4]["error"] and "agent" in rows[4]["error"]
    assert post(client, trajectory("a")).status_code == 200
    assert post(client, trajectory("a", reward=3.0)).status_code == 409
    process.send_signal(signal.SIGKILL)
    process.wait()
    with TrajectoryLog(tmp_path / "log.sqlite") as log:
        assert log.counts()["ready"] == 1
        kept = log.find("a")
        assert kept is not None and decode_body(kept[0].body).reward == 1.0


def test_msgpack_zstd_rollouts_and_traces(gateway: Any) -> None:
    _, client = gateway
    packed = msgspec.msgpack.encode({"trajectories": [trajectory("m")]})
    headers = {"Content-Type": "application/msgpack", "Content-Encoding": "zstd"}
    found = client.post("/v1/trajectories", content=zstandard.compress(packed), headers=headers)
    assert found.json()["results"][0]["status"] == "accepted"
    bomb = zstandard.compress(bytes(80 << 20))
    assert client.post("/v1/trajectories", content=bomb, headers=headers).status_code == 413
    assert client.post("/v1/trajectories", content=b"no zstd", headers=headers).status_code == 400

    step = np.zeros(3, dtype=np.float32)
    rollout = Rollout(
        agent="a", environment=0, episode=0, version=PolicyVersion(incarnation=1, step=0),
        observations=np.zeros((3, 2), dtype=np.float32), actions=np.zeros((3, 1), dtype=np.int64), log_probs=step,
        rewards=step, terminated=np.zeros(3, dtype=bool), truncated=np.array([False, False, True]),
        final_observations=np.zeros((1, 2), dtype=np.float32),
    )  # fmt: skip
    body = encode_rollouts([rollout])
    for status in ("accepted", "duplicate"):
        assert client.post("/v1/rollouts", content=body).json()["results"][0]["status"] == status
    assert client.post("/v1/rollouts", content=body[:-1]).status_code == 400

    turn = {"node_id": "n1", "prompt_token_ids": [1], "completion_token_ids": [2, 3], "per_token_logps": [-1.0, -2.0]}
    trace = {"turns": [turn], "reward": 0.5, "schema_version": 1}
    assert client.post("/v1/traces", json=trace).json()["results"][0]["status"] == "accepted"
    twice = client.post("/v1/traces", json={"turns": [turn, turn]})
    assert twice.status_code == 400 and "stands twice" in twice.text


def test_the_feed_api_pages_without_skips_or_repeats(gateway: Any) -> None:
    _, client = gateway
    step = {"llmCalls": [{"systemPrompt": "s", "userPrompt": "u", "response": "r", "purpose": "action"}], "done": True}
    rows = [
        {"id": str(n), "trajectoryId": f"t{n}", "agentId": "a", "totalReward": n, "steps": [step]} for n in range(7)
    ]
    assert client.post("/api/crl/identity-map", json={"a": "red"}).json() == {"total": 1}
    assert client.post("/api/crl/trajectories", json={"trajectories": rows}).status_code == 200
    seen, cursor, pages = [], None, 0
    while True:
        page = client.get("/api/crl/trajectories", params={"limit": 3} | ({"cursor": cursor} if cursor else {})).json()
        seen += [row["trajectoryId"] for row in page["trajectories"]]
        pages += 1
        if pages == 1:  # what is trained, and what arrives, between two pages
            client.post("/api/crl/trajectories/mark-trained", json={"trajectoryIds": seen, "batchId": "b"})
            client.post("/api/crl/trajectories", json={"trajectories": [rows[0] | {"trajectoryId": "late"}]})
        if not page["hasMore"]:
            break
        cursor = page["cursor"]
    assert seen == [*(f"feed/t{n}" for n in range(7)), "feed/late"]
    again = client.get("/api/crl/trajectories").json()
    assert [row["trajectoryId"] for row in again["trajectories"]] == seen[3:]
    assert again["trajectories"][0]["team"] == "red"
    assert client.get("/api/crl/trajectories", params={"limit": 500}).status_code == 400
    assert client.get("/api/crl/trajectories", params={"cursor": "x"}).status_code == 400


def test_a_token_where_there_is_one(start: Any, tmp_path: Path) -> None:
    _, url = start("intake", str(tmp_path / "log.sqlite"), "--token-variable", "T", env={"T": "secret"})
    with httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        assert post(client, trajectory("a")).status_code == 401
        assert post(client, trajectory("a"), headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert post(client, trajectory("a"), headers={"Authorization": "Bearer secret"}).status_code == 200


def test_mutated_requests_never_answer_500(gateway: Any) -> None:
    _, client = gateway
    rng = random.Random(5)
    base = json.dumps({"trajectories": [trajectory("k"), trajectory("l", reward=None, session="s")]}).encode()
    odd = [
        b'"',
        b"[",
        b"}",
        b"1e999",
        b"null",
        b"\xff",
        b"-1",
        b"\\ud800",
        b"{" * 500,
        b"true",
        b"99999999999999999999",
    ]
    for number in range(300):
        data = bytearray(base)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(0, 6)] = rng.choice(odd)
        path = rng.choice(
            ["/v1/trajectories", "/v1/traces", "/v1/rollouts", "/api/crl/trajectories", "/sessions/s/reward",
             "/sessions/%00/end", "/api/crl/trajectories/mark-trained", "/api/crl/identity-map", "/sessions/s/v1/models"]
        )  # fmt: skip
        found = client.post(path, content=bytes(data))
        assert found.status_code < 500, (number, path, found.text)
    assert client.get("/health").status_code == 200
