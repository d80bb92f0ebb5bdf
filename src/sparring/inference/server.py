"""An OpenAI-compatible server over the in-process engine, for agents that live elsewhere and learn from what they did.

``/v1/chat/completions``, ``/v1/completions`` (streams too), ``/v1/models``, ``/health``, ``/metrics``, and vLLM's
``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``. Answers carry what training needs: ``prompt_token_ids``,
``choices[].token_ids``, log-probs of the distribution that was sampled, and ``policy_version``.

New weights are loaded beside the old ones. A request stays with the weights it began with; new requests go to the new
ones as soon as they are there; the old are freed when their last request has ended. Nobody waits for a swap.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sparring.errors import SparringError
from sparring.http import RequestError, answer, handled, json_of
from sparring.inference.engine import BusyError, Engine, Loaded, NewTokens, Ticket
from sparring.policies.causal_lm import CausalLM
from sparring.policies.distribution import effective
from sparring.tokens.chat import ChatMessage
from sparring.types import SamplingSettings

MOST_REQUEST_BYTES = 8 << 20
MOST_CHOICES = 16
IGNORED = frozenset(
    {"user", "stream_options", "return_token_ids", "store", "metadata", "parallel_tool_calls", "service_tier"}
)
"""Fields that change nothing here."""
KNOWN = IGNORED | {
    "model", "messages", "prompt", "n", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stream",
    "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "agent", "policy",
}  # fmt: skip
_TOOL_PROMPT = (
    "You can call these functions, given as JSON schemas:\n{tools}\n"
    'To call one, reply with nothing but {{"name": ..., "arguments": {{...}}}}.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one server takes on."""

    most_new_tokens: int = 4096
    adapter_root: Path | None = None
    """Adapters are loaded from below this directory only; None refuses all."""


class ModelServer:
    """The routes over an engine.

    Args:
        policy: The first weights.
        alias: Model name that always means the newest weights.
        load_adapter: Makes a policy of an adapter's directory, as ``(name, directory) -> CausalLM``; called while
            nothing is decoded. None: the model takes none.
    """

    def __init__(
        self, policy: CausalLM, *, alias: str = "policy", engine: Engine | None = None, limits: ServerLimits | None = None,
        load_adapter: Callable[[str, Path], CausalLM] | None = None,
        unload_adapter: Callable[[CausalLM], None] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.limits, self.alias = engine or Engine(), limits or ServerLimits(), alias
        self._load_adapter, self._unload_adapter = load_adapter, unload_adapter
        self.current = Loaded(name=versioned(alias, policy), policy=policy)
        self.adapters: dict[str, Loaded] = {}
        self._draining: list[Loaded] = []
        self._numbers = itertools.count()
        self._swap = threading.Lock()
        self.served: dict[str, int] = {}
        """Replies by version."""
        self.refused = 0
        self.started = time.time()

    def app(self, *, lifespan: Any = None) -> Starlette:
        """The ASGI application."""
        post, get = ["POST"], ["GET"]
        routes = [
            ("/health", self.health, get), ("/metrics", self.metrics, get), ("/v1/models", self.models, get),
            ("/v1/chat/completions", self.chat, post), ("/v1/completions", self.completions, post),
            ("/v1/load_lora_adapter", self.load_lora, post), ("/v1/unload_lora_adapter", self.unload_lora, post),
        ]  # fmt: skip
        return Starlette(
            routes=[Route(path, handled(handler), methods=methods) for path, handler, methods in routes],
            lifespan=lifespan,
        )

    # ---------------------------------------------------------------------------------------------------------- weights

    def swap(self, policy: CausalLM) -> None:
        """New requests go to these weights from now on; may be called from any thread."""
        with self._swap:
            before, self.current = self.current, Loaded(name=versioned(self.alias, policy), policy=policy)
            self.engine.retire(before)
            self._draining = [one for one in [*self._draining, before] if one.uses > 0]
            self.engine.figures.swaps += 1

    def resolve(self, name: Any) -> Loaded:
        """The weights that a model's name means.

        Raises:
            RequestError: 404, there are none.
        """
        if name is None or name in ("", self.alias, self.current.name):
            return self.current
        if isinstance(name, str) and name in self.adapters:
            return self.adapters[name]
        known = ", ".join([self.alias, self.current.name, *self.adapters])
        raise RequestError(404, f"no model {str(name)[:100]!r}; there are: {known}", kind="not_found_error")

    async def load_lora(self, request: Request) -> Response:
        document = await json_of(request, 1 << 16)
        name, given = document.get("lora_name"), document.get("lora_path")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
            raise RequestError(400, "lora_name: give 1 to 100 letters, digits, dashes and underscores")
        if self._load_adapter is None:
            raise RequestError(400, "this model takes no adapters: start the server with an adapter root")
        if name in (self.alias, self.current.name) or (name in self.adapters and not document.get("load_inplace")):
            raise RequestError(
                400, f"lora_name: {name!r} is loaded already; give load_inplace true, or a versioned name"
            )
        directory = self._below_root(given)
        load = self._load_adapter
        inner = f"{name}_{next(self._numbers)}"
        try:
            policy = await asyncio.wrap_future(self.engine.between_steps(lambda: load(inner, directory)))
        except SparringError as error:
            raise RequestError(400, str(error)) from error
        before = self.adapters.get(name)
        self.adapters[name] = Loaded(name=name, policy=policy)
        if before is not None:
            await self._free(before)
        return answer({"status": "ok", "lora_name": name})

    async def unload_lora(self, request: Request) -> Response:
        document = await json_of(request, 1 << 16)
        found = self.adapters.pop(str(document.get("lora_name")), None)
        if found is None:
            raise RequestError(404, f"no adapter {str(document.get('lora_name'))[:100]!r}", kind="not_found_error")
        await self._free(found)
        return answer({"status": "ok"})

    async def _free(self, loaded: Loaded) -> None:
        """Retire, and drop the weights when the last request has ended."""
        self.engine.retire(loaded)

        async def drained() -> None:
            while loaded.uses:
                await asyncio.sleep(0.02)
            unload = self._unload_adapter
            if unload is not None:
                await asyncio.wrap_future(self.engine.between_steps(lambda: unload(loaded.policy)))

        task = asyncio.create_task(drained())
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)

    def _below_root(self, given: Any) -> Path:
        root = self.limits.adapter_root
        if root is None or not isinstance(given, str) or "\0" in given:
            raise RequestError(400, "lora_path: give a directory below the server's adapter root")
        root = root.resolve()
        path = (root / given).resolve()
        if not path.is_relative_to(root) or path == root or not path.is_dir():
            raise RequestError(400, f"lora_path: no directory {given[:200]!r} below the server's adapter root")
        return path

    # -------------------------------------------------------------------------------------------------------- questions

    async def chat(self, request: Request) -> Response:
        document = await json_of(request, MOST_REQUEST_BYTES)
        self._known(document)
        loaded = self.resolve(document.get("model"))
        messages = messages_of(document)
        try:
            prompt = loaded.policy.chat.encode(messages)
        except SparringError as error:
            raise RequestError(400, f"messages: {error}") from error
        return await self._reply(request, document, loaded, prompt, chat=True)

    async def completions(self, request: Request) -> Response:
        document = await json_of(request, MOST_REQUEST_BYTES)
        self._known(document)
        loaded = self.resolve(document.get("model"))
        given = document.get("prompt")
        rows = int(loaded.policy.core.model.get_input_embeddings().weight.shape[0])
        if isinstance(given, list) and given and all(type(i) is int and 0 <= i < rows for i in given):
            prompt = tuple(given)
        elif isinstance(given, str) and given:
            prompt = tuple(loaded.policy.chat.encode_text(given))
        else:
            raise RequestError(400, f"prompt: give a text, or token ids from 0 to {rows - 1}")
        return await self._reply(request, document, loaded, prompt, chat=False)

    def _known(self, document: Mapping[str, Any]) -> None:
        unknown = sorted(name for name, value in document.items() if name not in KNOWN and value is not None)
        harmless = {
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "logit_bias": {},
            "stop": [],
            "best_of": 1,
            "echo": False,
        }
        unknown = [name for name in unknown if not (name in harmless and document[name] == harmless[name])]
        if unknown:
            raise RequestError(400, f"{unknown[0][:100]}: this server does not have it; leave it out")

    async def _reply(
        self, request: Request, document: Mapping[str, Any], loaded: Loaded, prompt: tuple[int, ...], *, chat: bool
    ) -> Response:
        settings, count = sampling_of(document, self.limits), whole(document, "n", 1, 1, MOST_CHOICES)
        context = loaded.policy.core.context_length
        if context is not None and len(prompt) + settings.max_new_tokens > context:
            if "max_tokens" in document or "max_completion_tokens" in document or len(prompt) >= context:
                raise RequestError(
                    400,
                    f"{len(prompt)} prompt tokens and {settings.max_new_tokens} to come exceed the context of {context}",
                )
            settings = SamplingSettings(
                temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=context - len(prompt)
            )
        shape, log_probs = reply_shape(document), bool(document.get("logprobs")) or document.get("logprobs") == 0
        seed = document.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
            raise RequestError(400, "seed: give a whole number from 0")
        number = next(self._numbers)
        loop, streams = asyncio.get_running_loop(), document.get("stream") is True
        queues: list[asyncio.Queue[NewTokens | BaseException]] = [asyncio.Queue() for _ in range(count)]

        def notify(queue: asyncio.Queue[NewTokens | BaseException]) -> Callable[[NewTokens | BaseException], None]:
            def tell(news: NewTokens | BaseException) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, news)

            return tell

        key = (int(self.started * 1e6), number) if seed is None else (seed,)
        tickets = [
            Ticket(prompt_ids=prompt, settings=settings, key=(*key, index), loaded=loaded, notify=notify(queue))
            for index, queue in enumerate(queues)
        ]
        try:
            self.engine.submit(tickets)
        except BusyError as error:
            self.refused += 1
            raise RequestError(429, str(error), headers={"Retry-After": "1"}) from error
        said = _Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{number}-{int(self.started)}", model=loaded.name, chat=chat, prompt=prompt,
            version=str(loaded.version), log_probs=log_probs, shape=shape, decode=loaded.policy.chat.decode,
        )  # fmt: skip
        if streams:
            return StreamingResponse(
                self._stream(said, tickets, queues), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
            )
        gathering = asyncio.gather(*(gathered(queue) for queue in queues))
        leaving = asyncio.create_task(_gone(request))
        try:
            futures: set[asyncio.Future[Any]] = {gathering, leaving}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                gathering.cancel()
                return Response(status_code=499)
            found = gathering.result()
        except SparringError as error:
            raise RequestError(503, str(error), headers={"Retry-After": "1"}, kind="server_error") from error
        finally:
            leaving.cancel()
            for ticket in tickets:
                self.engine.cancel(ticket)
        self.served[said.version] = self.served.get(said.version, 0) + count
        return answer(said.whole(found))

    async def _stream(
        self, said: _Answer, tickets: Sequence[Ticket], queues: Sequence[asyncio.Queue[NewTokens | BaseException]]
    ) -> AsyncIterator[bytes]:
        try:
            for chunk in said.opening(len(queues)):
                yield chunk
            running = {asyncio.ensure_future(queue.get()): index for index, queue in enumerate(queues)}
            so_far: list[list[int]] = [[] for _ in queues]
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, news = running.pop(task), task.result()
                    if isinstance(news, BaseException):
                        yield (
                            b"data: "
                            + json.dumps({"error": {"message": str(news), "type": "server_error"}}).encode()
                            + b"\n\n"
                        )
                        return
                    yield said.chunk(index, so_far[index], news)
                    if news.finish is None:
                        running[asyncio.ensure_future(queues[index].get())] = index
            self.served[said.version] = self.served.get(said.version, 0) + len(queues)
            yield b"data: [DONE]\n\n"
        finally:
            for ticket in tickets:
                self.engine.cancel(ticket)

    # -------------------------------------------------------------------------------------------------------- operators

    async def models(self, request: Request) -> Response:
        names = [self.alias, self.current.name, *self.adapters]
        rows = [{"id": name, "object": "model", "created": int(self.started), "owned_by": "sparring"} for name in names]
        return answer({"object": "list", "data": rows})

    async def health(self, request: Request) -> Response:
        return answer({"status": "ok", "model": self.current.name, "policy_version": str(self.current.version)})

    async def metrics(self, request: Request) -> Response:
        figures, engine = self.engine.figures, self.engine
        lines = [
            f"sparring_requests_total {figures.requests}", f"sparring_requests_refused_total {self.refused}",
            f"sparring_requests_running {engine.running}", f"sparring_requests_waiting {engine.waiting}",
            f"sparring_prompt_tokens_total {figures.prompt_tokens}",
            f"sparring_prefilled_tokens_total {figures.prefilled_tokens}",
            f"sparring_reply_tokens_total {figures.reply_tokens}", f"sparring_swaps_total {figures.swaps}",
            f"sparring_versions_loaded {1 + sum(one.uses > 0 for one in self._draining) + len(self.adapters)}",
        ]  # fmt: skip
        lines += [
            f'sparring_replies_total{{version="{version}"}} {count}' for version, count in sorted(self.served.items())
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


_TASKS: set[asyncio.Task[None]] = set()
"""asyncio keeps only weak references to tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What the reply is to be, as far as we check it."""

    tools: tuple[str, ...] = ()
    json: bool = False
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """An answer in OpenAI's shape."""

    id: str
    model: str
    chat: bool
    prompt: tuple[int, ...]
    version: str
    log_probs: bool
    shape: _Shape
    decode: Callable[[Sequence[int]], str]

    def whole(self, found: Sequence[NewTokens]) -> dict[str, Any]:
        choices = []
        for index, news in enumerate(found):
            text = self.decode(news.token_ids)
            choice: dict[str, Any] = {
                "index": index, "finish_reason": news.finish, "token_ids": list(news.token_ids),
                "logprobs": self._log_probs(news),
            }  # fmt: skip
            if self.chat:
                call = tool_call(text, self.shape.tools, f"call_{self.id}_{index}")
                choice["message"] = {
                    "role": "assistant",
                    "content": None if call else text,
                    **({"tool_calls": [call]} if call else {}),
                }
                if call:
                    choice["finish_reason"] = "tool_calls"
                if self.shape.json:
                    choice["format_valid"] = fits(text, self.shape.schema)
            else:
                choice["text"] = text
            choices.append(choice)
        asked, replied = len(self.prompt), sum(len(news.token_ids) for news in found)
        return self._head("chat.completion" if self.chat else "text_completion") | {
            "choices": choices, "prompt_token_ids": list(self.prompt),
            "usage": {"prompt_tokens": asked, "completion_tokens": replied, "total_tokens": asked + replied},
        }  # fmt: skip

    def opening(self, count: int) -> list[bytes]:
        """The first chunk: who speaks, and the ids of the prompt."""
        if not self.chat:
            return [self._event({"choices": [], "prompt_token_ids": list(self.prompt)})]
        choices = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for i in range(count)
        ]
        return [self._event({"choices": choices, "prompt_token_ids": list(self.prompt)})]

    def chunk(self, index: int, so_far: list[int], news: NewTokens) -> bytes:
        before = self.decode(so_far)
        so_far.extend(news.token_ids)
        after = self.decode(so_far)
        if news.finish is None and after.endswith("\N{REPLACEMENT CHARACTER}"):
            after = before  # the rest of a character is still to come
        text = after[len(before) :]
        choice: dict[str, Any] = {
            "index": index, "finish_reason": news.finish, "token_ids": list(news.token_ids), "logprobs": self._log_probs(news),
        }  # fmt: skip
        choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        return self._event({"choices": [choice]})

    def _log_probs(self, news: NewTokens) -> Any:
        if not self.log_probs:
            return None
        texts = [self.decode((token,)) for token in news.token_ids]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": list(news.log_probs), "top_logprobs": None, "text_offset": []}
        return {"content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, news.log_probs, strict=True)
        ]}  # fmt: skip

    def _event(self, more: Mapping[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + json.dumps(self._head(kind) | dict(more)).encode() + b"\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": int(time.time()), "model": self.model, "policy_version": self.version
        }  # fmt: skip


async def gathered(queue: asyncio.Queue[NewTokens | BaseException]) -> NewTokens:
    """All tokens of one reply."""
    ids: list[int] = []
    log_probs: list[float] = []
    while True:
        news = await queue.get()
        if isinstance(news, BaseException):
            raise news
        ids += news.token_ids
        log_probs += news.log_probs
        if news.finish is not None:
            return NewTokens(token_ids=tuple(ids), log_probs=tuple(log_probs), finish=news.finish)


async def _gone(request: Request) -> None:
    """Returns when the client has hung up."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def versioned(alias: str, policy: CausalLM) -> str:
    """A model's name that never means other weights.

    ``policy-v2-150``: of the run's incarnation and optimiser step.
    """
    return f"{alias}-v{policy.version.incarnation}-{policy.version.step}"


# ------------------------------------------------------------------------------------------------------------- requests


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


def sampling_of(document: Mapping[str, Any], limits: ServerLimits) -> SamplingSettings:
    """
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
    field = "max_completion_tokens" if document.get("max_completion_tokens") is not None else "max_tokens"
    longest = whole(document, field, min(256, limits.most_new_tokens), 1, limits.most_new_tokens)
    try:
        effective(given["temperature"], given["top_p"])
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    return SamplingSettings(temperature=given["temperature"], top_p=given["top_p"], max_new_tokens=longest)


def messages_of(document: Mapping[str, Any]) -> list[ChatMessage]:
    """The chat, the tools in words before it.

    Raises:
        RequestError: 400, the message that is wrong is named.
    """
    given = document.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= 4096:
        raise RequestError(400, "messages: give a list of 1 to 4096")
    found: list[ChatMessage] = []
    for index, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if role == "assistant" and content is None and isinstance(message.get("tool_calls"), list):
            content = "\n".join(_call_text(call) for call in message["tool_calls"])
        if (
            not isinstance(role, str)
            or role not in ("system", "developer", "user", "assistant", "tool")
            or not isinstance(content, str)
        ):
            raise RequestError(
                400, f"messages[{index}]: give role (system, user, assistant or tool) and content as text"
            )
        said_by = {"developer": "system", "tool": "user"}.get(role, role)
        found.append(ChatMessage(role=said_by, content=content.encode("utf-8", "replace").decode()))
    tools = document.get("tools")
    if tools and document.get("tool_choice") != "none":
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
            for t in tools
        ):
            raise RequestError(400, "tools: give a list of functions with names")
        text = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
        if found[0].role == "system":
            found[0] = ChatMessage(role="system", content=f"{found[0].content}\n\n{text}")
        else:
            found.insert(0, ChatMessage(role="system", content=text))
    return found


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(400, "messages: a tool call holds a function")
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {function.get("arguments") or "{}"}}}'


def reply_shape(document: Mapping[str, Any]) -> _Shape:
    """
    Raises:
        RequestError: 400, for what we cannot keep to.
    """
    tools = document.get("tools") if document.get("tool_choice") != "none" else None
    names = (
        tuple(tool["function"]["name"] for tool in tools) if isinstance(tools, list) and "messages" in document else ()
    )
    if document.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError(400, "tool_choice: auto and none; this server cannot force a call")
    wanted = document.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return _Shape(tools=names)
    if kind == "json_object":
        return _Shape(tools=names, json=True)
    schema = wanted.get("json_schema") if kind == "json_schema" and isinstance(wanted, dict) else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise RequestError(400, "response_format: give text, json_object, or json_schema with a schema")
    if schema.get("strict"):
        raise RequestError(
            400, "response_format.json_schema.strict: replies are checked (choices[].format_valid), not forced, so that their "
            "log-probs stay those of the policy; leave strict out",
        )  # fmt: skip
    return _Shape(tools=names, json=True, schema=schema["schema"])


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


_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


def fits(text: str, schema: Mapping[str, Any] | None) -> bool:
    """Whether a reply is one JSON object, and of the schema as far as type, properties, required, items and enum go."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) if schema is None else _fits(document, schema, 0)


def _fits(value: Any, schema: Any, depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth > 32:
        return True
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    allowed = tuple(kind for name in named for kind in _KINDS.get(str(name), ()))
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
        return False
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    if isinstance(value, dict):
        required, properties = schema.get("required") or [], schema.get("properties") or {}
        if any(name not in value for name in required):
            return False
        if schema.get("additionalProperties") is False and set(value) - set(properties):
            return False
        return all(_fits(value[name], part, depth + 1) for name, part in properties.items() if name in value)
    if isinstance(value, list):
        return all(_fits(item, schema.get("items"), depth + 1) for item in value)
    return True


@contextlib.asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[None]:
    """For the end of a server: what runs is told so."""
    try:
        yield
    finally:
        await asyncio.to_thread(engine.close)
