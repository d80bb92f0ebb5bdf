"""An OpenAI-compatible server whose tokens are the characters of its text, for tests of what records its answers.

The model's name says how it behaves: ``exact`` (token ids, log-probs, version), ``text`` (neither), ``refuses`` (400 on
``return_token_ids``, else as ``text``), ``broken`` (a stream that ends in the middle), ``mismatch`` (a log-prob short),
``slow`` (a tenth of a second a token). What was asked of it is at ``/asked``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ASKED: list[dict] = []
END = 3


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def prompt_text(asked: dict, chat: bool) -> str:
    if not chat:
        return asked["prompt"] if isinstance(asked["prompt"], str) else "".join(map(chr, asked["prompt"]))
    return "".join(f"<{m['role']}>{m['content']}" for m in asked["messages"]) + "<assistant>"


def reply(asked: dict, chat: bool, index: int) -> str:
    said = asked["messages"][-1]["content"] if chat else prompt_text(asked, chat)
    return f"{said[:8]}!{index}"


def log_probs(tokens: list[int]) -> list[float]:
    return [-(token % 7) / 10.0 for token in tokens]


def choice(asked: dict, chat: bool, index: int, tokens: list[int], text: str, finish: str | None, stream: bool) -> dict:
    out: dict = {"index": index, "finish_reason": finish}
    if chat:
        out["delta" if stream else "message"] = {"role": "assistant", "content": text}
    else:
        out["text"] = text
    if asked["model"] in ("text", "refuses"):
        return out
    numbers = log_probs(tokens)[: -1 if asked["model"] == "mismatch" else None]
    out["token_ids"] = tokens
    if chat:
        out["logprobs"] = {"content": [{"token": chr(t), "logprob": x} for t, x in zip(tokens, numbers)]}  # noqa: B905
    else:
        out["logprobs"] = {"tokens": list(map(chr, tokens)), "token_logprobs": numbers}
    return out


def top(asked: dict) -> dict:
    out = {"id": "x", "model": asked["model"], "object": "chat.completion"}
    return out if asked["model"] in ("text", "refuses") else {**out, "policy_version": "v3.41"}


async def complete(request: Request, chat: bool) -> Response:
    asked = await request.json()
    try:
        reply(asked, chat, 0), ids(prompt_text(asked, chat)), range(asked.get("n") or 1)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        return JSONResponse({"error": {"message": f"cannot read the request: {error}"}}, 400)
    if not isinstance(asked.get("model"), str):
        return JSONResponse({"error": {"message": "model is missing"}}, 400)
    ASKED.append({"body": asked, "authorization": request.headers.get("authorization")})
    if asked["model"] == "refuses" and "return_token_ids" in asked:
        return JSONResponse({"error": {"message": "unrecognized argument: return_token_ids"}}, 400)
    if asked["model"] == "unknown":
        return JSONResponse({"error": {"message": "no such model"}}, 404)
    prompt = ids(prompt_text(asked, chat))
    count = asked.get("n") or 1
    exact = {} if asked["model"] in ("text", "refuses") else {"prompt_token_ids": prompt}
    if not asked.get("stream"):
        if asked["model"] == "slow":
            await asyncio.sleep(0.5)
        choices = []
        for index in range(count):
            text = reply(asked, chat, index)
            choices.append(choice(asked, chat, index, [*ids(text), END], text, "stop", False))
        return JSONResponse({**top(asked), **exact, "choices": choices, "usage": {"total_tokens": 1}})

    async def chunks():
        first = True
        for index in range(count):
            text = reply(asked, chat, index)
            for letter in [*text, chr(END)]:
                if asked["model"] == "slow":
                    await asyncio.sleep(0.1)
                shown = "" if letter == chr(END) else letter
                part = {**top(asked), **(exact if first else {})}
                finish = "stop" if letter == chr(END) else None
                part["choices"] = [choice(asked, chat, index, ids(letter), shown, finish, True)]
                first = False
                yield f"data: {json.dumps(part)}\n\n"
                if asked["model"] == "broken" and letter == "!":
                    return
        yield "data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


async def chat(request: Request) -> Response:
    return await complete(request, True)


async def completions(request: Request) -> Response:
    return await complete(request, False)


async def models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "exact", "object": "model"}]})


async def asked(_: Request) -> Response:
    return JSONResponse(ASKED)


ROUTES = [
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/asked", asked),
]

if __name__ == "__main__":
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(f"at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(Starlette(routes=ROUTES), log_level="warning")).run(sockets=[listener])
    sys.exit(0)
