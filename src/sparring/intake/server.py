"""The gateway, ``sparring serve intake``: trajectories in over HTTP, each kept once, acknowledged when it is on disk.

Three ways in:

- ``POST /v1/trajectories``: our own, JSON or msgpack (``application/msgpack``), ``Content-Encoding: zstd`` if you like; a
  verdict for each. ``POST /v1/rollouts``: small policies' rollouts, sealed by ``intake.codec``. ``POST /v1/traces``:
  OpenEnv's ``TrainingTrace``. ``POST /api/crl/trajectories``: the Feed API's.
- ``/sessions/{id}/v1/...`` as the base URL of any OpenAI client: calls go to the upstream server and are recorded with
  the token ids and log-probs that it sampled. Parallel sub-agents and rewritten histories are branches of their own.
- ``POST /sessions/{id}/reward`` and ``/end``, sooner or later, from anywhere; revised until a turn is consumed, then 409.

The Feed API's routes (spec/market.md 1.7) show what came in to trainers that know only those. Its cursor and its dates are
the order in which rows became ready, so that no page skips or repeats what arrives, or is rewarded, meanwhile (the
original filtered by date and by id at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import blake3
import httpx
import msgspec
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sparring.http import MOST_BODY_BYTES, RequestError, answer, body_of, handled, json_of
from sparring.intake.codec import decode as decode_rollouts
from sparring.intake.trajectory_log import ConflictError, FullError, LogError, NewItem, Status, TrajectoryLog, Verdict
from sparring.intake.wire import (
    Call,
    LoggedTrajectory,
    Message,
    PostedTrajectory,
    WireError,
    check_call,
    check_key,
    decode_body,
    encode_body,
    forks,
    from_feed,
    from_training_trace,
    read_document,
    read_posted,
    to_feed,
)

MOST_ITEMS = 1000
"""Of one request."""
SHOWN = (Status.READY, Status.BATCHED, Status.TRAINED)
TEAMS = ("red", "blue", "gray")


class Gateway:
    """The routes over one log.

    Args:
        log: Where everything goes; whoever makes it closes it.
        upstream: Base URL of the model server, with its ``/v1``; None leaves the proxy out.
        upstream_key: Its bearer token.
        idle_seconds: Sessions of which nothing is heard for so long end by themselves.
        most_bytes: Of one body, also after unpacking.
    """

    def __init__(
        self, log: TrajectoryLog, *, upstream: str | None = None, upstream_key: str | None = None,
        idle_seconds: float = 3600.0, most_bytes: int = MOST_BODY_BYTES,
    ) -> None:  # fmt: skip
        self.log, self.idle_seconds, self.most_bytes = log, idle_seconds, most_bytes
        self.upstream = upstream.rstrip("/") if upstream is not None else None
        self._key = upstream_key
        self._client: httpx.AsyncClient | None = None
        self._identities: dict[str, str] = {}
        self.rejected = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        post, get = ["POST"], ["GET"]
        routes = [
            ("/health", self.health, get), ("/metrics", self.metrics, get), ("/v1/trajectories", self.trajectories, post),
            ("/v1/rollouts", self.rollouts, post), ("/v1/traces", self.traces, post),
            ("/sessions/{session}", self.session, get), ("/sessions/{session}/reward", self.reward, post),
            ("/sessions/{session}/end", self.end, post), ("/sessions/{session}/v1/models", self.models, get),
            ("/sessions/{session}/v1/chat/completions", self.chat, post),
            ("/sessions/{session}/v1/completions", self.completions, post),
            ("/api/crl/trajectories", self.feed_in, post), ("/api/crl/trajectories", self.feed_out, get),
            ("/api/crl/trajectories/mark-trained", self.feed_mark, post),
            ("/api/crl/identity-map", self.identities_out, get), ("/api/crl/identity-map", self.identities_in, post),
        ]  # fmt: skip
        return Starlette(
            routes=[Route(path, handled(handler), methods=methods) for path, handler, methods in routes],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key is not None else {}
        async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(600.0, connect=5.0)) as client:
            self._client = client
            expiry = asyncio.create_task(self._expire())
            try:
                yield
            finally:
                expiry.cancel()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self.idle_seconds / 4))
            await asyncio.to_thread(self.log.expire, self.idle_seconds)

    # ------------------------------------------------------------------------------------------------ whole trajectories

    async def trajectories(self, request: Request) -> Response:
        binary = request.headers.get("content-type", "").startswith("application/msgpack")
        posted = read_posted(await self._body(request), binary=binary)
        return await self._keep(request, posted)

    async def traces(self, request: Request) -> Response:
        row = read_document(await self._body(request), binary=False)
        agent = request.query_params.get("agent", "agent")
        return await self._keep(request, from_training_trace(row, agent=agent))

    async def feed_in(self, request: Request) -> Response:
        document = read_document(await self._body(request), binary=False)
        rows = document.get("trajectories") if isinstance(document, dict) else None
        if not isinstance(rows, list):
            raise RequestError(400, 'expected an object {"trajectories": [...]}')
        posted: list[PostedTrajectory | WireError] = []
        for row in rows:
            try:
                posted.append(from_feed(row, self._identities))
            except WireError as error:
                posted.append(error)
        return await self._keep(request, posted)

    async def _keep(self, request: Request, posted: Sequence[PostedTrajectory | WireError]) -> Response:
        if len(posted) > MOST_ITEMS:
            raise RequestError(413, f"{len(posted)} trajectories in one request: send at most {MOST_ITEMS}")
        producer = producer_of(request)
        items = [
            NewItem(
                key=one.key, producer=producer, kind="turns", body=encode_body(one), agent=one.agent, session=one.session,
                scored=one.reward is not None or all(call.reward is not None for call in one.calls),
            )
            for one in posted
            if not isinstance(one, WireError)
        ]  # fmt: skip
        verdicts = iter(await self._append(items))
        results: list[dict[str, Any]] = []
        for index, one in enumerate(posted):
            if isinstance(one, WireError):
                results.append({"index": index, "status": "invalid", "error": str(one)})
            else:
                results.append({"index": index, "key": one.key, "status": next(verdicts).value})
        return self._verdicts(results)

    async def rollouts(self, request: Request) -> Response:
        data = await self._body(request)
        count = len(decode_rollouts(data, limit=self.most_bytes))  # refuses what is not whole
        key = request.headers.get("idempotency-key") or blake3.blake3(data).hexdigest()
        check_key(key)
        item = NewItem(key=key, producer=producer_of(request), kind="rollouts", body=data, scored=True)
        (verdict,) = await self._append([item])
        return self._verdicts([{"index": 0, "key": key, "status": verdict.value, "rollouts": count}])

    async def _append(self, items: Sequence[NewItem]) -> list[Verdict]:
        try:
            return await asyncio.wrap_future(self.log.submit(items))
        except FullError as error:
            raise RequestError(429, str(error), headers={"Retry-After": "5"}) from error
        except ConflictError as error:
            raise RequestError(409, str(error)) from error
        except LogError as error:
            raise RequestError(507, str(error), kind="server_error") from error

    def _verdicts(self, results: list[dict[str, Any]]) -> Response:
        """200 if all are kept, 409 if each is a conflict, 400 if none is right, else 207: look at each."""
        states = {row["status"] for row in results}
        self.rejected += sum(row["status"] in ("invalid", "conflict") for row in results)
        status = 200 if states <= {"accepted", "duplicate"} else 409 if states == {"conflict"} else 400
        if status == 400 and states != {"invalid"}:
            status = 207
        return answer({"results": results}, status)

    async def _body(self, request: Request) -> bytes:
        data = await body_of(request, self.most_bytes)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return data
        if encoding != "zstd":
            raise RequestError(415, f"content-encoding is {encoding!r}: send zstd, or none")
        try:
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
                unpacked = reader.read(self.most_bytes + 1)
        except zstandard.ZstdError as error:
            raise RequestError(400, f"the body is no zstd: {error}") from error
        if len(unpacked) > self.most_bytes:
            raise RequestError(413, f"the body unpacks to more than {self.most_bytes} bytes")
        return unpacked

    # -------------------------------------------------------------------------------------------------------- sessions

    async def reward(self, request: Request) -> Response:
        document = await json_of(request, 1 << 16)
        unknown = set(document) - {"reward", "agent", "call"}
        value = document.get("reward")
        if unknown or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(400, 'expected {"reward": a finite number, "agent": optional, "call": optional}')
        names = {name: document.get(name) for name in ("agent", "call")}
        if any(name is not None and not isinstance(name, str) for name in names.values()):
            raise RequestError(400, "agent and call are texts")
        revisions = await self._of_session(self.log.reward, session_of(request), float(value), **names)
        return answer({"status": "revised" if revisions else "accepted", "revisions": revisions})

    async def end(self, request: Request) -> Response:
        await self._of_session(self.log.end, session_of(request))
        return answer({"status": "ended"})

    async def session(self, request: Request) -> Response:
        """The calls of a session as a tree."""
        session = session_of(request)
        items = await asyncio.to_thread(self.log.calls, session)
        if not items:
            raise RequestError(404, f"no calls of session {session!r}")
        calls = [decode_body(item.body).calls[0] for item in items]
        parents = forks([(*call.prompt_ids, *call.reply_ids) for call in calls])
        return answer({
            "session": session,
            "calls": [
                {"call": item.key, "agent": item.agent, "reward": item.reward, "exact": call.exact,
                 "continues": items[parent].key if parent is not None and call.exact else None}
                for item, call, parent in zip(items, calls, parents, strict=True)
            ],
        })  # fmt: skip

    async def _of_session(self, method: Any, *values: Any, **named: Any) -> Any:
        try:
            return await asyncio.to_thread(method, *values, **named)
        except ConflictError as error:
            raise RequestError(409, str(error)) from error
        except LogError as error:
            raise RequestError(404, str(error)) from error

    # ----------------------------------------------------------------------------------------------------------- proxy

    async def models(self, request: Request) -> Response:
        client, url = self._upstream("/models")
        try:
            found = await client.get(url)
        except httpx.HTTPError as error:
            raise RequestError(
                502, f"the model server does not answer: {type(error).__name__}", kind="server_error"
            ) from error
        return Response(found.content, status_code=found.status_code, media_type="application/json")

    async def chat(self, request: Request) -> Response:
        return await self._proxied(request, "/chat/completions")

    async def completions(self, request: Request) -> Response:
        return await self._proxied(request, "/completions")

    async def _proxied(self, request: Request, path: str) -> Response:
        session, producer = session_of(request), producer_of(request)
        document = await json_of(request, self.most_bytes)
        agent = (
            document.pop("agent", None) or request.headers.get("x-sparring-agent") or document.get("user") or "agent"
        )
        if not isinstance(agent, str) or not 0 < len(agent) <= 200 or not agent.isprintable():
            raise RequestError(400, "agent: give 1 to 200 printable characters")
        policy = document.pop("policy", None)
        if not isinstance(policy, str | None):
            raise RequestError(400, "policy: give a text, or leave it out")
        settings = settings_of(document)
        check_call(Call(messages=(Message("user", ""),), reply="", **settings))  # before the model works for nothing
        wanted_log_probs, streams = bool(document.get("logprobs")), bool(document.get("stream"))
        # Said also where the client said nothing: a server's own defaults would make the record untrue.
        asked = document | {name: settings[name] for name in ("temperature", "top_p")}
        asked |= {"return_token_ids": True, "stream": False}
        asked.pop("stream_options", None)
        asked["logprobs"] = True if path == "/chat/completions" else document.get("logprobs") or 0
        call_id = request.headers.get("idempotency-key") or f"{session}/{uuid.uuid4().hex}"
        check_key(call_id)
        if self.log.find(call_id) is not None:
            raise RequestError(409, f"the call {call_id!r} was answered before; give a new Idempotency-Key")
        await self._of_session(self.log.open_session, session, producer)
        client, url = self._upstream(path)
        try:
            # A client that goes away meanwhile loses nothing: its call is finished and recorded all the same.
            replied, content = await asyncio.shield(
                asyncio.ensure_future(
                    self._call(client, url, asked, session, producer, agent, policy, call_id, document)
                )
            )
        except httpx.HTTPError as error:
            raise RequestError(
                502, f"the model server does not answer: {type(error).__name__}", kind="server_error"
            ) from error
        if replied != 200 or not isinstance(content, dict):
            return answer(content, replied)
        content["sparring_call"] = call_id
        if not streams:
            return answer(content if wanted_log_probs else without_log_probs(content))
        return StreamingResponse(events(content, path, wanted_log_probs), media_type="text/event-stream")

    async def _call(
        self, client: httpx.AsyncClient, url: str, asked: dict[str, Any], session: str, producer: str, agent: str,
        policy: str | None, call_id: str, document: dict[str, Any],
    ) -> tuple[int, Any]:  # fmt: skip
        replied = await client.post(
            url, content=msgspec.json.encode(asked), headers={"Content-Type": "application/json"}
        )
        try:
            content = msgspec.json.decode(replied.content)
        except msgspec.DecodeError as error:
            raise RequestError(502, f"the model server's answer is no JSON: {error}", kind="server_error") from error
        if replied.status_code != 200 or not isinstance(content, dict):
            return replied.status_code, content
        try:
            calls = calls_of(document, content)
        except (AttributeError, TypeError, KeyError, ValueError, WireError) as error:
            raise RequestError(
                502, f"the model server's answer cannot be read: {error}", kind="server_error"
            ) from error
        items = []
        for index, call in enumerate(calls):
            key = call_id if index == 0 else f"{call_id}#{index}"
            logged = LoggedTrajectory(agent=agent, calls=(call,), policy=policy or "shared")
            items.append(NewItem(
                key=key, producer=producer, kind="turns", body=encode_body(logged), agent=agent, session=session
            ))  # fmt: skip
        await self._append(items)  # on disk before the agent sees its reply
        return 200, content

    def _upstream(self, path: str) -> tuple[httpx.AsyncClient, str]:
        if self.upstream is None or self._client is None:
            raise RequestError(404, "this gateway has no model server behind it: start it with --upstream http://...")
        return self._client, self.upstream + path

    # -------------------------------------------------------------------------------------------------------- Feed API

    async def feed_out(self, request: Request) -> Response:
        query = request.query_params
        try:
            limit, after = int(query.get("limit", "50")), int(query.get("cursor") or "0")
            since = _instant(query["since"]) if "since" in query else -math.inf
        except (ValueError, OverflowError) as error:
            raise RequestError(400, f"limit and cursor are whole numbers, since an ISO date: {error}") from error
        if not 1 <= limit <= 200 or not 0 <= after < 1 << 63:
            raise RequestError(400, "limit: give 1 to 200; cursor: as the page before gave it")
        shown: list[dict[str, Any]] = []
        more = True
        while more and len(shown) < limit:
            page = await asyncio.to_thread(self.log.page, after, limit, (Status.READY,))
            more = len(page) == limit
            for item, place, ready_at in page:
                if len(shown) == limit:
                    more = True
                    break
                after = place
                if ready_at > since and item.kind == "turns":
                    logged = decode_body(item.body)
                    made = datetime.fromtimestamp(ready_at, UTC).isoformat().replace("+00:00", "Z")
                    shown.append(to_feed(item.key, item.number, logged, item.reward, made))
        return answer({
            "trajectories": shown, "cursor": str(after) if shown else query.get("cursor"), "hasMore": more, "count": len(shown),
        })  # fmt: skip

    async def feed_mark(self, request: Request) -> Response:
        document = await json_of(request, self.most_bytes)
        keys, batch = document.get("trajectoryIds"), document.get("batchId", "")
        if not isinstance(keys, list) or not 1 <= len(keys) <= 500 or not all(isinstance(key, str) for key in keys):
            raise RequestError(400, "trajectoryIds: give 1 to 500 texts")
        if not isinstance(batch, str):
            raise RequestError(400, "batchId is a text")
        marked = await asyncio.to_thread(self.log.mark_trained, keys, f"marked by {batch[:200]}")
        return answer({"success": True, "marked": marked, "batchId": batch or None})

    async def identities_out(self, request: Request) -> Response:
        counts = {team: sum(own == team for own in self._identities.values()) for team in TEAMS}
        shown = {
            agent: {"team": team, "alignment": "neutral", "name": agent} for agent, team in self._identities.items()
        }
        return answer({"identityMap": shown, "counts": counts | {"total": len(shown)}})

    async def identities_in(self, request: Request) -> Response:
        document = await json_of(request, self.most_bytes)
        if not all(team in TEAMS for team in document.values()):
            raise RequestError(400, f"expected an object of agent ids, each with one of {', '.join(TEAMS)}")
        self._identities = dict(document)
        return answer({"total": len(document)})

    # -------------------------------------------------------------------------------------------------------- operators

    async def health(self, request: Request) -> Response:
        return answer({"status": "ok", "waiting": self.log.counts()["ready"]})

    async def metrics(self, request: Request) -> Response:
        lines = ["# TYPE sparring_items gauge"]
        lines += [f'sparring_items{{status="{status}"}} {count}' for status, count in self.log.counts().items()]
        newest, trained = self.log.newest_batch()
        lines += [
            f"sparring_batches_logged {newest}", f"sparring_batches_trained {trained}",
            f"sparring_rejected_total {self.rejected}", f"sparring_bytes_waiting {self.log.bytes_waiting()}",
        ]  # fmt: skip
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def producer_of(request: Request) -> str:
    """Who sends, for erasure and the counts: the header ``X-Sparring-Producer``.

    Raises:
        RequestError: It is no name.
    """
    name = request.headers.get("x-sparring-producer", "anonymous")
    if not 0 < len(name) <= 100 or not name.isprintable():
        raise RequestError(400, "X-Sparring-Producer: give 1 to 100 printable characters")
    return name


def session_of(request: Request) -> str:
    """The session of the path.

    Raises:
        RequestError: It is no name.
    """
    session = str(request.path_params["session"])
    if not 0 < len(session) <= 160 or not session.isprintable():
        raise RequestError(400, "session: give 1 to 160 printable characters")
    return session


def calls_of(document: dict[str, Any], content: dict[str, Any]) -> list[Call]:
    """The calls of an answer, one a choice: with the ids and log-probs of the server, or as text where it gives none."""
    found = []
    settings = settings_of(document)
    version = content.get("policy_version")
    for choice in content.get("choices") or []:
        said = choice.get("message", {}).get("content") if "message" in choice else choice.get("text")
        ids, prompt = choice.get("token_ids"), content.get("prompt_token_ids") or choice.get("prompt_token_ids")
        rows = (choice.get("logprobs") or {}).get("content")
        log_probs = [row["logprob"] for row in rows] if rows else (choice.get("logprobs") or {}).get("token_logprobs")
        if ids and prompt and log_probs and len(log_probs) == len(ids):
            call = Call(
                prompt_ids=tuple(prompt), reply_ids=tuple(ids), log_probs=tuple(min(0.0, float(v)) for v in log_probs),
                version=version, **settings,
            )  # fmt: skip
        else:
            messages = [_message(message) for message in document.get("messages") or []]
            if "prompt" in document:
                messages = [Message("user", str(document["prompt"]))]
            call = Call(messages=tuple(messages), reply=said or "", version=version, **settings)
        check_call(call)
        found.append(call)
    return found


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of a request, as a call records them."""
    return {
        "temperature": _number(document.get("temperature"), 1.0), "top_p": _number(document.get("top_p"), 1.0),
        "max_new_tokens": int(_number(document.get("max_completion_tokens", document.get("max_tokens")), 0)),
    }  # fmt: skip


def _message(message: Any) -> Message:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return Message(str(message.get("role", "user")) if isinstance(message, dict) else "user", str(content or ""))


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def without_log_probs(content: dict[str, Any]) -> dict[str, Any]:
    """The answer as a client that did not ask for log-probs expects it."""
    return content | {"choices": [choice | {"logprobs": None} for choice in content.get("choices", [])]}


async def events(content: dict[str, Any], path: str, log_probs: bool) -> AsyncIterator[bytes]:
    """A whole answer as the events of a stream: it is recorded before its first word goes out."""
    chat = path == "/chat/completions"
    base = {name: content.get(name) for name in ("id", "created", "model", "policy_version", "sparring_call")}
    base["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in content.get("choices", []):
        part = {"index": choice.get("index", 0), "finish_reason": None, "logprobs": choice.get("logprobs") if log_probs else None,
                "token_ids": choice.get("token_ids")}  # fmt: skip
        part |= {"delta": choice.get("message", {})} if chat else {"text": choice.get("text", "")}
        yield b"data: " + msgspec.json.encode(base | {"choices": [part]}) + b"\n\n"
        end: dict[str, Any] = {
            "index": choice.get("index", 0),
            "finish_reason": choice.get("finish_reason"),
            "logprobs": None,
        }
        end["delta" if chat else "text"] = {} if chat else ""
        yield b"data: " + msgspec.json.encode(base | {"choices": [end]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _instant(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
