"""OpenAI's wire format, outward: replies as they come, answers and events as its clients read them, with what training
needs beside it (ids, log-probs, version).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sparring.inference.batches import NewTokens
from sparring.inference.openai_wire import Shape, fits, tool_call


@dataclass(kw_only=True, slots=True)
class Speech:
    """One reply as it comes: its tokens, and the text that may be shown so far.

    Text waits while a character is only half there, while it could be the beginning of a stop text, and, where functions
    may be called, while the reply may turn out to be a call.
    """

    decode: Callable[[Sequence[int]], str]
    stops: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    shown: int = 0
    _start: int = 0
    """Tokens before this one are in ``text`` for good."""
    _before: str = ""
    """Text of the tokens before ``_start``."""

    def add(self, news: NewTokens) -> str:
        """Take over what a step brought; returns the text to show now. ``finish`` is set when it was the last."""
        self.token_ids += news.token_ids
        self.log_probs += news.log_probs
        self.finish = news.finish
        tail = self.decode(self.token_ids[self._start :])
        self.text = self._before + tail
        if self.finish is not None:
            self.text = self.decode(self.token_ids)
        elif len(self.token_ids) - self._start > 32 and not tail.endswith("\N{REPLACEMENT CHARACTER}"):
            self._start, self._before = len(self.token_ids), self.text
        places = [place for stop in self.stops if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.finish = self.text[: min(places)], "stop"
        end = len(self.text) if self.finish is not None else self._safe()
        fresh = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return fresh

    def _safe(self) -> int:
        """Up to where the text stays what it is, whatever comes."""
        if self.tools and self.text.lstrip()[:1] in ("", "{"):
            return self.shown
        end = len(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        longest = max((len(stop) for stop in self.stops), default=1)
        return max(self.shown, end - longest + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer in OpenAI's shape, with what training needs beside it."""

    id: str
    model: str
    chat: bool
    prompt: tuple[int, ...]
    version: str
    log_probs: bool
    shape: Shape
    decode: Callable[[Sequence[int]], str]
    names_ids: bool = False
    """Tokens of log-probs are called ``token_id:17`` (vLLM's ``return_tokens_as_token_ids``)."""

    def whole(self, found: Sequence[Speech]) -> dict[str, Any]:
        """The one answer of a request that does not stream."""
        choices = []
        for index, speech in enumerate(found):
            choice: dict[str, Any] = {
                "index": index, "finish_reason": speech.finish, "token_ids": speech.token_ids,
                "logprobs": self._log_probs(speech.token_ids, speech.log_probs),
            }  # fmt: skip
            if self.chat:
                call = self._call(index, speech)
                choice["message"] = {"role": "assistant", "content": None if call else speech.text}
                if call:
                    choice["message"]["tool_calls"] = [call]
                    choice["finish_reason"] = "tool_calls"
            else:
                choice["text"] = speech.text
            choices.append(choice | self._checked(speech))
        return self._head("chat.completion" if self.chat else "text_completion") | {
            "choices": choices, "prompt_token_ids": self.prompt, "usage": self.usage(found),
        }  # fmt: skip

    def usage(self, found: Sequence[Speech]) -> dict[str, int]:
        """Tokens of prompt and replies."""
        asked, replied = len(self.prompt), sum(len(speech.token_ids) for speech in found)
        return {"prompt_tokens": asked, "completion_tokens": replied, "total_tokens": asked + replied}

    def opening(self, count: int) -> bytes:
        """The first event: who speaks, and the ids of the prompt."""
        part: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": ""}
        choices = [{"index": i, **part, "finish_reason": None, "logprobs": None, "token_ids": []} for i in range(count)]
        return self._event({"choices": choices, "prompt_token_ids": self.prompt})

    def chunk(self, index: int, speech: Speech, news: NewTokens, text: str) -> bytes:
        """The event of what a step brought to one choice."""
        choice: dict[str, Any] = {
            "index": index, "finish_reason": speech.finish, "token_ids": news.token_ids,
            "logprobs": self._log_probs(news.token_ids, news.log_probs),
        }  # fmt: skip
        call = self._call(index, speech) if self.chat and speech.finish is not None else None
        if call:
            choice |= {"delta": {"tool_calls": [{"index": 0, **call}]}, "finish_reason": "tool_calls"}
        else:
            choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        if speech.finish is not None:
            choice |= self._checked(speech)
        return self._event({"choices": [choice]})

    def closing(self, found: Sequence[Speech]) -> bytes:
        """The last event but ``[DONE]``, for ``stream_options.include_usage``."""
        return self._event({"choices": [], "usage": self.usage(found)})

    def _call(self, index: int, speech: Speech) -> dict[str, Any] | None:
        return tool_call(speech.text, self.shape.tools, f"call_{self.id}_{index}")

    def _checked(self, speech: Speech) -> dict[str, bool]:
        return {"format_valid": fits(speech.text, self.shape.schema)} if self.shape.json else {}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> Any:
        if not self.log_probs:
            return None
        texts = [self.decode((token,)) for token in token_ids]
        names = [f"token_id:{token}" for token in token_ids] if self.names_ids else texts
        if not self.chat:
            return {"tokens": names, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": None}
        return {"content": [
            {"token": name, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for name, text, value in zip(names, texts, log_probs, strict=True)
        ]}  # fmt: skip

    def _event(self, more: Mapping[str, Any]) -> bytes:
        return event(self._head("chat.completion.chunk" if self.chat else "text_completion") | dict(more))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": int(time.time()), "model": self.model, "policy_version": self.version
        }  # fmt: skip


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
