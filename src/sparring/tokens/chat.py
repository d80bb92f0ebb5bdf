"""Chat template to ids, made once and exact: no second BOS, the generation header never cut, what a person or another
agent writes never turned into a control token.

What is sampled is what is trained: prompt ids come from :meth:`ChatTokenizer.encode`, reply ids from the sampler, and
text is never tokenised again. Only a supervised start (:meth:`ChatTokenizer.supervised`) turns a reply's text into ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.errors import ModelError, PromptError
from sparring.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROBE = "Quill7Probe"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat.

    >>> ChatMessage("user", "Hello").role
    'user'
    """

    role: str
    """``system``, ``user`` or ``assistant``, or whatever else the model's template knows."""
    content: str


def strip_thinking(text: str, *, opened: bool = False) -> str:
    """The text after a closed thinking block; unchanged where there is none, empty where the block never closes.

    Args:
        text: A decoded reply.
        opened: True when the template's generation header has already opened the block.

    >>> strip_thinking("<think>red lies</think> {}")
    ' {}'
    >>> strip_thinking("<think>red lies")
    ''
    >>> strip_thinking('{"text": "</think>"}')
    '{"text": "</think>"}'
    """
    if not opened and not text.lstrip().startswith(THINK_OPEN):
        return text
    return text.partition(THINK_CLOSE)[2]


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template, probed once when made.

    Attributes:
        end_ids: Ids that end a reply: EOS and end of turn, from the tokenizer, the generation configuration and the
            template itself.
        end_of_turn_id: The id the template writes after an assistant's message (EOS where it writes none).
        pad_id: An id to fill padding with. It may equal an end id: masks go by position, never by value.
        header_ids: The template's generation header, the last ids of every prompt.
        supports_thinking: The template knows ``enable_thinking`` or thinking blocks.
        enable_thinking: What is passed to the template; None leaves the template's own default.
        merges_system: The template has no system role, so system text goes in front of the first user message.
        notices: One sentence for each such departure, for the report of a run.
        vocabulary_size: How many ids the tokenizer can make, added tokens included.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, generation_config: Any = None, enable_thinking: bool | None = None
    ) -> None:
        """Args:
            tokenizer: With a chat template.
            generation_config: A transformers ``GenerationConfig`` (its ``eos_token_id`` counts), or None.
            enable_thinking: Passed to templates that know it.

        Raises:
            ModelError: There is no chat template, it cannot be rendered, or nothing ends a reply.
        """
        self.tokenizer = tokenizer
        self._any: Any = tokenizer
        try:
            template = str(self._any.get_chat_template())
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"{self.source}: the tokenizer has no chat template; set tokenizer.chat_template "
                "(or add chat_template.jinja beside the model)"
            ) from error
        if "sanitize_control_tokens" not in inspect.signature(self._any.apply_chat_template).parameters:
            raise ModelError("this transformers cannot keep control tokens out of messages: install transformers>=5.24")
        self._template_options: dict[str, Any] = {}
        self.supports_thinking = "enable_thinking" in template or THINK_CLOSE in template
        self.enable_thinking = enable_thinking
        if "enable_thinking" in template and enable_thinking is not None:
            self._template_options["enable_thinking"] = enable_thinking
        self.merges_system = False
        self.merges_system = not self._renders_system()
        self.notices: tuple[str, ...] = ()
        if self.merges_system:
            self.notices = (
                "the chat template has no system role: system text is put in front of the first user message",
            )
        self.header_ids = self._generation_header()
        self.thinking_opened = THINK_OPEN in self._text(self.header_ids) and THINK_CLOSE not in self._text(
            self.header_ids
        )
        self._special_ids = frozenset(int(i) for i in self._any.all_special_ids)
        self._think_ids = frozenset(self._token_ids((THINK_OPEN, THINK_CLOSE)))
        turn_end = self._turn_end()
        self.end_ids = self._collect_end_ids(generation_config, turn_end)
        eos = self._any.eos_token_id
        self.end_of_turn_id: int = (
            turn_end if turn_end is not None else int(eos if eos is not None else min(self.end_ids))
        )
        pad = self._any.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else self.end_of_turn_id
        self.vocabulary_size: int = len(self._any)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, enable_thinking: bool | None = None, trust_remote_code: bool = False
    ) -> ChatTokenizer:
        """Load from a directory or a Hugging Face name (``HF_HUB_OFFLINE`` respected).

        Raises:
            ModelError: There is no readable tokenizer there, or it has no chat template.
        """
        from transformers import AutoTokenizer, GenerationConfig

        loader: Any = AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        except Exception as error:  # the many ways in which a file can be missing or broken
            raise ModelError(f"{source}: no readable tokenizer ({_first_line(error)})") from error
        try:
            generation_config = GenerationConfig.from_pretrained(str(source))
        except (OSError, ValueError, TypeError):
            generation_config = None
        return cls(tokenizer, generation_config=generation_config, enable_thinking=enable_thinking)

    @property
    def source(self) -> str:
        """Where the tokenizer came from."""
        return str(getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__)

    # Prompts

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of the chat with its generation header, shape (P,). Nothing is cut and no special token is added.

        Raises:
            PromptError: There are no messages, or the template refuses them.
        """
        return tuple(self._apply(messages, generate=True))

    def fit(self, messages: Sequence[ChatMessage], limit: int) -> Prompt:
        """As :meth:`encode`, in at most ``limit`` ids: the oldest messages go first, system and the last never.

        A message of the assistant's whose own question was dropped goes with it, so that the rest still starts with a
        user's message.

        Raises:
            PromptError: What may not be dropped is longer than the limit.
        """
        kept, dropped = list(messages), 0
        while True:
            ids = self.encode(kept)
            if len(ids) <= limit:
                return Prompt(token_ids=ids, dropped_messages=dropped)
            old = [index for index, message in enumerate(kept[:-1]) if message.role != "system"]
            if not old:
                raise PromptError(
                    f"the prompt has {len(ids)} tokens with all older messages dropped and there is room for {limit}: "
                    "shorten the rules or the observation, or use a model with a longer context"
                )
            del kept[old[0]]
            dropped += 1
            while old[0] < len(kept) - 1 and kept[old[0]].role == "assistant":
                del kept[old[0]]
                dropped += 1

    def supervised(self, messages: Sequence[ChatMessage], reply: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and reply ids of a chat that is to be imitated.

        The prompt equals ``encode(messages)``. Where the whole template with the reply begins with these very ids, the
        reply is the template's own tokens up to the end of the turn; else (templates that rewrite the last message) the
        reply's text on its own and the end-of-turn id, which is what a model that samples after the header could have
        written. Tokens after the end of the turn belong to neither: a sampler stops before them.

        Returns:
            (prompt_ids of shape (P,), reply_ids of shape (R,), the end-of-turn id last).

        Raises:
            PromptError: The template refuses the messages.
        """
        prompt = self.encode(messages)
        if THINK_OPEN not in reply and THINK_CLOSE not in reply:
            whole = self._apply([*messages, ChatMessage("assistant", reply)], generate=False)
            tail = whole[len(prompt) :]
            ends = [index for index, token in enumerate(tail) if token in self.end_ids]
            if tuple(whole[: len(prompt)]) == prompt and ends:
                candidate = tuple(tail[: ends[0] + 1])
                if self.decode(candidate) == reply:
                    return prompt, candidate
        return prompt, (*self.encode_text(reply), self.end_of_turn_id)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a plain text, without a template; special tokens in it are text."""
        return tuple(int(i) for i in self._any.encode(text, add_special_tokens=False, split_special_tokens=True))

    # Replies

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a reply of shape (R,): special tokens are left out, thinking is kept."""
        return self._text([i for i in ids if i not in self._special_ids or i in self._think_ids])

    def strip_thinking(self, text: str) -> str:
        """The text after a closed thinking block, if the template has such blocks; see :func:`strip_thinking`."""
        return strip_thinking(text, opened=self.thinking_opened) if self.supports_thinking else text

    # How the template behaves

    def _text(self, ids: Sequence[int]) -> str:
        decoded = self._any.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def _token_ids(self, names: Sequence[str]) -> list[int]:
        vocabulary = self._any.get_added_vocab()
        return [int(vocabulary[name]) for name in names if name in vocabulary]

    def _apply(self, messages: Sequence[ChatMessage], *, generate: bool) -> list[int]:
        chat = [{"role": message.role, "content": message.content} for message in self._merged(messages)]
        if not chat:
            raise PromptError("a prompt needs at least one message")
        try:
            ids = self._any.apply_chat_template(
                chat,
                add_generation_prompt=generate,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **self._template_options,
            )
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(message["role"] for message in chat)
            raise PromptError(f"the chat template refuses messages with roles {roles}: {_first_line(error)}") from error
        return [int(i) for i in ids]

    def _merged(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        if not self.merges_system:
            return list(messages)
        system = [message.content for message in messages if message.role == "system"]
        rest = [message for message in messages if message.role != "system"]
        if not system:
            return rest
        for index, message in enumerate(rest):
            if message.role == "user":
                rest[index] = ChatMessage("user", "\n\n".join([*system, message.content]))
                return rest
        return [ChatMessage("user", "\n\n".join(system)), *rest]

    def _renders_system(self) -> bool:
        try:
            ids = self._apply([ChatMessage("system", _PROBE), ChatMessage("user", "Hi")], generate=True)
        except PromptError:
            return False
        return _PROBE in self._text(ids)

    def _generation_header(self) -> tuple[int, ...]:
        probe = [ChatMessage("user", "Hi")]
        try:
            with_header, without = self._apply(probe, generate=True), self._apply(probe, generate=False)
        except PromptError as error:
            raise ModelError(f"{self.source}: its chat template cannot render a user's message ({error})") from error
        return tuple(with_header[len(without) :]) if with_header[: len(without)] == without else ()

    def _turn_end(self) -> int | None:
        """The control token that the template writes after an assistant's message, if any."""
        try:
            ids = self._apply([ChatMessage("user", "Hi"), ChatMessage("assistant", _PROBE)], generate=False)
        except PromptError:
            return None
        control = (self._special_ids | frozenset(self._any.get_added_vocab().values())) - self._think_ids
        for index in range(len(ids) - 1, -1, -1):
            if _PROBE in self._text(ids[index:]):
                return None
            if ids[index] in control and all(token not in control for token in ids[index + 1 :]):
                last = ids[index]
                # A template may close the turn and then the sequence: the first of the two ends the reply.
                while index > 0 and ids[index - 1] in control:
                    index -= 1
                return int(ids[index]) if _PROBE in self._text(ids[:index]) else int(last)
        return None

    def _collect_end_ids(self, generation_config: Any, turn_end: int | None) -> frozenset[int]:
        found: set[int] = set() if turn_end is None else {turn_end}
        for value in (self._any.eos_token_id, getattr(generation_config, "eos_token_id", None)):
            if value is not None:
                found.update(int(i) for i in (value if isinstance(value, list | tuple) else [value]))
        if not found:
            raise ModelError(
                f"{self.source}: neither the tokenizer nor its template names a token that ends a reply (EOS)"
            )
        return frozenset(found)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
