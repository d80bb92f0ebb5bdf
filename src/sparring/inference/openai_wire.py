"""OpenAI's wire format, inward: requests checked field by field (replies are in ``openai_answers``).

What a request may ask for and what it gets is decided here, without a model. A field that would be ignored is refused
with 400, unless its value asks for nothing. What is enforced of a reply's form: nothing is forced, so that log-probs stay
those of the policy; ``response_format`` and ``tools`` are *checked*, and the reply says what the check found
(``choices[].format_valid``, ``message.tool_calls``). ``strict`` schemas, forced tool calls and schema words that the
check does not know are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sparring.http import RequestError
from sparring.policies.distribution import effective
from sparring.tokens.chat import ChatMessage
from sparring.types import SamplingSettings

MOST_CHOICES = 16
MOST_STOPS = 16
IGNORED = frozenset(
    {"user", "return_token_ids", "store", "metadata", "parallel_tool_calls", "service_tier", "agent", "policy"}
)
"""Fields that change nothing here: ids are always returned, calls never forced."""
KNOWN = IGNORED | {
    "model", "messages", "prompt", "n", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stream",
    "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "stop",
    "return_tokens_as_token_ids",
}  # fmt: skip
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "best_of": (1,), "echo": (False,), "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,),
    "skip_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Fields that we do not have, at the values that ask for nothing."""
TOOL_PROMPT = (
    "You can call these functions, given as JSON schemas:\n{tools}\n"
    'To call one, reply with nothing but {{"name": ..., "arguments": {{...}}}}.'
)


# ------------------------------------------------------------------------------------------------------------- requests


def check_fields(document: Mapping[str, Any]) -> None:
    """
    Raises:
        RequestError: 400, the first field that we do not have is named.
    """
    for name, value in sorted(document.items()):
        if name in KNOWN or value is None:
            continue
        if not any(_same(value, one) for one in HARMLESS.get(name, ())):
            raise RequestError(400, f"{name[:100]}: this server does not have it; leave it out")


def whole(document: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """A whole number of a request.

    Raises:
        RequestError: 400.
    """
    value = document.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise RequestError(400, f"{name}: give a whole number from {least} to {most}")
    return value


def flag(document: Mapping[str, Any], name: str) -> bool:
    """A switch of a request; off where it is left out.

    Raises:
        RequestError: 400.
    """
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f"{name}: give true or false")
    return bool(value)


def sampling_of(document: Mapping[str, Any], most_new_tokens: int) -> SamplingSettings:
    """How to sample; ``max_completion_tokens`` wins over the older ``max_tokens``.

    Raises:
        RequestError: 400.
    """
    given = {}
    for name, most in (("temperature", 100.0), ("top_p", 1.0)):
        value = document.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most
        ):
            raise RequestError(400, f"{name}: give a number from 0 to {most:g}")
        given[name] = 1.0 if value is None else float(value)
    name = "max_completion_tokens" if document.get("max_completion_tokens") is not None else "max_tokens"
    longest = whole(document, name, min(256, most_new_tokens), 1, most_new_tokens)
    if 0.0 < given["temperature"] < 1e-3:
        raise RequestError(400, "temperature: give 0 (greedy) or at least 0.001")
    try:
        effective(given["temperature"], given["top_p"])
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    return SamplingSettings(temperature=given["temperature"], top_p=given["top_p"], max_new_tokens=longest)


def fit(settings: SamplingSettings, prompt: int, context: int | None, document: Mapping[str, Any]) -> SamplingSettings:
    """The settings, with as many tokens as the context has room for where the request did not say how many.

    Raises:
        RequestError: 400, with the figures.
    """
    if context is None or prompt + settings.max_new_tokens <= context:
        return settings
    told = document.get("max_tokens") is not None or document.get("max_completion_tokens") is not None
    if told or prompt >= context:
        raise RequestError(
            400, f"{prompt} prompt tokens and {settings.max_new_tokens} to come exceed the context of {context}: "
            "shorten the prompt or lower max_tokens", kind="context_length_exceeded",
        )  # fmt: skip
    return SamplingSettings(temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=context - prompt)


def seed_of(document: Mapping[str, Any]) -> int | None:
    """
    Raises:
        RequestError: 400.
    """
    seed = document.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise RequestError(400, "seed: give a whole number from 0")
    return seed


def stops_of(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts at which a reply ends; the text is cut before them, the token ids are all that was sampled.

    Raises:
        RequestError: 400.
    """
    given = document.get("stop")
    stops = [given] if isinstance(given, str) else given
    if stops is None or stops == []:
        return ()
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(one, str) and 0 < len(one) <= 200 for one in stops)
    ):
        raise RequestError(400, f"stop: give a text, or a list of at most {MOST_STOPS}, each of 1 to 200 characters")
    return tuple(stops)


def log_probs_of(document: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether log-probs are wanted; those of other tokens than the chosen ones are not to be had.

    Raises:
        RequestError: 400.
    """
    if chat:
        whole(document, "top_logprobs", 0, 0, 0)
        return flag(document, "logprobs")
    if isinstance(document.get("logprobs"), bool):
        return flag(document, "logprobs")
    return document.get("logprobs") is not None and whole(document, "logprobs", 0, 0, 1) >= 0


def messages_of(document: Mapping[str, Any]) -> list[ChatMessage]:
    """The chat, the tools in words before it.

    Raises:
        RequestError: 400, the message that is wrong is named.
    """
    given = document.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= 4096:
        raise RequestError(400, "messages: give a list of 1 to 4096")
    found = [_message(index, message) for index, message in enumerate(given)]
    tools = tools_of(document)
    if tools:
        text = TOOL_PROMPT.format(tools="\n".join(_json(tool["function"]) for tool in tools))
        if found[0].role == "system":
            found[0] = ChatMessage(role="system", content=f"{found[0].content}\n\n{text}")
        else:
            found.insert(0, ChatMessage(role="system", content=text))
    return found


def _message(index: int, message: Any) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if role == "assistant" and content is None and isinstance(message.get("tool_calls"), list):
        content = "\n".join(_call_text(index, call) for call in message["tool_calls"])
    known = isinstance(role, str) and role in ("system", "developer", "user", "assistant", "tool")
    if not isinstance(role, str) or not known or not isinstance(content, str):
        raise RequestError(400, f"messages[{index}]: give role (system, user, assistant or tool) and content as text")
    said_by = {"developer": "system", "tool": "user"}.get(role, role)
    return ChatMessage(role=said_by, content=content.encode("utf-8", "replace").decode())


def _call_text(index: int, call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(400, f"messages[{index}].tool_calls: each holds a function with a name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise RequestError(400, f"messages[{index}].tool_calls: arguments are a text")
    return f'{{"name": {_json(function["name"])}, "arguments": {arguments or "{}"}}}'


def tools_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that may be called; none with ``tool_choice`` none.

    Raises:
        RequestError: 400.
    """
    choice = document.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(400, "tool_choice: auto or none; this server cannot force a call")
    tools = document.get("tools")
    if tools is None or tools == []:
        return []
    if (
        not isinstance(tools, list)
        or len(tools) > 128
        or not all(
            isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
            for t in tools
        )
    ):
        raise RequestError(400, "tools: give a list of at most 128 functions with names")
    return [] if choice == "none" else tools


def _json(content: Any) -> str:
    try:
        return msgspec.json.encode(content).decode()
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request holds what is no JSON: {str(error)[:100]}") from error


# ------------------------------------------------------------------------------------------------- the form of a reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a reply is to be, as far as it is checked."""

    tools: tuple[str, ...] = ()
    """Names of the functions that it may call."""
    json: bool = False
    """It is to be one JSON object, or a value of the schema."""
    schema: Mapping[str, Any] | None = None


def shape_of(document: Mapping[str, Any]) -> Shape:
    """
    Raises:
        RequestError: 400, for what we cannot keep to.
    """
    names = tuple(tool["function"]["name"] for tool in tools_of(document))
    wanted = document.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return Shape(tools=names)
    if kind == "json_object":
        return Shape(tools=names, json=True)
    schema = wanted.get("json_schema") if kind == "json_schema" and isinstance(wanted, dict) else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise RequestError(400, "response_format: give text, json_object, or json_schema with a schema")
    if schema.get("strict"):
        raise RequestError(
            400, "response_format.json_schema.strict: replies are checked (choices[].format_valid), not forced, so that "
            "their log-probs stay those of the policy; leave strict out",
        )  # fmt: skip
    check_schema(schema["schema"])
    return Shape(tools=names, json=True, schema=schema["schema"])


_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip
_CHECKED = {"type", "properties", "required", "items", "enum", "const", "additionalProperties"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
_DEEPEST = 32


def check_schema(schema: Any, depth: int = 0) -> None:
    """
    Raises:
        RequestError: 400, a word of JSON Schema that replies are not checked by is named.
    """
    where = "response_format.json_schema.schema"
    if not isinstance(schema, dict) or depth > _DEEPEST:
        raise RequestError(400, f"{where}: give objects, at most {_DEEPEST} deep")
    unknown = sorted(set(schema) - _CHECKED - _NOTES)
    if unknown:
        raise RequestError(
            400, f"{where}: replies are not checked by {unknown[0][:50]!r} ({', '.join(sorted(_CHECKED))} are)"
        )
    kinds = schema.get("type", [])
    named = kinds if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) and kind in _KINDS for kind in named):
        raise RequestError(400, f"{where}.type: give one, or a list, of {', '.join(_KINDS)}")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise RequestError(400, f"{where}.additionalProperties: only true and false are checked")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(schema.get("enum", []), list):
        raise RequestError(400, f"{where}: properties is an object, enum a list")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(400, f"{where}.required: give a list of names")
    for part in [*properties.values(), *([schema["items"]] if "items" in schema else [])]:
        check_schema(part, depth + 1)


def fits(text: str, schema: Mapping[str, Any] | None) -> bool:
    """Whether a reply is one JSON object, or a value of a schema that :func:`check_schema` has let through."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) if schema is None else _fits(document, schema)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    if kinds is not None:
        allowed = tuple(kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in _KINDS[name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            return False
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if any(name not in value for name in schema.get("required", [])):
            return False
        if schema.get("additionalProperties") is False and set(value) - set(properties):
            return False
        return all(_fits(value[name], part) for name, part in properties.items() if name in value)
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    return True


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON is: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def tool_call(text: str, tools: Sequence[str], call_id: str) -> dict[str, Any] | None:
    """The call that a reply is: one JSON object, whole, that names a known function; else None."""
    try:
        document = json.loads(text) if tools else None
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(document, dict)
        or document.get("name") not in tools
        or not isinstance(document.get("arguments"), dict)
    ):
        return None
    return {
        "id": call_id, "type": "function",
        "function": {"name": document["name"], "arguments": json.dumps(document["arguments"])},
    }  # fmt: skip
