"""A client of the Feed API (spec/market.md 1.7): its trajectories into our log, and word back when they are trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from sparring.errors import ConfigError, SparringError
from sparring.intake.trajectory_log import NewItem, TrajectoryLog, Verdict
from sparring.intake.wire import WireError, encode_body, from_feed, read_identities, read_page

PAGE = 200
PRODUCER = "feed"
TRIES = 3


class FeedError(SparringError):
    """The Feed API does not answer, or not as it should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What a look at the Feed API brought."""

    new: int
    unreadable: int
    """Trajectories that do not hold what they should; they stay there."""
    conflicting: int
    """Trajectories whose key came before with other content: the first one counts."""
    reason: str
    """Why the first unreadable one is; empty where all are well."""


class FeedClient:
    """Pulls pages; what came before is recognised by its key, so that pulling again changes nothing.

    Args:
        base_url: Up to and without ``/api``.
        token: Sent as a bearer token; None sends none.
        identities_seconds: Age at which the identity map is asked for again.
        transport: For tests.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, identities_seconds: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"source is {base_url!r}: a Feed API's address starts with http:// or https://")
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._client = httpx.Client(
            base_url=base_url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(30.0, connect=5.0),
            transport=transport,
        )
        self.identities: dict[str, str] = {}
        self._identities_seconds, self._asked = identities_seconds, float("-inf")

    def pull(self, log: TrajectoryLog) -> Pulled:
        """All pages there are, into the log.

        Raises:
            FeedError: The API does not answer as it should; what came before is kept.
            FullError: Too much waits to be trained; what came before is kept.
        """
        try:
            return self._pull(log)
        except WireError as error:
            raise FeedError(str(error)) from error

    def _pull(self, log: TrajectoryLog) -> Pulled:
        if time.monotonic() - self._asked >= self._identities_seconds:
            self.identities = read_identities(self._get("/api/crl/identity-map", {}))
            self._asked = time.monotonic()
        new = unreadable = conflicting = 0
        reason = ""
        cursor: str | None = None
        while True:
            page = read_page(
                self._get("/api/crl/trajectories", {"limit": PAGE} | ({"cursor": cursor} if cursor else {}))
            )
            items = []
            for row in page.trajectories:
                try:
                    made = from_feed(row, self.identities)
                except WireError as error:
                    unreadable += 1
                    reason = reason or str(error)
                    continue
                items.append(NewItem(
                    key=made.key, producer=PRODUCER, kind="turns", body=encode_body(made), agent=made.agent,
                    scored=made.reward is not None,
                ))  # fmt: skip
            verdicts = log.append(items) if items else []
            new += verdicts.count(Verdict.ACCEPTED)
            conflicting += verdicts.count(Verdict.CONFLICT)
            if not page.more or not page.trajectories:
                return Pulled(new=new, unreadable=unreadable, conflicting=conflicting, reason=reason)
            if page.cursor is None or page.cursor == cursor:
                raise FeedError("the Feed API says that there is more, and gives no new cursor")
            cursor = page.cursor

    def mark(self, keys: Sequence[str], batch: str) -> None:
        """Tell the API which trajectories are trained; idempotent there.

        Raises:
            FeedError: It does not answer; telling it again later is harmless.
        """
        ids = [key.removeprefix("feed/") for key in keys]
        for start in range(0, len(ids), 500):
            body = msgspec.json.encode({"trajectoryIds": ids[start : start + 500], "batchId": batch})
            self._send("POST", "/api/crl/trajectories/mark-trained", content=body)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str, query: dict[str, str | int]) -> bytes:
        return self._send("GET", path, params=query)

    def _send(self, method: str, path: str, **how: object) -> bytes:
        """Both requests may be repeated: reading changes nothing, and marking twice is marking once."""
        for attempt in range(TRIES):
            try:
                found = self._client.request(method, path, **how)  # type: ignore[arg-type]
            except httpx.HTTPError as error:
                if attempt + 1 == TRIES:
                    raise FeedError(f"{method} {path}: {type(error).__name__} {error}") from error
                time.sleep(0.3 * 2**attempt)
                continue
            if found.status_code == 200:
                return found.content
            if (found.status_code < 500 and found.status_code != 429) or attempt + 1 == TRIES:
                raise FeedError(f"{method} {path}: answered {found.status_code}: {found.text.strip()[:200]}")
            time.sleep(0.3 * 2**attempt)
        raise AssertionError("unreachable")
