"""Prompts: what is shared first, made once, cut by rule and never at the generation header (market.md T3, T13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.agents.agent import build_prompt, prompt_messages
from sparring.errors import EnvError, PromptError
from sparring.tokens.chat import ChatMessage
from sparring.types import Prompt, PromptParts

HEADER = (1, 2, 3)


class Letters:
    """A tokenizer with one id a character and a generation header; counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        self.calls += 1
        text = "".join(f"<{message.role}>{message.content}" for message in messages)
        return (*(ord(letter) + 10 for letter in text), *HEADER)


def read(prompt: Prompt) -> str:
    return "".join(chr(token - 10) for token in prompt.token_ids[: -len(HEADER)])


def inbox(messages: Sequence[str]) -> Callable[[int | None], PromptParts]:
    def render(newest: int | None) -> PromptParts:
        kept = messages if newest is None else messages[max(0, len(messages) - newest) :]
        return PromptParts(shared="Tick 3", private="\n".join(["Cash 10", *kept]))

    return render


def build(messages: Sequence[str], limit: int, tokenizer: Letters | None = None) -> Prompt:
    return build_prompt(
        tokenizer or Letters(),
        rules="Rules.",
        team_text="You are blue.",
        persona="Mara, calm.",
        render=inbox(messages),
        max_prompt_tokens=limit,
    )


def test_what_all_share_comes_first_then_the_team_then_the_private_part() -> None:
    assert read(build(["m1"], 500)) == "<system>Rules.\nTick 3<user>You are blue.\nMara, calm.\nCash 10\nm1"


def test_agents_of_a_tick_share_a_prefix_up_to_their_team_and_a_team_up_to_its_persona() -> None:
    def prompt(team: str, persona: str) -> str:
        return read(build_prompt(Letters(), rules="Rules.", team_text=team, persona=persona, render=inbox([]),
                                 max_prompt_tokens=500))  # fmt: skip

    shared = "<system>Rules.\nTick 3<user>"
    assert prompt("You are red.", "A.").startswith(shared)
    assert prompt("You are blue.", "B.").startswith(shared + "You are blue.\n")
    assert prompt("You are blue.", "C.").startswith(shared + "You are blue.\n")


def test_nothing_is_added_to_what_environment_and_persona_say() -> None:  # T13: no label of a team slips in
    parts = PromptParts(shared="s", private="p")
    system, user = prompt_messages(rules="r", team_text="t", persona="n", parts=parts)
    assert (system.content, user.content) == ("r\ns", "t\nn\np")
    system, user = prompt_messages(rules="r", team_text="", persona="n", parts=PromptParts(shared="", private="p"))
    assert (system.content, user.content) == ("r", "n\np")


def test_a_prompt_that_fits_is_tokenised_exactly_once() -> None:
    tokenizer = Letters()
    assert build(["m1", "m2"], 500, tokenizer).dropped_messages == 0
    assert tokenizer.calls == 1


def test_too_long_drops_the_oldest_messages_and_keeps_the_header() -> None:  # T3
    messages = [f"message {i}" for i in range(10)]
    whole = len(build(messages, 10_000).token_ids)
    line = len("message 0\n")
    prompt = build(messages, whole - 2 * line - 1)
    assert prompt.dropped_messages == 3
    assert read(prompt).endswith("message 3\nmessage 4\nmessage 5\nmessage 6\nmessage 7\nmessage 8\nmessage 9")
    assert "message 2" not in read(prompt)
    assert prompt.token_ids[-3:] == HEADER


def test_all_messages_may_go_then_it_is_a_clear_error() -> None:
    bare = len(build([], 10_000).token_ids)
    assert build(["a long message"], bare).dropped_messages == 1
    with pytest.raises(
        PromptError, match=rf"{bare} tokens without any message, max_prompt_tokens is {bare - 1}: raise"
    ):
        build(["a long message"], bare - 1)
    with pytest.raises(PromptError, match=f"the prompt has {bare} tokens"):
        build([], bare - 1)


@given(messages=st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), min_size=1), max_size=40),
       limit=st.integers(50, 700))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_it_keeps_as_many_of_the_newest_as_fit(messages: list[str], limit: int) -> None:
    lengths = [len(build(messages[i:], 100_000).token_ids) for i in range(len(messages) + 1)]
    fitting = [dropped for dropped, length in enumerate(lengths) if length <= limit]
    if not fitting:
        with pytest.raises(PromptError):
            build(messages, limit)
        return
    prompt = build(messages, limit)
    assert prompt.dropped_messages == fitting[0]
    assert len(prompt.token_ids) == lengths[fitting[0]] <= limit


def test_a_renderer_that_is_never_whole_with_a_number_breaks_the_contract() -> None:
    def render(newest: int | None) -> PromptParts:
        return PromptParts(shared="", private="x" * 600 if newest is None else "x" * 600 + "(cut)")

    with pytest.raises(EnvError, match="newest=None"):
        build_prompt(Letters(), rules="", team_text="", persona="", render=render, max_prompt_tokens=20)
