"""An agent is a persona and a policy. Here is what stands between policy and environment: the prompt and the reply.

A prompt is laid out so that what is common comes first: rules and market (the same for all agents of a tick), then the
team, then the persona and the private part. Its ids are made once, by the tokenizer's chat template. A reply is read
strictly: one JSON object and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from sparring.errors import EnvError, PromptError
from sparring.tokens.chat import ChatMessage, strip_thinking
from sparring.types import ParseFailure, ParseFailureKind, Prompt, PromptParts

JSON_SPACE = " \t\r\n"
DETAIL_LENGTH = 200
MOST_MESSAGES = 1 << 16
"""More messages than any observation holds."""
_EXACT_INTEGER = 2**53
"""Below this every whole float is one integer."""


class Encoder(Protocol):
    """What ``build_prompt`` needs of a ``tokens.chat.ChatTokenizer``."""

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]: ...


# ---------------------------------------------------------------------------------------------------------- prompt


def prompt_messages(*, rules: str, team_text: str, persona: str, parts: PromptParts) -> tuple[ChatMessage, ChatMessage]:
    """The chat that a prompt is made of; an empty part leaves no line.

    >>> [m.content for m in prompt_messages(rules="Rules.", team_text="You are blue.", persona="Mara, calm.",
    ...     parts=PromptParts(shared="Tick 3", private="Cash 10"))]
    ['Rules.\\nTick 3', 'You are blue.\\nMara, calm.\\nCash 10']
    """
    return (
        ChatMessage("system", "\n".join(filter(None, (rules, parts.shared)))),
        ChatMessage("user", "\n".join(filter(None, (team_text, persona, parts.private)))),
    )


def build_prompt(
    tokenizer: Encoder,
    *,
    rules: str,
    team_text: str,
    persona: str,
    render: Callable[[int | None], PromptParts],
    max_prompt_tokens: int,
) -> Prompt:
    """The prompt of one agent in one tick, tokenised once; the generation header is never cut.

    Where it is too long, the oldest messages are left out: as many of the newest stay as fit.

    Args:
        tokenizer: Applies the chat template.
        rules: What every agent is told first.
        team_text: What the team is told besides.
        persona: The agent's own.
        render: The observation as text with only so many of its newest messages; None keeps all.
        max_prompt_tokens: Longest prompt, so that prompt and reply fit the context.

    Raises:
        PromptError: It does not fit without any message either.
        EnvError: ``render`` never shows as much with a number as with None.
    """

    def encode(parts: PromptParts) -> tuple[int, ...]:
        return tokenizer.encode(prompt_messages(rules=rules, team_text=team_text, persona=persona, parts=parts))

    whole = render(None)
    ids = encode(whole)
    if len(ids) <= max_prompt_tokens:
        return Prompt(token_ids=ids)
    messages = _count_messages(render, whole)
    best: tuple[int, tuple[int, ...]] | None = None
    # The most messages that fit; fewer messages never make a longer prompt.
    fits_from, fails_from = -1, messages
    while fails_from - fits_from > 1:
        kept = (fits_from + fails_from) // 2
        shorter = encode(render(kept))
        if len(shorter) <= max_prompt_tokens:
            fits_from, best = kept, (kept, shorter)
        else:
            fails_from, ids = kept, shorter
    if best is None:
        raise PromptError(
            f"the prompt has {len(ids)} tokens without any message, max_prompt_tokens is {max_prompt_tokens}: raise it "
            "(as far as the model's context allows), shorten the environment's rules, or use a model of longer context"
        )
    return Prompt(token_ids=best[1], dropped_messages=messages - best[0])


def _count_messages(render: Callable[[int | None], PromptParts], whole: PromptParts) -> int:
    """How many messages an observation shows: the least number with which it is rendered whole."""
    if render(0) == whole:
        return 0
    low, high = 0, 1
    while render(high) != whole:
        low, high = high, high * 2
        if high > MOST_MESSAGES:
            raise EnvError("render(observation, newest=k) must show the same as newest=None when k is large enough")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if render(middle) == whole else (middle, high)
    return high


# ----------------------------------------------------------------------------------------------------------- reply


class _DuplicateKeyError(ValueError):
    """A JSON object names a key twice."""


class _NotAJsonNumberError(ValueError):
    """NaN or an infinity."""


def parse_action(text: str, action_type: object, *, truncated: bool, thinking_opened: bool = False) -> Any:
    """Reads a reply as one action. Never raises on any text.

    After a closed thinking block (``tokens.chat.strip_thinking``), the reply must be exactly one JSON object, with
    nothing around it but JSON whitespace (a code fence is text around it), no key twice, no key unknown, and every
    value of its field's type: ``true`` is no number, ``"1"`` is no integer, NaN and infinities do not exist. A reply
    that ran out of tokens is a failure whatever it holds: it never said that it had ended.

    Args:
        text: The decoded reply.
        action_type: The environment's: a struct or dataclass type, or a union of tagged structs.
        truncated: The sampler's word that no end-of-turn token came.
        thinking_opened: The template's generation header has already opened a thinking block.

    Returns:
        An ``action_type``, or a ParseFailure. (Typed ``Any``, since ``action_type`` is known at run time alone.)

    Raises:
        EnvError: ``action_type`` is nothing that JSON can be decoded into: the environment's fault, not the reply's.

    >>> class Wait(msgspec.Struct, frozen=True, tag_field="action", tag="wait"):
    ...     pass
    >>> parse_action('{"action":"wait"}', Wait, truncated=False)
    Wait()
    >>> parse_action('```{"action":"wait"}```', Wait, truncated=False).kind.value
    'trailing_text'
    """
    decoder = _decoder(action_type)
    if truncated:
        return _failure(ParseFailureKind.TRUNCATED, "the reply ran out of tokens before it ended")
    body = strip_thinking(text, opened=thinking_opened).strip(JSON_SPACE)
    if not body.startswith("{"):
        if "{" in body:
            return _failure(ParseFailureKind.TRAILING_TEXT, "text before the JSON object")
        return _failure(ParseFailureKind.NO_JSON, "no '{' in the reply, or a thinking block that never closes")
    try:
        document, end = _STRICT.raw_decode(body)
    except _DuplicateKeyError as error:
        return _failure(ParseFailureKind.SCHEMA, str(error))
    except (ValueError, RecursionError, MemoryError) as error:
        return _failure(ParseFailureKind.INVALID_JSON, _text_of(error))
    if end != len(body):
        return _failure(ParseFailureKind.TRAILING_TEXT, f"text after the JSON object, from character {end}")
    try:
        action = decoder.decode(body)
    except msgspec.ValidationError as error:
        return _failure(ParseFailureKind.SCHEMA, _text_of(error))
    except Exception as error:  # a lone surrogate, a type's own __post_init__: whatever it is, the reply is no action
        return _failure(ParseFailureKind.INVALID_JSON, _text_of(error))
    unknown = sorted(set(document) - _fields(action)) if isinstance(document, dict) else []
    if unknown:
        return _failure(ParseFailureKind.SCHEMA, f"unknown field {unknown[0]!r}")
    return action


def action_json(action: object) -> str:
    """An action as the compact JSON that a reply should be; it parses back to an equal action.

    ``action`` (the tag) comes first and whole amounts are written as integers.

    Raises:
        ValueError: A number is not finite: JSON has no word for it.

    >>> class Pay(msgspec.Struct, frozen=True, tag_field="action", tag="pay"):
    ...     message: int
    ...     amount: float
    >>> action_json(Pay(message=1, amount=40.0))
    '{"action":"pay","message":1,"amount":40}'
    """
    return msgspec.json.encode(_plain(msgspec.to_builtins(action))).decode()


@lru_cache(maxsize=64)
def _decoder(action_type: Any) -> msgspec.json.Decoder[Any]:
    try:
        return msgspec.json.Decoder(action_type)
    except TypeError as error:
        raise EnvError(
            f"action_type must be a msgspec.Struct, a dataclass, or a union of structs with tags of their own: {error}"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"key {key!r} stands twice in one object")
            seen.add(key)
    return made


def _no_constant(name: str) -> Any:
    raise _NotAJsonNumberError(f"{name} is no JSON number")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _fields(action: object) -> set[str]:
    """The JSON keys that an action may have, for types that do not forbid unknown ones themselves."""
    if isinstance(action, msgspec.Struct):
        tag = action.__struct_config__.tag_field
        return {*action.__struct_encode_fields__, *([tag] if tag else [])}
    if dataclasses.is_dataclass(action):
        return {field.name for field in dataclasses.fields(action)}
    return set(action) if isinstance(action, dict) else set()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"an action's number must be finite, not {value}")
        return int(value) if value.is_integer() and abs(value) < _EXACT_INTEGER else value
    return value


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _failure(kind: ParseFailureKind, detail: str) -> ParseFailure:
    """Details are ASCII, so that any log and terminal takes them."""
    return ParseFailure(kind=kind, detail=detail.encode("ascii", "backslashreplace").decode()[:DETAIL_LENGTH])
