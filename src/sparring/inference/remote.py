"""A frozen opponent behind any OpenAI-compatible chat endpoint. It replies in text; nothing of it is trained."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from sparring.errors import ConfigError, ModelError
from sparring.tokens.chat import ChatMessage
from sparring.types import SamplingSettings


class RemoteChat:
    """A client for ``POST {base_url}/chat/completions``.

    Args:
        base_url: Up to and including the version, as in ``http://127.0.0.1:8000/v1``.
        model: The model's name at that server.
        api_key_variable: Environment variable that holds the key; None sends none. The key itself is never stored.
        timeout: Seconds for a whole reply.
        connect_retries: How often a connection that could not be made is tried again. A request that reached the server
            is never repeated: it may have been paid for.
        transport: For tests.

    Raises:
        ConfigError: The address is no URL, or the environment variable is not set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_variable: str | None = None,
        timeout: float = 60.0,
        connect_retries: int = 2,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}: it must start with http:// or https://")
        headers = {}
        if api_key_variable is not None:
            key = os.environ.get(api_key_variable)
            if not key:
                raise ConfigError(f"the environment variable {api_key_variable} (the endpoint's API key) is not set")
            headers["Authorization"] = f"Bearer {key}"
        self.model, self.connect_retries = model, connect_retries
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self._client = httpx.Client(
            headers=headers, timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)), transport=transport
        )

    def reply(self, messages: Sequence[ChatMessage], settings: SamplingSettings, *, seed: int | None = None) -> str:
        """The assistant's text.

        Raises:
            ModelError: The endpoint cannot be reached, refuses, or answers something else than a chat completion.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
        }
        if seed is not None:
            body["seed"] = seed
        response = self._post(body)
        if response.status_code != 200:
            raise ModelError(f"{self.url} answered {response.status_code}: {response.text.strip()[:200]}")
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(f"{self.url} answered no chat completion: {response.text.strip()[:200]}") from error
        if content is None:
            return ""
        if not isinstance(content, str):
            raise ModelError(f"{self.url} answered a message whose content is not text")
        return content

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        for attempt in range(self.connect_retries + 1):
            try:
                return self._client.post(self.url, json=body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if attempt == self.connect_retries:
                    raise ModelError(f"{self.url} cannot be reached ({error}): is the server running?") from error
                time.sleep(0.2 * 2**attempt)
            except httpx.HTTPError as error:
                raise ModelError(f"{self.url} did not answer: {type(error).__name__} {error}") from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
