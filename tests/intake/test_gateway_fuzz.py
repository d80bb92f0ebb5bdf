"""Thousands of requests that are almost right: each is answered, none by a bug of ours."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import httpx
from starlette.applications import Starlette

from intake_fuzz import mutated
from scripted_model import ROUTES
from sparring.intake.server import Gateway
from sparring.intake.trajectory_log import TrajectoryLog


async def send(gateway: Gateway, rng: random.Random, count: int) -> tuple[Counter[int], list[str]]:
    codes: Counter[int] = Counter()
    failures = []
    # The scripted model is asked in this process: the requests are many.
    gateway._client = httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=ROUTES)))
    transport = httpx.ASGITransport(gateway.app(), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for number in range(count):
            each = mutated(rng)
            try:
                request = client.build_request(each.method, each.path, content=each.body, headers=each.headers)
            except httpx.InvalidURL:
                continue
            try:
                async with asyncio.timeout(60):
                    response = await client.send(request)
            except Exception as error:  # a bug: all of them are told, not the first only
                failures.append(f"{number} {type(error).__name__} {error}: {each}")
                continue
            codes[response.status_code] += 1
            if response.status_code >= 500:
                failures.append(f"{number} {response.status_code} {response.text[:200]}: {each}")
    return codes, failures


def test_mutated_requests_meet_no_bug(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "log.sqlite", most_items=400) as log:
        gateway = Gateway(log, upstream="http://model/v1", most_bytes=200_000)
        codes, failures = asyncio.run(send(gateway, random.Random(2), 2000))
    assert not failures, "\n".join(failures[:20])
    assert codes[200] > 200 and codes[400] > 200, codes
