"""Requests field by field, and replies as they come: nothing is shown that may still change, nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from model_fixtures import make_tokenizer
from sparring.http import RequestError
from sparring.inference.batches import NewTokens
from sparring.inference.openai_answers import Answer, Speech
from sparring.inference.openai_wire import (
    Shape,
    check_fields,
    fits,
    messages_of,
    sampling_of,
    shape_of,
    stops_of,
    tool_call,
)
from sparring.tokens.chat import ChatTokenizer


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer())


def spoken(chat: ChatTokenizer, ids: Sequence[int], **options: Any) -> tuple[list[str], Speech]:
    """The pieces of text that a stream shows, and the speech."""
    speech = Speech(decode=chat.decode, **options)
    pieces = []
    for place, token in enumerate(ids):
        finish = "length" if place == len(ids) - 1 else None
        pieces.append(speech.add(NewTokens(token_ids=(token,), log_probs=(-0.5,), finish=finish)))
        if speech.finish is not None:
            break
    return pieces, speech


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(chat):
    text = "价 – price 🜚 ok"
    ids = chat.encode_text(text)
    pieces, speech = spoken(chat, ids)
    assert "".join(pieces) == speech.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3


def test_any_ids_are_shown_as_the_whole_answer_says_them(chat):
    rng = random.Random(3)
    for _ in range(60):
        ids = [rng.randrange(0, 320) for _ in range(rng.randrange(1, 90))]
        pieces, speech = spoken(chat, ids)
        assert "".join(pieces) == speech.text == chat.decode(ids)


def test_a_stop_text_ends_a_reply_and_never_shows_though_its_tokens_are_kept(chat):
    ids = chat.encode_text("buy low##END and more")
    pieces, speech = spoken(chat, ids, stops=("#END", "zzz"))
    assert "".join(pieces) == speech.text == "buy low#"
    assert speech.finish == "stop"
    assert chat.decode(speech.token_ids).startswith("buy low##END") and len(speech.token_ids) < len(ids)
    pieces, speech = spoken(chat, chat.encode_text("buy ##EN"), stops=("#END",))
    assert "".join(pieces) == speech.text == "buy ##EN" and speech.finish == "length"


def test_a_reply_that_may_be_a_call_waits_and_is_shown_as_one_or_as_text(chat):
    answer = Answer(
        id="x", model="m", chat=True, prompt=(1,), version="v1.0", log_probs=False, shape=Shape(tools=("trade",)),
        decode=chat.decode,
    )  # fmt: skip
    said = '{"name": "trade", "arguments": {"price": 3}}'
    pieces, speech = spoken(chat, chat.encode_text(said), tools=("trade",))
    assert "".join(pieces[:-1]) == ""
    last = json.loads(
        answer.chunk(0, speech, NewTokens(token_ids=(1,), log_probs=(0.0,), finish="stop"), pieces[-1])[6:]
    )
    call = last["choices"][0]["delta"]["tool_calls"][0]
    assert call["function"] == {"name": "trade", "arguments": '{"price": 3}'}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.whole([speech])["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "trade"
    pieces, _ = spoken(chat, chat.encode_text("I will not trade"), tools=("trade",))
    assert len([piece for piece in pieces if piece]) > 1
    pieces, speech = spoken(chat, chat.encode_text('{"name": "other"}'), tools=("trade",))
    assert "".join(pieces) == '{"name": "other"}'
    assert tool_call('{"name": "other", "arguments": {}}', ("trade",), "c") is None


def test_a_field_that_would_be_ignored_is_refused_unless_it_asks_for_nothing():
    check_fields({"model": "m", "messages": [], "frequency_penalty": 0, "logit_bias": {}, "top_k": -1, "echo": False})
    refused = {"frequency_penalty": 0.5, "top_k": 5, "best_of": True, "echo": 0, "guided_json": {}, "audio": {}}
    for field, value in refused.items():
        with pytest.raises(RequestError, match=field):
            check_fields({field: value})


def test_of_a_form_it_is_said_what_is_checked_and_the_rest_is_refused():
    schema = {"type": "object", "properties": {"side": {"enum": ["buy", "sell"]}, "price": {"type": "integer"}},
              "required": ["side"], "additionalProperties": False}  # fmt: skip
    shape = shape_of({"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}})
    assert fits('{"side": "buy", "price": 3}', shape.schema)
    for wrong in (
        '{"price": 3}',
        '{"side": "hold"}',
        '{"side": "buy", "price": true}',
        '{"side": "buy", "x": 1}',
        "[]",
        "{",
    ):
        assert not fits(wrong, shape.schema)
    assert fits("{}", None) and not fits("[1]", None)
    refused = [
        {"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"strict": True, "schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "a+"}}},
        {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"oneOf": []}}}}},
    ]  # fmt: skip
    for wanted in refused:
        with pytest.raises(RequestError, match="response_format"):
            shape_of({"response_format": wanted})
    with pytest.raises(RequestError, match="force"):
        shape_of({"tool_choice": "required"})


def test_limits_of_sampling_and_stops_are_named():
    assert sampling_of({}, 64).max_new_tokens == 64
    assert sampling_of({"max_tokens": 3, "max_completion_tokens": 5}, 64).max_new_tokens == 5
    for wrong in (
        {"temperature": float("nan")},
        {"temperature": 1e-9},
        {"top_p": 0},
        {"max_tokens": 65},
        {"max_tokens": True},
    ):
        with pytest.raises(RequestError):
            sampling_of(wrong, 64)
    assert stops_of({"stop": "a"}) == ("a",)
    for wrong_stop in ("", [""], ["a"] * 17, 3, [3]):
        with pytest.raises(RequestError, match="stop"):
            stops_of({"stop": wrong_stop})


def test_tools_go_before_the_chat_in_words():
    tools = [{"type": "function", "function": {"name": "trade", "parameters": {}}}]
    call = {"function": {"name": "trade", "arguments": '{"price": 1}'}}
    chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    found = messages_of({"messages": chat, "tools": tools})
    assert found[0].role == "system" and '"name":"trade"' in found[0].content
    assert found[2].content == '{"name": "trade", "arguments": {"price": 1}}' and found[3].role == "user"
    assert messages_of({"messages": chat, "tools": tools, "tool_choice": "none"})[0].role == "user"
