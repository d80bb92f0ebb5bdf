"""A real market server in a process of its own, and requests to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx


class Server:
    """``sparring serve market``."""

    def __init__(self, *arguments: str, port: int = 0, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparring", "serve", "market", "--port", str(port), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            _, trouble = self.process.communicate()
            raise AssertionError(f"the server did not start: {trouble}")
        self.url = found[0]
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=30.0)

    def get(self, path: str, **query: Any) -> Any:
        response = self.http.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        response = self.http.post(path, json=body, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any = None, *, method: str = "POST", **query: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that must not go through."""
        response = self.http.request(method, path, json=body if method == "POST" else None, params=query)
        assert response.status_code >= 400, response.text
        assert response.headers["content-type"] == "application/json"
        error: dict[str, Any] = response.json()["error"]
        assert error["message"] and error["type"] and error["code"] == response.status_code
        return response.status_code, error

    def kill(self) -> None:
        """kill -9."""
        self.http.close()
        self.process.kill()
        self.process.communicate()

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGINT)
        _, _ = self.process.communicate(timeout=30)
        return self.process.returncode


@contextmanager
def serving(*arguments: str, port: int = 0, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = Server(*arguments, port=port, environment=environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
