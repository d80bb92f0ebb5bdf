"""Requests to intake that are almost right: sound ones of every route, changed in structure, in bytes, or in what they say
of themselves. Seeded, so that what breaks something can be sent again."""

from __future__ import annotations

import copy
import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zstandard

_CALL = {
    "prompt_ids": [1, 2], "reply_ids": [3], "log_probs": [-0.5], "version": "v1.2", "temperature": 1.0, "top_p": 1.0,
    "max_new_tokens": 8, "purpose": "action", "reward": 0.5, "messages": [{"role": "user", "content": "hi"}], "reply": "x",
}  # fmt: skip
_EXACT = {"prompt_ids": [1, 2], "reply_ids": [3], "log_probs": [-0.5], "version": "v1.2"}
_FEED = {
    "trajectoryId": "t", "agentId": "g", "team": "red", "totalReward": 1.0,
    "steps": [{"reward": 0.5, "done": True, "llmCalls": [{"callId": "c", "userPrompt": "u", "response": "r"}]}],
}  # fmt: skip
_TURN = {
    "node_id": "n", "prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-0.5], "loss_mask": [0, 1],
    "request": {"model": "m", "temperature": 1.0}, "response": {}, "metadata": {"agent": "a"},
}  # fmt: skip
_CHAT = {
    "model": "exact",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 1.0,
    "n": 1,
    "stream": False,
}
SEEDS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/trajectories", {"trajectories": [{"key": "k", "agent": "a", "calls": [_EXACT], "reward": 1.0}]}),
    ("POST", "/v1/trajectories", {"trajectories": [{"key": "k2", "agent": "a", "calls": [_CALL], "session": "s1"}]}),
    ("POST", "/v1/rollouts", {"not": "a message"}),
    ("POST", "/v1/traces", {"schema_version": 1, "turns": [_TURN]}),
    ("POST", "/sessions/s/reward", {"reward": 1.0, "agent": "a"}),
    ("POST", "/sessions/s/end", {}),
    ("POST", "/sessions/s/v1/chat/completions", _CHAT),
    ("POST", "/sessions/s/v1/completions", {"model": "exact", "prompt": "abc", "max_tokens": 4}),
    ("POST", "/api/crl/trajectories", {"trajectories": [_FEED]}),
    ("POST", "/api/crl/trajectories/mark-trained", {"trajectoryIds": ["feed/t"], "batchId": "b"}),
    ("POST", "/api/crl/identity-map", {"a": "red"}),
    ("GET", "/api/crl/trajectories?limit=5&cursor=0&since=2026-01-01T00:00:00Z", None),
    ("GET", "/sessions/s", None),
    ("GET", "/metrics", None),
]


@dataclass(kw_only=True, slots=True)
class Mutated:
    """A request to send."""

    method: str
    path: str
    body: bytes
    headers: dict[str, bytes] = field(default_factory=dict)


def _deep(rng: random.Random) -> Any:
    out: Any = 1
    for _ in range(rng.choice((50, 2000))):
        out = [out] if rng.random() < 0.5 else {"a": out}
    return out


def _value(rng: random.Random) -> Any:
    return rng.choice(
        (
            None, True, -1, 0, 2**31, 2**63, -(2**70), 1e308, -1e-320, 0.1, "", "x" * 300, "k\u0000", "\ud800", "é漢",
            [], {}, [[]], [None], [1] * 500, {"a": 1}, "v1.2", "v999999999999.1", "NaN", "row-99999999999999999999-1",
            float("nan"), float("inf"), rng.randrange(10**6), rng.random(), ["a", 1, None],
        )
    )  # fmt: skip


def _change(rng: random.Random, value: Any) -> Any:
    """One place of a document, changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.7:
            value[name] = _change(rng, value[name])
        elif kind < 0.85:
            del value[name]
        else:
            value[str(rng.choice(("extra", "", "key", name + "x", "\u0001")))] = _value(rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.75:
            value[place] = _change(rng, value[place])
        else:
            value.append(copy.deepcopy(value[place]) if rng.random() < 0.5 else _value(rng))
        return value
    return _value(rng)


def _bytes(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        place = rng.randrange(len(data) + 1)
        if kind < 0.4 and data:
            data[place % len(data)] = rng.randrange(256)
        elif kind < 0.6:
            del data[place:]
        elif kind < 0.8:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        else:
            data[place:place] = data[max(place - 10, 0) : place]
    return bytes(data)


def _packed(rng: random.Random, content: Any) -> tuple[bytes, str]:
    if rng.random() < 0.2:
        try:
            return msgspec.msgpack.encode(content), "application/msgpack"
        except (OverflowError, UnicodeEncodeError, RecursionError, ValueError):
            pass
    try:
        return json.dumps(content).encode(errors="surrogatepass"), "application/json"
    except RecursionError:
        return b"[" * 3000 + b"]" * 3000, "application/json"


def mutated(rng: random.Random) -> Mutated:
    """The next request."""
    method, path, content = rng.choice(SEEDS)
    content = copy.deepcopy(content)
    path = path.replace("/sessions/s", f"/sessions/s{rng.randrange(20)}", 1)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        content = _change(rng, content)
    if rng.random() < 0.01:
        content = _deep(rng)
    body, kind = (b"", "application/json") if method == "GET" else _packed(rng, content)
    if rng.random() < 0.25 and body:
        body = _bytes(rng, body)
    headers = {"content-type": kind.encode(), "x-sparring-producer": rng.choice((b"p", b"q", b"\xff", b"x" * 300))}
    packing = rng.random()
    if packing < 0.08:
        body, headers["content-encoding"] = zstandard.compress(body), b"zstd"
    elif packing < 0.12:
        body, headers["content-encoding"] = gzip.compress(body), b"gzip"
    elif packing < 0.15:
        headers["content-encoding"] = rng.choice((b"br", b"zstd", b"gzip", b"\x00"[:0]))
    if packing < 0.05:
        body = _bytes(rng, body)
    if rng.random() < 0.1:
        headers["content-type"] = rng.choice(
            (b"text/plain", b"", b"application/msgpack", b"application/json; charset=x")
        )
    if rng.random() < 0.3:
        headers["idempotency-key"] = rng.choice((b"i", b"", b"x" * 400, b"\xe9"))
    if rng.random() < 0.1:
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"))
    if rng.random() < 0.1:
        path += rng.choice(
            ("/", "/..", "%00", "%ff", "?limit=-1", "?limit=99999999999", "/v1/models", "%2e%2e", "?cursor=%00")
        )
    return Mutated(method=method, path=path, body=body, headers=headers)
