"""Prompts of two messages in, replies with their text out: what loops and evaluations on graphs need of a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparring.inference.sampler import InProcessSampler
from sparring.policies.contract import SampleRequest
from sparring.tokens.chat import ChatMessage
from sparring.types import Reply, SamplingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt as text, and the key of its random numbers.

    >>> Asked(system="Answer.", user="path a r", key=(0, 1)).key
    (0, 1)
    """

    system: str
    user: str
    key: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """A reply. ``reply`` and ``prompt_ids`` are missing where a script spoke."""

    text: str
    """Without a closed thinking block."""
    prompt_ids: tuple[int, ...] = ()
    reply: Reply | None = None


def ask(sampler: InProcessSampler, asked: Sequence[Asked], settings: SamplingSettings) -> list[Spoken]:
    """Replies in the order of the prompts; each prompt is tokenised once.

    Raises:
        PromptError: A prompt does not leave room for the reply.
    """
    chat = sampler.policy.chat
    ids: dict[tuple[str, str], tuple[int, ...]] = {}
    requests = []
    for one in asked:
        text = (one.system, one.user)
        if text not in ids:
            ids[text] = chat.encode([ChatMessage("system", one.system), ChatMessage("user", one.user)])
        requests.append(SampleRequest(prompt_ids=ids[text], key=one.key))
    replies = sampler.sample(requests, settings) if requests else []
    return [
        Spoken(text=chat.strip_thinking(chat.decode(reply.token_ids)), prompt_ids=request.prompt_ids, reply=reply)
        for request, reply in zip(requests, replies, strict=True)
    ]
