"""An OpenAI-compatible server over the in-process engine, for agents that live elsewhere and learn from what they did.

``/v1/chat/completions``, ``/v1/completions`` (streams too), ``/v1/models``, ``/health``, ``/metrics``, and vLLM's
``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``. Answers carry what training needs: ``prompt_token_ids``,
``choices[].token_ids``, log-probs of the distribution that was sampled, and ``policy_version``.

New weights are loaded beside the old ones. A request stays with the weights it began with; new requests go to the new
ones as soon as they are there; the old are freed when their last request has ended. Nobody waits for a swap.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections import Counter
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
from sparring.inference.batches import Loaded, NewTokens, Ticket
from sparring.inference.engine import BusyError, Engine
from sparring.inference.openai_answers import Answer, Speech, event
from sparring.inference.openai_wire import (
    MOST_CHOICES,
    Shape,
    check_fields,
    fit,
    flag,
    log_probs_of,
    messages_of,
    sampling_of,
    seed_of,
    shape_of,
    stops_of,
    whole,
)
from sparring.policies.causal_lm import CausalLM
from sparring.tokens.chat import ChatMessage
from sparring.types import PolicyVersion, SamplingSettings

MOST_REQUEST_BYTES = 8 << 20
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
Putting = Callable[[str], CausalLM]
"""Puts an adapter that was read on the model, under this name; run while nothing is decoded."""
News = NewTokens | SparringError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one server takes on."""

    most_new_tokens: int = 4096
    most_adapters: int = 16
    adapter_root: Path | None = None
    """Adapters are loaded from below this directory only; None refuses all."""


class ModelServer:
    """The routes over an engine.

    Args:
        policy: The first weights.
        alias: Model name that always means the newest weights.
        engine: That decodes.
        limits: Of requests and adapters.
        read_adapter: Reads an adapter's directory, in any thread, and returns what puts it on the model. None: the model
            takes none.

    Attributes:
        trouble: Why the newest publication is not served, for ``/health``; None: nothing is wrong.
    """

    def __init__(
        self, policy: CausalLM, *, alias: str = "policy", engine: Engine | None = None, limits: ServerLimits | None = None,
        read_adapter: Callable[[Path], Putting] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.limits, self.alias = engine or Engine(), limits or ServerLimits(), alias
        self.read_adapter = read_adapter
        self.current = Loaded(name=versioned(alias, policy.version), policy=policy, version=policy.version)
        self.adapters: dict[str, Loaded] = {}
        self.trouble: str | None = None
        self._draining: set[Loaded] = set()
        self._numbers = itertools.count()
        self._swap = threading.Lock()
        self.served: Counter[str] = Counter()
        """Replies by version."""
        self.refused: Counter[int] = Counter()
        """Requests by the status that refused them."""
        self.seconds = 0.0
        """Sum over whole answers and streams, from the request to its last token."""
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
            routes=[Route(path, self._counted(handler), methods=methods) for path, handler, methods in routes],
            lifespan=lifespan,
        )

    def _counted(self, handler: Any) -> Any:
        inner = handled(handler)

        async def counted(request: Request) -> Response:
            response = await inner(request)
            if response.status_code >= 400:
                self.refused[response.status_code] += 1
            return response

        return counted

    # ---------------------------------------------------------------------------------------------------------- weights

    def swap(self, policy: CausalLM, *, version: PolicyVersion | None = None) -> None:
        """New requests go to these weights from now on; may be called from any thread."""
        version = version or policy.version
        with self._swap:
            before = self.current
            self.current = Loaded(name=versioned(self.alias, version), policy=policy, version=version)
            self.engine.figures.swaps += 1
        self._free(before)

    def _free(self, loaded: Loaded) -> None:
        """The weights go when the last request on them has ended: dropped, or taken off the model they share."""

        def freed(one: Loaded) -> None:
            self._draining.discard(one)
            if one.policy.adapter_name is not None:
                one.policy.remove()

        self._draining.add(loaded)
        loaded.freed = freed
        self.engine.retire(loaded)

    def resolve(self, name: Any) -> Loaded:
        """The weights that a model's name means.

        Raises:
            RequestError: 404, there are none.
        """
        current = self.current
        if name is None or name in ("", self.alias, current.name):
            return current
        if isinstance(name, str) and name in self.adapters:
            return self.adapters[name]
        known = ", ".join([self.alias, current.name, *self.adapters])
        raise RequestError(404, f"no model {str(name)[:100]!r}; there are: {known}", kind="not_found_error")

    async def load_lora(self, request: Request) -> Response:
        """vLLM's: ``lora_name``, ``lora_path``, ``load_inplace``; and ``policy_version``, of which weights it is."""
        document = await json_of(request, 1 << 16)
        name, inplace = document.get("lora_name"), flag(document, "load_inplace")
        if flag(document, "is_3d_lora_weight"):
            raise RequestError(400, "is_3d_lora_weight: this server has no such adapters; leave it out")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise RequestError(400, "lora_name: give 1 to 100 letters, digits, dots, dashes and underscores")
        if self.read_adapter is None:
            raise RequestError(400, "this server takes no adapters: start it with --adapter-root")
        self._check_free(name, inplace)
        version = self._adapter_version(name, document.get("policy_version"), inplace)
        directory = self._below_root(document.get("lora_path"))
        put = await asyncio.to_thread(self.read_adapter, directory)
        inner = f"lora_{next(self._numbers)}"
        policy = await asyncio.wrap_future(self.engine.between_steps(lambda: put(inner)))
        loaded = Loaded(name=name, policy=policy, version=version)
        try:
            self._check_free(name, inplace)  # another request may have been quicker
        except RequestError:
            self._free(loaded)
            raise
        before = self.adapters.get(name)
        self.adapters[name] = loaded
        self.engine.figures.swaps += 1
        if before is not None:
            self._free(before)
        return answer({"status": "ok", "lora_name": name, "policy_version": str(version)})

    def _check_free(self, name: str, inplace: bool) -> None:
        if name in (self.alias, self.current.name) or (name in self.adapters and not inplace):
            raise RequestError(
                400, f"lora_name: {name!r} is loaded already; give load_inplace true, or a versioned name"
            )
        if name not in self.adapters and len(self.adapters) >= self.limits.most_adapters:
            raise RequestError(
                400, f"{len(self.adapters)} adapters are loaded, as many as this server takes: unload one, or start it "
                "with a higher --most-adapters",
            )  # fmt: skip

    def _adapter_version(self, name: str, told: Any, inplace: bool) -> PolicyVersion:
        """As the request says; else as the name ends (``policy-v2-150``, ``policy-v12``), which means one set of weights
        only where nothing is loaded in place; else one of our own, of incarnation 0, that is never used again."""
        if told is not None:
            try:
                return PolicyVersion.parse(str(told))
            except ValueError as error:
                raise RequestError(400, f"policy_version: {error}") from error
        found = re.search(r"-v(?:(\d{1,9})[-.])?(\d{1,17})$", name)
        if found is not None and not inplace:
            return PolicyVersion(incarnation=int(found[1] or 0), step=int(found[2]))
        return PolicyVersion(incarnation=0, step=time.time_ns() // 1000)

    async def unload_lora(self, request: Request) -> Response:
        """vLLM's: ``lora_name``. Requests that run on it finish."""
        document = await json_of(request, 1 << 16)
        found = self.adapters.pop(str(document.get("lora_name")), None)
        if found is None:
            raise RequestError(404, f"no adapter {str(document.get('lora_name'))[:100]!r}", kind="not_found_error")
        self._free(found)
        return answer({"status": "ok"})

    def _below_root(self, given: Any) -> Path:
        """A directory below the adapter root, reached without a link or ``..`` on the way.

        Raises:
            RequestError: 400; it does not tell what lies elsewhere.
        """
        root = self.limits.adapter_root
        if root is None or not isinstance(given, str) or not given or "\0" in given or len(given) > 4096:
            raise RequestError(400, "lora_path: give a directory below the server's adapter root")
        root = root.resolve()
        path = root / given
        try:
            inside = path.is_relative_to(root) and path != root and ".." not in path.parts
            steps = path.relative_to(root).parts if inside else ()
            linked = any(root.joinpath(*steps[: n + 1]).is_symlink() for n in range(len(steps)))
            linked = linked or (inside and any((path / file).is_symlink() for file in ADAPTER_FILES))
            if inside and not linked and path.is_dir():
                return path
        except (OSError, ValueError) as error:
            raise RequestError(400, "lora_path: that cannot be a directory's name") from error
        what = f"no directory {given[:200]!r} below the server's adapter root (links and .. are not followed)"
        raise RequestError(400, f"lora_path: {what}")

    # -------------------------------------------------------------------------------------------------------- questions

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        document = await json_of(request, MOST_REQUEST_BYTES)
        check_fields(document)
        loaded = self.resolve(document.get("model"))
        shape = shape_of(document)
        prompt = await asyncio.to_thread(self._encoded, loaded, messages_of(document))
        return await self._reply(request, document, loaded, prompt, shape, chat=True)

    def _encoded(self, loaded: Loaded, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        try:
            return loaded.policy.chat.encode(messages)
        except SparringError as error:
            raise RequestError(400, f"messages: {error}") from error

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``: a text, or token ids."""
        document = await json_of(request, MOST_REQUEST_BYTES)
        check_fields(document)
        for name in ("messages", "tools", "response_format"):
            if document.get(name) is not None:
                raise RequestError(400, f"{name}: /v1/chat/completions has it")
        loaded = self.resolve(document.get("model"))
        given = document.get("prompt")
        rows = int(loaded.policy.core.model.get_input_embeddings().weight.shape[0])
        if isinstance(given, list) and given and all(type(i) is int and 0 <= i < rows for i in given):
            prompt = tuple(given)
        elif isinstance(given, str) and given:
            text = given.encode("utf-8", "replace").decode()
            prompt = await asyncio.to_thread(loaded.policy.chat.encode_text, text)
        else:
            raise RequestError(400, f"prompt: give one text, or one list of token ids from 0 to {rows - 1}")
        return await self._reply(request, document, loaded, prompt, Shape(), chat=False)

    async def _reply(
        self, request: Request, document: Mapping[str, Any], loaded: Loaded, prompt: tuple[int, ...], shape: Shape, *,
        chat: bool,
    ) -> Response:  # fmt: skip
        count, stops = whole(document, "n", 1, 1, MOST_CHOICES), stops_of(document)
        settings = sampling_of(document, self.limits.most_new_tokens)
        settings = fit(settings, len(prompt), loaded.policy.core.context_length, document)
        streams, log_probs = flag(document, "stream"), log_probs_of(document, chat=chat)
        options = document.get("stream_options")
        if options is not None and not (streams and isinstance(options, dict)):
            raise RequestError(400, "stream_options: an object, and only with stream true")
        tickets, queues, number = self._submit(loaded, prompt, settings, count, seed_of(document))
        said = Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{int(self.started * 1e3):x}-{number}", model=loaded.name, chat=chat,
            prompt=prompt, version=str(loaded.version), log_probs=log_probs, shape=shape, decode=loaded.policy.chat.decode,
            names_ids=flag(document, "return_tokens_as_token_ids"),
        )  # fmt: skip
        speeches = [Speech(decode=said.decode, stops=stops, tools=shape.tools) for _ in tickets]
        if streams:
            events = self._stream(said, tickets, queues, speeches, usage=flag(options or {}, "include_usage"))
            return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        return await self._gathered(request, said, tickets, queues, speeches)

    def _submit(
        self, loaded: Loaded, prompt: tuple[int, ...], settings: SamplingSettings, count: int, seed: int | None
    ) -> tuple[list[Ticket], list[asyncio.Queue[News]], int]:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        queues: list[asyncio.Queue[News]] = [asyncio.Queue() for _ in range(count)]

        def telling(queue: asyncio.Queue[News]) -> Callable[[News], None]:
            def tell(news: News) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, news)

            return tell

        key = (int(self.started * 1e6), number) if seed is None else (seed,)
        tickets = [
            Ticket(prompt_ids=prompt, settings=settings, key=(*key, index), loaded=loaded, notify=telling(queue))
            for index, queue in enumerate(queues)
        ]
        try:
            self.engine.submit(tickets)
        except BusyError as error:
            raise RequestError(429, str(error), headers={"Retry-After": "1"}) from error
        return tickets, queues, number

    async def _gathered(
        self, request: Request, said: Answer, tickets: Sequence[Ticket], queues: Sequence[asyncio.Queue[News]],
        speeches: Sequence[Speech],
    ) -> Response:  # fmt: skip
        """The whole answer, unless the client hangs up before."""
        began = time.monotonic()
        gathering = asyncio.ensure_future(_all_said(self.engine, tickets, queues, speeches))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                return Response(status_code=499)
            gathering.result()
        except SparringError as error:
            raise RequestError(503, str(error), headers={"Retry-After": "1"}, kind="server_error") from error
        finally:
            gathering.cancel()
            leaving.cancel()
            for ticket in tickets:
                self.engine.cancel(ticket)
        self._done(said, len(tickets), began)
        return answer(said.whole(speeches))

    async def _stream(
        self, said: Answer, tickets: Sequence[Ticket], queues: Sequence[asyncio.Queue[News]],
        speeches: Sequence[Speech], *, usage: bool,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        began = time.monotonic()
        running = {asyncio.ensure_future(queue.get()): index for index, queue in enumerate(queues)}
        try:
            yield said.opening(len(queues))
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, news = running.pop(task), task.result()
                    if isinstance(news, SparringError):
                        yield event({"error": {"message": str(news), "type": "server_error", "code": 503}})
                        return
                    speech = speeches[index]
                    text = speech.add(news)
                    yield said.chunk(index, speech, news, text)
                    if speech.finish is None:
                        running[asyncio.ensure_future(queues[index].get())] = index
                    else:
                        self.engine.cancel(tickets[index])
            if usage:
                yield said.closing(speeches)
            self._done(said, len(tickets), began)
            yield b"data: [DONE]\n\n"
        finally:
            for task in running:
                task.cancel()
            for ticket in tickets:
                self.engine.cancel(ticket)

    def _done(self, said: Answer, replies: int, began: float) -> None:
        self.served[said.version] += replies
        self.seconds += time.monotonic() - began

    # -------------------------------------------------------------------------------------------------------- operators

    async def models(self, request: Request) -> Response:
        """``/v1/models``: the alias, the present version's name, and the adapters'."""
        rows = [(self.alias, self.current), (self.current.name, self.current), *self.adapters.items()]
        return answer({"object": "list", "data": [
            {"id": name, "object": "model", "created": int(self.started), "owned_by": "sparring",
             "policy_version": str(loaded.version), "max_model_len": loaded.policy.core.context_length}
            for name, loaded in rows
        ]})  # fmt: skip

    async def health(self, request: Request) -> Response:
        """``/health``: 503 when the engine's thread is gone."""
        alive = self.engine.alive
        return answer(
            {"status": "ok" if alive else "stopped", "model": self.current.name,
             "policy_version": str(self.current.version), "trouble": self.trouble},
            200 if alive else 503,
        )  # fmt: skip

    async def metrics(self, request: Request) -> Response:
        """``/metrics``, as Prometheus reads it."""
        figures, engine = self.engine.figures, self.engine
        rows: list[tuple[str, str, Mapping[str, float]]] = [
            ("requests_total", "Replies begun.", {"": figures.requests}),
            ("requests_cancelled_total", "Replies whose client went away, or that met a stop text.", {"": figures.cancelled}),
            ("requests_failed_total", "Replies that the engine could not finish.", {"": figures.failed}),
            ("requests_running", "Replies that are decoded.", {"": engine.running}),
            ("requests_waiting", "Replies that have not begun.", {"": engine.waiting}),
            ("refused_total", "Answers with this status.", _labelled("status", self.refused)),
            ("prompt_tokens_total", "Tokens of prompts.", {"": figures.prompt_tokens}),
            ("prefilled_tokens_total", "Of these computed: what prompts share, once.", {"": figures.prefilled_tokens}),
            ("reply_tokens_total", "Tokens of replies.", {"": figures.reply_tokens}),
            ("steps_total", "Forward passes that decoded.", {"": figures.steps}),
            ("engine_seconds_total", "Computing.", {"": figures.seconds}),
            ("answer_seconds_total", "From request to last token, summed over answers.", {"": self.seconds}),
            ("swaps_total", "Weights that were put into service.", {"": figures.swaps}),
            ("weights_loaded", "Sets of weights in memory.", {"": 1 + len(self.adapters) + len(self._draining)}),
            ("publication_ok", "1: the run's newest publication is served.", {"": float(self.trouble is None)}),
            ("replies_total", "Replies by version.", _labelled("version", self.served)),
        ]  # fmt: skip
        lines = []
        for name, what, values in rows:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP sparring_{name} {what}", f"# TYPE sparring_{name} {kind}"]
            lines += [f"sparring_{name}{label} {value:g}" for label, value in values.items()]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _labelled(label: str, counts: Mapping[Any, int]) -> dict[str, float]:
    return {f'{{{label}="{key}"}}': count for key, count in sorted(counts.items())}


async def _all_said(
    engine: Engine, tickets: Sequence[Ticket], queues: Sequence[asyncio.Queue[News]], speeches: Sequence[Speech]
) -> None:
    """Take over all tokens of all replies of one request.

    Raises:
        SparringError: The engine could not finish.
    """
    for ticket, queue, speech in zip(tickets, queues, speeches, strict=True):
        while speech.finish is None:
            news = await queue.get()
            if isinstance(news, SparringError):
                raise news
            speech.add(news)
        engine.cancel(ticket)  # a stop text ends a reply that would go on


async def _gone(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def versioned(alias: str, version: PolicyVersion) -> str:
    """A model's name that never means other weights: of the run's incarnation and optimiser step.

    >>> versioned("policy", PolicyVersion(incarnation=2, step=150))
    'policy-v2-150'
    """
    return f"{alias}-v{version.incarnation}-{version.step}"
