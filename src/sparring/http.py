"""What our HTTP servers have in common: who may ask, how much, and how errors are told.

A server binds to loopback unless a token is set. Requests beyond the limits get 401, 413 or 429 before anything is read
into memory; what a handler refuses is a JSON object with one clear line; no header, token or body is ever logged.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sparring.errors import ConfigError, SparringError

MOST_BODY_BYTES = 64 << 20
Handler = Callable[[Request], Awaitable[Response]]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class RequestError(SparringError):
    """A request is refused with this status. ``details`` are further fields of the error that is told."""

    def __init__(
        self, status: int, message: str, *, headers: Mapping[str, str] | None = None, kind: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.headers, self.kind, self.details = status, dict(headers or {}), kind, dict(details or {})


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json", headers=dict(headers or {})
    )


def refusal(error: RequestError) -> Response:
    """An error as clients of OpenAI-compatible servers expect it."""
    kind = error.kind or {401: "authentication_error", 429: "rate_limit_error"}.get(
        error.status, "invalid_request_error"
    )
    told = {"message": str(error), "type": kind, "code": error.status, **error.details}
    return answer({"error": told}, error.status, error.headers)


def handled(handler: Handler) -> Handler:
    """A handler whose errors are answers: RequestError with its status, any other SparringError with 400."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return refusal(error)
        except SparringError as error:
            return refusal(RequestError(400, str(error)))
        except ClientDisconnect:
            return Response(status_code=499)

    return wrapped


async def body_of(request: Request, most_bytes: int = MOST_BODY_BYTES) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413, before more than the limit is kept.
    """
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most_bytes:
        raise RequestError(413, f"the body has {told} bytes: send at most {most_bytes}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise RequestError(413, f"the body has more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


async def json_of(request: Request, most_bytes: int = MOST_BODY_BYTES) -> dict[str, Any]:
    """The body, a JSON object; nothing at all is an empty one.

    Raises:
        RequestError: 400 or 413.
    """
    data = await body_of(request, most_bytes)
    if not data.strip():
        return {}
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(400, "the body is no JSON object")
    return document


class Guard:
    """ASGI middleware: bearer token (compared in constant time) and a rate.

    Args:
        app: What it guards.
        token: None lets everybody in, and is refused for any address but loopback (:func:`serve`).
        rate: Requests a second over all clients, a second's worth at once; None for no limit.
        open_paths: Answered without a token (``/health``).
    """

    def __init__(
        self,
        app: Any,
        *,
        token: str | None,
        rate: float | None = None,
        open_paths: frozenset[str] = frozenset({"/health"}),
    ) -> None:
        self.app, self.rate, self.open_paths = app, rate, open_paths
        self._expected = f"Bearer {token}".encode() if token is not None else None
        self._allowance, self._at = rate or 0.0, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused: Response | None = None
        if self._expected is not None and scope["path"] not in self.open_paths:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                refused = refusal(RequestError(401, "give the server's token as 'Authorization: Bearer ...'"))
        if refused is None and self.rate is not None:
            now = time.monotonic()
            self._allowance = min(self.rate, self._allowance + (now - self._at) * self.rate)
            self._at = now
            if self._allowance < 1.0:
                refused = refusal(RequestError(429, "too many requests", headers={"Retry-After": "1"}))
            else:
                self._allowance -= 1.0
        if refused is not None:
            await refused(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def token_from(variable: str | None) -> str | None:
    """The token that an environment variable holds; None where no variable is named.

    Raises:
        ConfigError: It is named and not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"the environment variable {variable} (the server's token) is not set")
    return token


def serve(app: Any, *, host: str, port: int, token: str | None, what: str, rate: float | None = None) -> None:
    """Serves until SIGINT or SIGTERM. Port 0 takes a free one; the first line on standard output names the address.

    Raises:
        ConfigError: The address is not loopback and there is no token, or it cannot be bound.
    """
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"host is {host}: other machines could ask without a token; set token_variable, or take 127.0.0.1"
        )
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without, an answer in two writes
    # waits some 40 ms for the client's delayed acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(1024)  # whoever reads the address may connect at once
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another port") from error
    config = uvicorn.Config(
        Guard(app, token=token, rate=rate), log_level="warning", access_log=False, server_header=False, lifespan="on",
        timeout_graceful_shutdown=10,
    )  # fmt: skip
    name = f"[{host}]" if ":" in host else host
    print(f"{what} at http://{name}:{bound.getsockname()[1]}", flush=True)
    print("Stop with Ctrl-C.", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[bound])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
