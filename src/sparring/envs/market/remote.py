"""The market of a server, as an environment: ``--env http://127.0.0.1:8003`` in place of ``--env market``.

The same seed is the same episode as in process. A request is sent again where that is safe: a GET, or a POST under an
idempotency key. If the server was restarted, or has dropped the world, the episode is begun there again and what was done
since is done once more; digests of the state say that it is the same, and an error that it is not.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from sparring.envs.market.bots import BOTS, DEMONSTRATORS
from sparring.envs.market.records import MarketAction, MarketObservation, TurnFacts
from sparring.envs.market.render import BRIEF_RULES, full_rules, render
from sparring.envs.market.world import TEAM_RULES, TEAMS, market_rules
from sparring.errors import ConfigError, EnvError
from sparring.intake import wire_market as wire
from sparring.types import Outcome, PromptParts, Seat, StepOutcome, TurnId

TOKEN_VARIABLE = "SPARRING_MARKET_TOKEN"
"""Environment variable whose token is sent, where it is set and no other is named."""
_BUSY = frozenset({429, 502, 503, 504})


class NotInitialisedError(EnvError):
    """The server has no such world (any more)."""


class MarketClient:
    """Requests to one market server, sent again where that is safe.

    Args:
        url: The server, as in ``http://127.0.0.1:8003``.
        token_variable: Environment variable that holds the token; None takes SPARRING_MARKET_TOKEN where it is set.
        timeout: Seconds of one try.
        patience: Seconds over all tries.
        transport: For tests.

    Raises:
        ConfigError: The address is none, or the variable is named and not set.
    """

    def __init__(
        self, url: str, *, token_variable: str | None = None, timeout: float = 30.0, patience: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"env is {url!r}: a market server's address starts with http:// or https://")
        if not timeout > 0 or not patience >= 0:
            raise ConfigError("env_settings: timeout must be above 0, patience 0 or more (seconds)")
        token = os.environ.get(token_variable or TOKEN_VARIABLE)
        if token_variable is not None and not token:
            raise ConfigError(f"the environment variable {token_variable} (the market server's token) is not set")
        self.url, self.patience = url.rstrip("/"), patience
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {}, transport=transport,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
        )  # fmt: skip

    def get(self, path: str, kind: type[Any], **query: str) -> Any:
        """
        Raises:
            EnvError: The server cannot be reached, or refuses.
        """
        return self._ask("GET", path, kind, None, query)

    def post(self, path: str, kind: type[Any], body: Mapping[str, Any], **query: str) -> Any:
        """As :meth:`get`; carried out once, however often it is sent."""
        return self._ask("POST", path, kind, msgspec.json.encode(body), query)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def leave(self, world: str) -> None:
        """Say that a world is no longer needed. What is in nobody's way is not worth waiting for: a server that does not
        answer drops the world by itself."""
        with contextlib.suppress(httpx.HTTPError):
            self._http.post(f"{self.url}/v2/close", params={"world": world}, timeout=2.0)
        self.close()

    def _ask(self, method: str, path: str, kind: type[Any], body: bytes | None, query: Mapping[str, str]) -> Any:
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"} if method == "POST" else {}
        until, pause = time.monotonic() + self.patience, 0.05
        while True:
            try:
                response = self._http.request(
                    method, self.url + path, params=dict(query), content=body, headers=headers
                )
                trouble = f"answered {response.status_code}" if response.status_code in _BUSY else None
            except httpx.TransportError as error:
                response, trouble = None, f"{type(error).__name__}: {error}".rstrip(": ")
            if trouble is None and response is not None:
                return self._read(response, path, kind)
            if time.monotonic() + pause > until:
                if response is not None:
                    trouble = f"{trouble}: {wire.read_error(response.content).message}"
                raise EnvError(f"the market server {self.url} does not serve {path}: {trouble}; is it running?")
            time.sleep(pause)
            pause = min(2.0, 2 * pause)

    def _read(self, response: httpx.Response, path: str, kind: type[Any]) -> Any:
        if response.status_code == 200:
            try:
                return wire.read_answer(response.content, kind)
            except wire.FieldError as error:
                raise EnvError(f"{self.url}{path}: {error}") from error
        told = wire.read_error(response.content)
        text = f"the market server {self.url} refused {path} ({response.status_code}): {told.message}"
        if response.status_code == 401:
            text += f" (the token is read from the environment variable {TOKEN_VARIABLE}, or from token_variable)"
        raise (NotInitialisedError if told.type == "not_initialised" else EnvError)(text)


class RemoteMarket:
    """A market on a server as an environment (see ``envs.contract.Env``).

    Args:
        url: The server, as in ``http://127.0.0.1:8003``.
        rules: As of ``MarketEnv``.
        token_variable, timeout, patience: See ``MarketClient``.
        settings: Fields of ``MarketRules``, over those that the server was started with.

    Raises:
        ConfigError: A setting is wrong, or the server's address.
    """

    name = "market"
    teams: tuple[str, ...] = TEAMS
    team_rules: Mapping[str, str] = TEAM_RULES
    action_type: object = MarketAction
    facts_type: type = TurnFacts
    bots = BOTS
    demonstrators = DEMONSTRATORS

    def __init__(
        self, url: str, *, rules: str = "brief", token_variable: str | None = None, timeout: float = 30.0,
        patience: float = 60.0, **settings: object,
    ) -> None:  # fmt: skip
        market_rules(settings)
        self.rules = full_rules() if rules == "full" else BRIEF_RULES
        self.settings = settings
        self.client = MarketClient(url, token_variable=token_variable, timeout=timeout, patience=patience)
        self._world = uuid.uuid4().hex
        self._left = weakref.finalize(self, self.client.leave, self._world)
        self._begun: tuple[str, Mapping[str, Any]] | None = None
        """Route and request by which the episode began here."""
        self._played: list[tuple[Mapping[str, Any], str]] = []
        """Requests since, each with the digest of the state after it."""
        self._first_digest = ""
        self._episode = 0
        self._tick = 0
        self._seen: Mapping[str, MarketObservation] | None = None

    @property
    def suite(self) -> object:
        """The held-out panel; it is played in this process, whatever the server's settings."""
        from sparring.envs.market.situations import MarketSuite

        return MarketSuite()

    # ------------------------------------------------------------------------------------------------- contract

    def reset(self, *, seats: Sequence[Seat], seed: int, episode: int) -> None:
        """As of the market."""
        body = {
            "seed": seed, "episode": episode, "settings": dict(self.settings),
            "seats": [wire.named(("npc_id", "team"), {"npc_id": s.agent, "team": s.team}) for s in seats],
        }  # fmt: skip
        self._begin("/v2/init", body)

    def observe(self) -> Mapping[str, MarketObservation]:
        if self._seen is None:
            told = self._asking(lambda: self.client.get("/v2/scenarios", wire.ScenariosWire, world=self._world))
            self._seen = {one.npc_id: wire.scenario_from_wire(one) for one in told.scenarios}
        return self._seen

    def render(self, observation: object, *, newest: int | None = None) -> PromptParts:
        if not isinstance(observation, MarketObservation):
            raise EnvError(f"the market renders its own observations, not {type(observation).__name__}")
        return render(observation, newest)

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        seen = self.observe()
        if not seen:
            raise EnvError("the episode is over: call reset()")
        if set(actions) != set(seen):
            wrong = sorted(set(actions) ^ set(seen))
            raise EnvError(
                f"step() takes one action of every agent that observes; missing or unknown: {', '.join(wrong)}"
            )
        rows = [
            {**wire.named(("npc_id",), {"npc_id": agent}), "action": wire.action_to_wire(actions[agent])}
            for agent in sorted(actions)
        ]
        told = self._asking(lambda: self._post_tick({"tick": self._tick, "actions": rows}))
        self._played.append(({"tick": self._tick, "actions": rows}, told.state_digest))
        self._tick, self._seen = told.tick_number, None
        outcomes = tuple(
            Outcome(
                turn=TurnId(episode=self._episode, agent=one.npc_id, tick=one.tick), settled_at=one.settled_at,
                facts=wire.facts_from_wire(one.facts),
            )
            for one in told.outcomes
        )  # fmt: skip
        return StepOutcome(outcomes=outcomes, truncated=frozenset(told.truncated), done=told.done)

    def snapshot(self) -> bytes:
        """The same bytes as of a market in process, which can go on from them."""
        told = self._asking(lambda: self.client.get("/v2/snapshot", wire.SnapshotWire, world=self._world))
        return bytes(told.snapshot)

    def restore(self, data: bytes) -> None:
        self._begin("/v2/restore", {"snapshot": data})

    # ---------------------------------------------------------------------------------------------------- parts

    def close(self) -> None:
        """Tell the server that its world is no longer needed; done at the latest when the program ends."""
        self._left()

    def _begin(self, path: str, body: Mapping[str, Any]) -> None:
        told = self.client.post(path, wire.BegunWire, {**body, "world": self._world})
        self._begun, self._played, self._first_digest = (path, body), [], told.state_digest
        self._episode, self._tick, self._seen = told.episode, told.tick_number, None

    def _post_tick(self, body: Mapping[str, Any]) -> wire.TickWire:
        told: wire.TickWire = self.client.post("/v2/tick", wire.TickWire, body, world=self._world)
        return told

    def _asking(self, ask: Any) -> Any:
        """Asks; where the server has lost the world, plays it there again up to here, and asks once more."""
        if self._begun is None:
            raise EnvError("the market has not begun: call reset() first")
        try:
            return ask()
        except NotInitialisedError:
            self._play_again()
            return ask()

    def _play_again(self) -> None:
        assert self._begun is not None
        path, body = self._begun
        told = self.client.post(path, wire.BegunWire, {**body, "world": self._world})
        digests = [(told.state_digest, self._first_digest)]
        for request, digest in self._played:
            digests.append((self._post_tick(request).state_digest, digest))
        for number, (now, then) in enumerate(digests):
            if now != then:
                raise EnvError(
                    f"the market server {self.client.url} was restarted, and tick {number} of the episode is another there: "
                    "its version or settings have changed; reset, or resume from a checkpoint"
                )  # fmt: skip
