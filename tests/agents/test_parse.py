"""The parser: one JSON object, strictly; any other text is a typed failure, never an exception (market.md T9, T12)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparring.agents.agent import DETAIL_LENGTH, action_json, parse_action
from sparring.envs.market import records as r
from sparring.envs.market.records import ACTIONS, MarketAction, action_name
from sparring.errors import EnvError
from sparring.types import ParseFailure, ParseFailureKind

WAIT = '{"action":"wait"}'


def parse(text: str, *, truncated: bool = False, opened: bool = False) -> Any:
    return parse_action(text, MarketAction, truncated=truncated, thinking_opened=opened)


def kind(text: str) -> str:
    failure = parse(text)
    assert isinstance(failure, ParseFailure), failure
    assert len(failure.detail) <= DETAIL_LENGTH
    assert failure.detail.isascii()
    return failure.kind.value


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (WAIT, r.Wait()),
        (' \n\t{ "action" : "wait" }\r\n ', r.Wait()),
        ('{"action":"pay","message":1,"amount":40}', r.Pay(message=1, amount=40.0)),
        ('{"amount":40.5,"message":1,"action":"pay"}', r.Pay(message=1, amount=40.5)),
        ('{"action":"comment","content":"\\u00e9 {\\"action\\":\\"wait\\"} </think>"}',
         r.Comment(content='é {"action":"wait"} </think>')),
        ('<think>{"action":"buy"} or not</think>\n{"action":"wait"}', r.Wait()),
        ("<think></think>" + WAIT, r.Wait()),
    ],
)  # fmt: skip
def test_what_is_an_action(text: str, action: object) -> None:
    assert parse(text) == action


def test_a_thinking_block_that_the_template_opened() -> None:
    assert parse("so I wait</think>" + WAIT, opened=True) == r.Wait()
    assert parse(WAIT, opened=True).kind is ParseFailureKind.NO_JSON


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no_json"),
        ("   ", "no_json"),
        ("I wait.", "no_json"),
        ("null", "no_json"),
        ("[]", "no_json"),
        ("<think>" + WAIT, "no_json"),
        ("<think>hm" * 3, "no_json"),
        ("I choose " + WAIT, "trailing_text"),
        (WAIT + " because", "trailing_text"),
        (WAIT + WAIT, "trailing_text"),
        (f"[{WAIT}]", "trailing_text"),
        (f"```json\n{WAIT}\n```", "trailing_text"),
        ("\ufeff" + WAIT, "trailing_text"),
        ("\u00a0" + WAIT, "trailing_text"),
        (WAIT + "\x00", "trailing_text"),
        ("</think>" + WAIT, "trailing_text"),
        ("{", "invalid_json"),
        ('{"action":"wait"', "invalid_json"),
        ("{'action':'wait'}", "invalid_json"),
        ('{"action":"wait",}', "invalid_json"),
        ('{"action":"comment","content":"a\nb"}', "invalid_json"),
        ('{"action":"comment","content":"\\ud800"}', "invalid_json"),
        ('{"action":"comment","content":"\ud800"}', "invalid_json"),
        ('{"action":"pay","message":1,"amount":NaN}', "invalid_json"),
        ('{"action":"pay","message":1,"amount":Infinity}', "invalid_json"),
        ('{"action":"pay","message":1,"amount":-Infinity}', "invalid_json"),
        ('{"action":"pay","message":1,"amount":' + "9" * 10_000 + "}", "invalid_json"),
        ("{}", "schema"),
        ('{"action":"steal"}', "schema"),
        ('{"action":["wait"]}', "schema"),
        ('{"action":{"action":"wait"}}', "schema"),
        ('{"action":null}', "schema"),
        ('{"action":"wait","reason":"x"}', "schema"),
        ('{"action":"wait","action":"wait"}', "schema"),
        ('{"action":"pay","message":1,"amount":1,"amount":900}', "schema"),
        ('{"action":"pay","message":1}', "schema"),
        ('{"action":"pay","message":"1","amount":4}', "schema"),
        ('{"action":"pay","message":1.0,"amount":4}', "schema"),
        ('{"action":"pay","message":true,"amount":4}', "schema"),
        ('{"action":"pay","message":1,"amount":true}', "schema"),
        ('{"action":"pay","message":1,"amount":"4"}', "schema"),
        ('{"action":"pay","message":1,"amount":0}', "schema"),
        ('{"action":"pay","message":1,"amount":-4}', "schema"),
        ('{"action":"pay","message":1,"amount":1e999}', "schema"),
        ('{"action":"pay","message":1,"amount":' + "9" * 400 + "}", "schema"),
        ('{"action":"pay","message":' + "9" * 40 + ',"amount":1}', "schema"),
        ('{"action":"pay","message":0,"amount":1}', "schema"),
        ('{"action":"buy","market":"m0","side":"maybe","amount":1}', "schema"),
        ('{"action":"comment","content":""}', "schema"),
        ('{"action":"comment","content":"' + "x" * 281 + '"}', "schema"),
    ],
)
def test_what_is_none(text: str, expected: str) -> None:
    assert kind(text) == expected


@pytest.mark.parametrize("text", [WAIT, "", '{"action":"wa'])
def test_a_reply_that_never_ended_is_truncated_whatever_it_holds(text: str) -> None:
    assert parse(text, truncated=True).kind is ParseFailureKind.TRUNCATED


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, '{"action":"wait","x":' + "[" * 100_000])
def test_deep_nesting_is_data(deep: str) -> None:
    assert isinstance(parse(deep), ParseFailure)


@given(st.text(st.characters()))
@example("\ud800")
@example("{\ud800}")
@example("{\x00}")
@settings(max_examples=300, deadline=None)
def test_no_text_raises(text: str) -> None:
    for reply in (text, "{" + text, '{"action":"comment","content":"' + text + '"}'):
        parsed = parse(reply)
        assert isinstance(parsed, ParseFailure | msgspec.Struct)
        if isinstance(parsed, ParseFailure):
            assert parsed.detail.isascii()


@given(st.binary())
@settings(max_examples=200, deadline=None)
def test_no_bytes_that_became_text_raise(junk: bytes) -> None:
    for errors in ("replace", "surrogateescape", "backslashreplace"):
        text = junk.decode("utf-8", errors)
        assert isinstance(parse(text), ParseFailure | msgspec.Struct)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({name for action in ACTIONS for name in action.__struct_fields__} | {"action", "reason"})


@given(
    st.sampled_from([str(action.__struct_config__.tag) for action in ACTIONS]),
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_no_json_raises_and_what_is_read_is_what_was_said(tag: str, fields: dict[str, Any]) -> None:
    said = {"action": tag, **fields}
    parsed = parse(json.dumps(said))
    if not isinstance(parsed, ParseFailure):
        assert msgspec.to_builtins(parsed) == said
        assert not any(isinstance(value, bool) for value in said.values())


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
AMOUNTS = st.floats(0.01, 1_000_000) | st.integers(1, 1_000_000)


@st.composite
def actions(draw: st.DrawFn) -> msgspec.Struct:
    made = draw(st.sampled_from(ACTIONS))
    values: dict[str, Any] = {"amount": AMOUNTS, "message": st.integers(1, 999), "deal": st.integers(1, 999)}
    values["order"] = st.integers(1, 999)
    sides = {r.Buy: ("yes", "no"), r.Sell: ("yes", "no"), r.OpenPerp: ("long", "short"), r.Propose: ("buy", "sell")}
    values["side"] = st.sampled_from(sides.get(made, ("yes",)))
    return made(**{name: draw(values.get(name, TEXTS)) for name in made.__struct_fields__})


@given(actions())
@settings(max_examples=300, deadline=None)
def test_every_action_parses_back_equal_from_its_own_json(action: msgspec.Struct) -> None:
    text = action_json(action)
    assert parse(text) == action
    assert text.startswith(f'{{"action":"{action_name(action)}"')


def test_the_canonical_json_is_compact_and_writes_whole_amounts_as_integers() -> None:
    assert action_json(r.Pay(message=1, amount=40.0)) == '{"action":"pay","message":1,"amount":40}'
    assert action_json(r.Pay(message=1, amount=40.25)) == '{"action":"pay","message":1,"amount":40.25}'
    assert action_json(r.Comment(content="né")) == '{"action":"comment","content":"né"}'
    with pytest.raises(ValueError, match="finite"):
        action_json(r.Pay(message=1, amount=float("nan")))


@dataclass(frozen=True)
class Move:
    """A user's own action, of a type that does not forbid unknown fields itself."""

    card: int


class Bid(msgspec.Struct, frozen=True, tag_field="action", tag="bid", rename="camel"):
    at_most: int


def test_a_users_own_action_types_are_read_as_strictly() -> None:
    assert parse_action('{"card":3}', Move, truncated=False) == Move(card=3)
    assert parse_action('{"card":3,"why":1}', Move, truncated=False).kind is ParseFailureKind.SCHEMA
    assert parse_action('{"action":"bid","atMost":3}', Bid, truncated=False) == Bid(at_most=3)
    assert parse_action('{"action":"bid","atMost":3,"x":1}', Bid, truncated=False).kind is ParseFailureKind.SCHEMA
    with pytest.raises(EnvError, match="action_type"):
        parse_action("{}", Move | Bid | r.Wait | str | list[int] | tuple[int, int], truncated=False)
