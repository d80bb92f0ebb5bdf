from __future__ import annotations

import json

import httpx
import pytest

from sparring.errors import ConfigError, ModelError
from sparring.inference.remote import RemoteChat
from sparring.tokens.chat import ChatMessage
from sparring.types import SamplingSettings

CHAT = [ChatMessage("user", "hello")]


def client(answer: object, **options: object) -> RemoteChat:
    transport = httpx.MockTransport(answer)  # type: ignore[arg-type]
    return RemoteChat("http://local/v1/", "m", transport=transport, **options)  # type: ignore[arg-type]


def test_request_and_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPONENT_KEY", "k1")
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": "hi"}}]})

    settings = SamplingSettings(temperature=0.7, top_p=0.9, max_new_tokens=9)
    assert client(answer, api_key_variable="OPPONENT_KEY").reply(CHAT, settings, seed=3) == "hi"
    assert str(seen[0].url) == "http://local/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer k1"
    assert json.loads(seen[0].content) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 9,
        "seed": 3,
    }


def test_only_connecting_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    calls: list[str] = []

    def refused(request: httpx.Request) -> httpx.Response:
        calls.append("connect")
        raise httpx.ConnectError("refused")

    with pytest.raises(ModelError, match="cannot be reached"):
        client(refused).reply(CHAT, SamplingSettings())
    assert len(calls) == 3

    def slow(request: httpx.Request) -> httpx.Response:
        calls.append("read")
        raise httpx.ReadTimeout("slow")

    with pytest.raises(ModelError, match="did not answer"):
        client(slow).reply(CHAT, SamplingSettings())
    assert calls.count("read") == 1


@pytest.mark.parametrize(
    "response",
    [httpx.Response(404, text="no such model"), httpx.Response(200, text="<html>"), httpx.Response(200, json={})],
)
def test_refusals_are_clear(response: httpx.Response) -> None:
    with pytest.raises(ModelError, match="answered"):
        client(lambda request: response).reply(CHAT, SamplingSettings())


def test_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match="http://"):
        RemoteChat("local/v1", "m")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        RemoteChat("http://local/v1", "m", api_key_variable="NO_SUCH_KEY")
