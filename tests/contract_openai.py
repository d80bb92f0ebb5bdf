"""What a model server must do for agents that learn: one contract, against any base URL.

Run against our server in ``tests/live/test_openai_contract.py``, and by ``make test-vllm`` against vLLM as well. A test
module gives the fixture ``server`` (a :class:`Server`) and imports all names that begin with ``test_``::

    from contract_openai import *  # noqa: F403

    @pytest.fixture(scope="module")
    def server(): ...
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

__all__ = [
    "Server",
    "test_a_client_that_hangs_up_harms_nobody",
    "test_a_model_is_named_and_an_unknown_one_is_404",
    "test_a_stream_says_what_a_whole_answer_says",
    "test_adapters_are_loaded_served_and_unloaded_by_name",
    "test_an_answer_holds_ids_and_log_probs_of_what_was_sampled",
    "test_completions_take_ids_and_give_ids",
    "test_log_probs_are_the_learners",
    "test_replies_asked_for_at_once_are_those_asked_for_one_by_one",
    "test_swaps_under_requests_fail_nobody",
    "test_what_is_wrong_is_400_with_one_line",
    "test_what_is_wrong_without_a_token_is_401",
]

MESSAGES = [{"role": "system", "content": "You trade."}, {"role": "user", "content": "What do you do next?"}]


@dataclass(kw_only=True)
class Server:
    """Where a server is, and what this one has of what servers differ in."""

    base_url: str
    """Without ``/v1``."""
    model: str
    """Name of the model that requests ask for."""
    api_key: str | None = None
    scored: Callable[[Sequence[int], Sequence[int], float], Sequence[float]] | None = None
    """(prompt ids, reply ids, temperature) -> the learner's log-probs of the reply; None: not compared."""
    adapters: dict[str, Path] = field(default_factory=dict)
    """Name -> directory (or path below the adapter root) of LoRA adapters of the model; empty: not tried."""
    context: int = 1024
    versions: bool = False
    """Answers carry ``policy_version``."""
    exact_in_company: bool = False
    """A seeded reply does not depend on what else is decoded."""
    extra: dict[str, Any] = field(default_factory=lambda: {"return_token_ids": True})
    """Fields that make the server return token ids."""

    def client(self, timeout: float = 120.0) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout)

    def body(self, **more: Any) -> dict[str, Any]:
        base = {"model": self.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0.8, "logprobs": True}
        return {**base, **self.extra, **more}


def _prompt_ids(content: dict[str, Any]) -> list[int]:
    """At the top, or in a choice."""
    found = content.get("prompt_token_ids")
    return list(found if found is not None else content["choices"][0]["prompt_token_ids"])


def _said(choice: dict[str, Any]) -> list[float]:
    return [row["logprob"] for row in choice["logprobs"]["content"]]


def test_a_model_is_named_and_an_unknown_one_is_404(server: Server) -> None:
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert server.model in [row["id"] for row in client.get("/v1/models").json()["data"]]
        assert client.post("/v1/chat/completions", json=server.body(model="no-such-model")).status_code == 404
        assert "# TYPE" in client.get("/metrics").text


def test_an_answer_holds_ids_and_log_probs_of_what_was_sampled(server: Server) -> None:
    with server.client() as client:
        content = client.post("/v1/chat/completions", json=server.body(n=2)).json()
    assert content["object"] == "chat.completion" and len(content["choices"]) == 2
    for index, choice in enumerate(content["choices"]):
        assert choice["index"] == index and choice["finish_reason"] in ("stop", "length")
        assert 1 <= len(choice["token_ids"]) <= 12 and len(_said(choice)) == len(choice["token_ids"])
        assert all(value <= 0.0 for value in _said(choice))
        assert choice["message"]["role"] == "assistant"
    usage = content["usage"]
    assert usage["prompt_tokens"] == len(_prompt_ids(content))
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in content["choices"])
    if server.versions:
        assert isinstance(content["policy_version"], str) and content["policy_version"].startswith("v")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_learners(server: Server, temperature: float) -> None:
    if server.scored is None:
        pytest.skip("this server's learner is not here")
    with server.client() as client:
        content = client.post(
            "/v1/chat/completions", json=server.body(temperature=temperature, n=4, max_tokens=24)
        ).json()
    for choice in content["choices"]:
        scored = server.scored(_prompt_ids(content), choice["token_ids"], temperature)
        ratios = [
            abs(2.718281828459045 ** (mine - theirs) - 1) for mine, theirs in zip(scored, _said(choice), strict=True)
        ]
        assert max(ratios) < 1e-3


def test_a_stream_says_what_a_whole_answer_says(server: Server) -> None:
    body = server.body(seed=9, max_tokens=16)
    with server.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[0]["delta"].get("role") == "assistant"
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    said = [row["logprob"] for choice in choices for row in ((choice.get("logprobs") or {}).get("content") or [])]
    first = whole["choices"][0]
    assert ids == first["token_ids"]
    assert said == pytest.approx(_said(first), abs=1e-3)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == first["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [first["finish_reason"]]
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    prompts = [event.get("prompt_token_ids") or (event["choices"][0].get("prompt_token_ids") if event["choices"] else None)
               for event in events]  # fmt: skip
    assert next(found for found in prompts if found) == _prompt_ids(whole)


def test_completions_take_ids_and_give_ids(server: Server) -> None:
    with server.client() as client:
        asked = client.post("/v1/chat/completions", json=server.body(temperature=0.0)).json()
        body = {
            "model": server.model, "prompt": _prompt_ids(asked), "max_tokens": 12, "temperature": 0.0, "logprobs": 1,
            **server.extra,
        }  # fmt: skip
        content = client.post("/v1/completions", json=body).json()
    choice = content["choices"][0]
    assert choice["token_ids"] == asked["choices"][0]["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(_said(asked["choices"][0]), abs=1e-3)


def test_replies_asked_for_at_once_are_those_asked_for_one_by_one(server: Server) -> None:
    if not server.exact_in_company:
        pytest.skip("this server's replies may depend on their company")
    bodies = [server.body(seed=seed, max_tokens=6 + 3 * seed, temperature=0.5 + 0.1 * seed) for seed in range(10)]
    with server.client() as client:
        alone = [client.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"] for body in bodies]
        together: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            time.sleep(0.02 * number)  # they join while others run
            found = client.post("/v1/chat/completions", json=bodies[number]).json()
            together[number] = found["choices"][0]["token_ids"]

        _at_once(ask, len(bodies))
    assert [together[number] for number in range(len(bodies))] == alone


def test_a_client_that_hangs_up_harms_nobody(server: Server) -> None:
    with server.client() as client:
        asked = server.body(stream=True, max_tokens=200, temperature=2.0)
        with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            next(stream.iter_lines())
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/chat/completions", json=server.body(max_tokens=200, n=8, temperature=2.0), timeout=0.05)
        assert client.post("/v1/chat/completions", json=server.body()).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user"}]}, {"temperature": -1.0}, {"temperature": "x"},
        {"top_p": 1.5}, {"n": 0}, {"max_tokens": 0}, {"max_tokens": 100_000},
    ],
)  # fmt: skip
def test_what_is_wrong_is_400_with_one_line(server: Server, change: dict[str, Any]) -> None:
    with server.client() as client:
        found = client.post("/v1/chat/completions", json=server.body(**change))
        assert 400 <= found.status_code < 500
        message = found.json()["error"]["message"]
        assert message and "Traceback" not in message
        if change == {"max_tokens": 100_000}:
            assert any(figure in message for figure in ("100000", "4096", str(server.context)))


def test_what_is_wrong_without_a_token_is_401(server: Server) -> None:
    if server.api_key is None:
        pytest.skip("this server asks for no token")
    with httpx.Client(base_url=server.base_url, timeout=60.0) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.api_key}):
            assert client.post("/v1/chat/completions", json=server.body(), headers=headers).status_code == 401
        assert client.get("/health").status_code == 200


def _load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def test_adapters_are_loaded_served_and_unloaded_by_name(server: Server) -> None:
    if len(server.adapters) < 2:
        pytest.skip("no adapters were given")
    (_, one), (_, two) = list(server.adapters.items())[:2]
    greedy = {"temperature": 0.0, "max_tokens": 4}
    with server.client() as client:
        for name, path in (("contract-v1", one), ("contract-v2", two)):
            assert _load(client, name, path).status_code == 200
        names = {row["id"] for row in client.get("/v1/models").json()["data"]}
        assert {"contract-v1", "contract-v2"} <= names
        assert _load(client, "contract-v1", two).status_code == 400  # a name never means other weights by accident
        said = {}
        for name in (server.model, "contract-v1", "contract-v2"):
            content = client.post("/v1/chat/completions", json=server.body(model=name, **greedy)).json()
            said[name] = _said(content["choices"][0])[0]
        assert len({round(value, 5) for value in said.values()}) == 3
        # The same name again, in place: no key or value of the old weights may be used for the new ones (vllm#42125).
        assert _load(client, "contract-v1", two, load_inplace=True).status_code == 200
        again = client.post("/v1/chat/completions", json=server.body(model="contract-v1", **greedy)).json()
        assert _said(again["choices"][0])[0] == pytest.approx(said["contract-v2"], abs=1e-3)
        assert _load(client, "contract-v9", Path("no/such/adapter")).status_code in (400, 404)
        for name in ("contract-v1", "contract-v2"):
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert client.post("/v1/chat/completions", json=server.body(model="contract-v1")).status_code == 404
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "contract-v1"}).status_code in (400, 404)


def test_swaps_under_requests_fail_nobody(server: Server) -> None:
    if len(server.adapters) < 2:
        pytest.skip("no adapters were given")
    paths = list(server.adapters.values())
    failed: list[str] = []
    seen: set[str] = set()
    over = threading.Event()
    newest = [server.model]

    def ask(number: int) -> None:
        with server.client() as client:
            while not over.is_set():
                name = newest[0]
                found = client.post("/v1/chat/completions", json=server.body(model=name, max_tokens=8))
                if found.status_code != 200:
                    failed.append(found.text)
                else:
                    seen.add(found.json()["model"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    loaded: list[str] = []
    with server.client() as client:
        for number in range(4):
            name = f"swap-v{number + 1}"
            assert _load(client, name, paths[number % len(paths)]).status_code == 200
            loaded.append(name)
            newest[0] = name
            time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join()
        for name in loaded:
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    assert not failed
    assert len(seen & set(loaded)) >= 3


def _at_once(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
