"""The market over HTTP (spec/market.md 1.2), ``sparring serve market``.

The original's routes answer at once: sequential play of one market. Below ``/v2`` the same routes play any number of
markets, named by ``?world=``, and simultaneously: ``/v2/execute`` queues an action, ``/v2/tick`` carries all of them out
and tells what settled, by action id. ``archetype`` is the same word for everybody.

Every POST takes an ``Idempotency-Key``: the same request under the same key is carried out once, and answered alike.
What is wrong with a request is JSON with a type and, where there is one, the field: 400 not initialised, 404 unknown
agent, 409 not now, 410 evicted from the buffer, 413 too large, 422 a field.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sparring.envs.market.hosted import (
    Acted,
    Asked,
    ConflictError,
    EvictedError,
    HostedMarket,
    Moved,
    Ring,
    Settled,
    UnknownAgentError,
)
from sparring.envs.market.world import TEAMS, MarketEnv
from sparring.errors import ConfigError, EnvError, SparringError, nearest
from sparring.http import RequestError, answer, body_of, refusal
from sparring.intake import wire_market as wire
from sparring.types import Seat

MOST_BYTES = 1 << 20
MOST_SNAPSHOT_BYTES = 32 << 20
MOST_KEY = 200
REMEMBERED = 4096
REMEMBERED_BYTES = 64 << 20
MOST_STREAMS = 64
PAGE, LARGEST_PAGE = 100, 1000
LONG_EPISODE = 1000
"""Ticks of the original's routes, which have no end of an episode, where the settings name none."""
MAIN = "main"
STREAM_BEAT = 15.0
"""Seconds of silence after which a stream shows that it is alive."""


class _Record(Ring):
    """What was done, for those who read it later and those who wait for it."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.news = asyncio.Event()

    def keep(self, entry: Mapping[str, Any]) -> None:
        self.append(msgspec.json.encode({"id": f"traj-{self.newest + 1}", **entry}))
        self.news.set()
        self.news = asyncio.Event()


@dataclass(kw_only=True)
class _World:
    """A market of one client, and the record of what was done in it."""

    market: HostedMarket
    record: _Record
    settings: Mapping[str, Any]
    restored: bool = False
    """Its state came from outside."""
    used: float = field(default_factory=time.monotonic)


class MarketServer:
    """The routes.

    Args:
        settings: Of the market's rules, for every world; a client of ``/v2`` may set others.
        most_worlds: Below ``/v2`` at once.
        buffer: Trajectories of a world that are kept.
        idle_seconds: A world that nobody asked for so long makes room for a new one.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(
        self, settings: Mapping[str, Any] | None = None, *, most_worlds: int = 64, buffer: int = 10_000,
        idle_seconds: float = 3600.0,
    ) -> None:  # fmt: skip
        self.settings = dict(settings or {})
        MarketEnv(**self.settings)
        self.most_worlds, self.buffer, self.idle_seconds = most_worlds, buffer, idle_seconds
        self.epoch = f"{time.time_ns():x}"
        self.old: _World | None = None
        self.worlds: dict[str, _World] = {}
        self._answers: OrderedDict[str, tuple[str, Response]] = OrderedDict()
        self._answers_bytes = 0
        self._streams = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        post, get = ["POST"], ["GET"]
        routes: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
            ("/health", self._get(self.health), get), ("/v2/health", self._get(self.health), get),
            ("/init", self._post(self.init), post), ("/v2/init", self._post(self.init_world), post),
            ("/execute", self._post(self.execute), post), ("/v2/execute", self._post(self.queue), post),
            ("/tick", self._post(self.move_on), post), ("/v2/tick", self._post(self.advance), post),
            ("/v2/restore", self._post(self.restore, MOST_SNAPSHOT_BYTES), post),
            ("/v2/close", self._post(self.close), post), ("/v2/snapshot", self._get(self.snapshot), get),
        ]  # fmt: skip
        for prefix in ("", "/v2"):
            routes += [
                (f"{prefix}/reset", self._post(self.reset), post),
                (f"{prefix}/scenario/{{npc_id}}", self._get(self.scenario), get),
                (f"{prefix}/npcs", self._get(self.npcs), get),
                (f"{prefix}/scenarios", self._get(self.scenarios), get),
                (f"{prefix}/trajectories", self._get(self.trajectories), get),
                (f"{prefix}/trajectories/stream", self._get(self.stream), get),
                (f"{prefix}/trajectories/stats", self._get(self.stats), get),
            ]
        return Starlette(
            routes=[Route(path, handler, methods=methods) for path, handler, methods in routes],
            exception_handlers={HTTPException: _no_route},
        )

    # --------------------------------------------------------------------------------------------------- edge

    def _get(self, handler: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            return _guarded(request, lambda: handler(request))

        return run

    def _post(
        self, handler: Callable[[Request, bytes], Response], most: int = MOST_BYTES
    ) -> Callable[[Request], Awaitable[Response]]:
        """From the body's last byte to the answer nothing else runs, so that no request meets another half done."""

        async def run(request: Request) -> Response:
            try:
                body = await body_of(request, most)
            except RequestError as error:
                return refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)
            return _guarded(request, lambda: self._once(request, body, handler))

        return run

    def _once(self, request: Request, body: bytes, handler: Callable[[Request, bytes], Response]) -> Response:
        """Carries a request out, or answers as before where its key has been seen. Refusals changed nothing, and are not
        remembered."""
        key = request.headers.get("idempotency-key")
        if key is None:
            return handler(request, body)
        if not 0 < len(key) <= MOST_KEY or not key.isprintable():
            raise RequestError(400, f"Idempotency-Key: give 1 to {MOST_KEY} printable characters")
        digest = blake3.blake3(f"{request.url.path}?{request.url.query}\n".encode() + body).hexdigest()
        before = self._answers.get(key)
        if before is not None:
            if before[0] != digest:
                raise RequestError(409, "Idempotency-Key: it was used for another request", kind="conflict")
            self._answers.move_to_end(key)
            again = Response(before[1].body, media_type="application/json", headers={"Idempotent-Replay": "true"})
            return again
        found = handler(request, body)
        self._answers[key] = (digest, found)
        self._answers_bytes += len(found.body)
        while len(self._answers) > REMEMBERED or self._answers_bytes > REMEMBERED_BYTES:
            _, (_, dropped) = self._answers.popitem(last=False)
            self._answers_bytes -= len(dropped.body)
        return found

    def _world(self, request: Request) -> _World:
        if not request.url.path.startswith("/v2/"):
            if self.old is None:
                raise RequestError(400, "not initialised: POST /init first", kind="not_initialised")
            return self.old
        name = request.query_params.get("world", MAIN)
        found = self.worlds.get(name)
        if found is None:
            raise RequestError(400, f"no world {name[:60]!r}: POST /v2/init first", kind="not_initialised")
        found.used = time.monotonic()
        return found

    # --------------------------------------------------------------------------------------------- the original's

    def health(self, request: Request) -> Response:
        one = self.old or self.worlds.get(MAIN) or next(iter(self.worlds.values()), None)
        return answer({
            "status": "ok", "initialized": one is not None, "worlds": len(self.worlds),
            **wire.named(
                ("tick_number", "npc_count", "trajectory_buffer_size", "server_epoch"),
                {
                    "tick_number": one.market.tick if one else 0, "npc_count": len(one.market.seats) if one else 0,
                    "trajectory_buffer_size": len(one.record) if one else 0, "server_epoch": self.epoch,
                },
            ),
        })  # fmt: skip

    def init(self, request: Request, body: bytes) -> Response:
        asked: wire.InitRequest = wire.read_request(body, wire.InitRequest)
        seats = _seats(asked.number, asked.archetypes)
        settings = {"ticks": LONG_EPISODE, **self.settings}
        self.old = self._begin(
            settings, seats, asked.seed, 0, sequential=True, record=self.old.record if self.old else None
        )
        ids = [seat.agent for seat in seats]
        told = {"npc_ids": ids, "archetypes": dict.fromkeys(ids, wire.ARCHETYPE)}
        return answer({"status": "initialized", "seed": asked.seed, **wire.named(tuple(told), told)})

    def execute(self, request: Request, body: bytes) -> Response:
        asked: wire.ExecuteRequest = wire.read_request(body, wire.ExecuteRequest)
        world = self._world(request)
        one = _asked(world, asked)
        acted = world.market.act(asked.npc_id, one)
        told = _acted(acted)
        world.record.keep(_entry(asked.npc_id, world.market.tick, one, told))
        return answer(told)

    def move_on(self, request: Request, body: bytes) -> Response:
        moved = self._world(request).market.move_on()
        return answer(_public(moved))

    def reset(self, request: Request, body: bytes) -> Response:
        """The same episode again, from its beginning; the record of trajectories goes on."""
        world = self._world(request)
        market = world.market
        again = self._begin(
            world.settings, market.seats, market.seed, market.episode, sequential=market.sequential, record=world.record
        )
        world.market = again.market
        return answer({"status": "reset"})

    def scenario(self, request: Request) -> Response:
        npc_id = request.path_params["npc_id"]
        return answer(wire.scenario_to_wire(npc_id, self._world(request).market.observation(npc_id)))

    def npcs(self, request: Request) -> Response:
        market = self._world(request).market
        rows = [
            {**wire.named(("npc_id",), {"npc_id": seat.agent}), "archetype": wire.ARCHETYPE,
             "balance": market.balance(seat.agent)}
            for seat in market.seats
        ]  # fmt: skip
        return answer({"npcs": rows})

    def scenarios(self, request: Request) -> Response:
        """Ids alone for clients of the original; below ``/v2`` whole scenarios, empty when the episode is over."""
        market = self._world(request).market
        if not request.url.path.startswith("/v2/"):
            return answer({"scenarios": [wire.named(("npc_id",), {"npc_id": seat.agent}) for seat in market.seats]})
        seen = market.observations()
        rows = [wire.scenario_to_wire(agent, observation) for agent, observation in seen.items()]
        return answer(wire.ScenariosWire(tick_number=market.tick, done=market.done, scenarios=rows))

    # --------------------------------------------------------------------------------------------------- /v2 only

    def init_world(self, request: Request, body: bytes) -> Response:
        asked: wire.WorldRequest = wire.read_request(body, wire.WorldRequest)
        if asked.seats is None:
            seats = _seats(20 if asked.number is None else asked.number, asked.archetypes)
        elif asked.number is not None or asked.archetypes:
            raise wire.FieldError("seats", "give seats, or numNPCs and archetypes, not both")
        else:
            seats = tuple(Seat(agent=seat.npc_id, team=seat.team) for seat in asked.seats)
        self._room(asked.world)
        settings = {**self.settings, **asked.settings}
        before = self.worlds.get(asked.world)
        world = self._begin(
            settings, seats, asked.seed, asked.episode, sequential=False, record=before.record if before else None
        )
        self.worlds[asked.world] = world
        return self._begun(asked.world, world)

    def restore(self, request: Request, body: bytes) -> Response:
        asked: wire.RestoreRequest = wire.read_request(body, wire.RestoreRequest)
        self._room(asked.world)
        try:
            market = HostedMarket.restored(MarketEnv(), asked.snapshot)
        except (EnvError, KeyError) as error:
            raise wire.FieldError("snapshot", f"not a snapshot of a market ({str(error)[:200]})") from error
        before = self.worlds.get(asked.world)
        rules = msgspec.structs.asdict(market.env.world.rules)
        world = _World(
            market=market, record=before.record if before else _Record(self.buffer), settings=rules, restored=True
        )
        self.worlds[asked.world] = world
        return self._begun(asked.world, world)

    def _begun(self, name: str, world: _World) -> Response:
        market = world.market
        ids = [seat.agent for seat in market.seats]
        return answer(wire.BegunWire(
            status="initialized", world=name, npc_ids=ids, archetypes=dict.fromkeys(ids, wire.ARCHETYPE), seed=market.seed,
            episode=market.episode, tick_number=market.tick, done=market.done, state_digest=market.digest(),
            server_epoch=self.epoch,
        ))  # fmt: skip

    def queue(self, request: Request, body: bytes) -> Response:
        asked: wire.ExecuteRequest = wire.read_request(body, wire.ExecuteRequest)
        world = self._world(request)
        one = _asked(world, asked)
        world.market.put(asked.npc_id, one)
        told = {"action_id": one.action_id, "tick_number": world.market.tick, "status": "queued"}
        return answer(wire.named(tuple(told), told))

    def advance(self, request: Request, body: bytes) -> Response:
        asked: wire.TickRequest = wire.read_request(body, wire.TickRequest)
        world = self._world(request)
        market = world.market
        if asked.tick is not None and asked.tick != market.tick:
            raise ConflictError(f"the market is at tick {market.tick}, not {asked.tick}")
        before = dict(market.queue)
        try:  # all of the request, or nothing of it
            for index, one in enumerate(asked.actions):
                try:
                    market.put(one.npc_id, _asked(world, one))
                except wire.FieldError as error:
                    raise wire.FieldError(f"actions[{index}].{error.field}", str(error).partition(": ")[2]) from error
            missing = market.missing()
            if missing and asked.missing == "refuse":
                raise ConflictError(
                    f"no action of {', '.join(missing[:5])} ({len(missing)} in all): send them, or missing = wait"
                )
        except SparringError:
            market.queue = before
            raise
        moved = self._advanced(request, world)
        outcomes = [_outcome(one) for one in moved.settled]
        for settled, told in zip(moved.settled, outcomes, strict=True):
            turn = settled.outcome.turn
            world.record.keep(_entry(turn.agent, turn.tick, settled.asked, msgspec.to_builtins(told)))
        public = _public(moved)
        return answer(wire.TickWire(
            tick_number=moved.tick, outcomes=outcomes, events=public["events"], market_changes=public["marketChanges"],
            truncated=sorted(moved.truncated), done=moved.done, state_digest=market.digest(),
        ))  # fmt: skip

    def _advanced(self, request: Request, world: _World) -> Moved:
        """A state from outside may be decoded well and yet make no sense; its world then ends, and says so."""
        try:
            return world.market.advance()
        except (LookupError, TypeError, ValueError, ArithmeticError, AssertionError, AttributeError) as error:
            if not world.restored:
                raise
            del self.worlds[request.query_params.get("world", MAIN)]
            raise RequestError(
                409,
                f"the restored state contradicts itself ({type(error).__name__}): its world was closed",
                kind="conflict",
            ) from error

    def snapshot(self, request: Request) -> Response:
        market = self._world(request).market
        return answer(wire.SnapshotWire(snapshot=market.env.snapshot(), state_digest=market.digest()))

    def close(self, request: Request, body: bytes) -> Response:
        self._world(request)
        del self.worlds[request.query_params.get("world", MAIN)]
        return answer({"status": "closed"})

    # ---------------------------------------------------------------------------------------------------- the record

    def trajectories(self, request: Request) -> Response:
        world = self._world(request)
        limit = _limit(request)
        since = _since(request.query_params.get("since_id"), world.record)
        rows = world.record.after(since, limit)
        told = {
            "trajectories": [msgspec.Raw(row) for row in rows], "count": len(rows), "last_id": f"traj-{since + len(rows)}",
            "total_buffered": len(world.record), "server_epoch": self.epoch,
        }  # fmt: skip
        return answer(wire.named(tuple(told), told))

    def stream(self, request: Request) -> Response:
        """Server-sent events: an event for each trajectory, with its number as the event's id."""
        world = self._world(request)
        told = request.query_params.get("since_id") or request.headers.get("last-event-id")
        since = _since(told, world.record)
        if self._streams >= MOST_STREAMS:
            raise RequestError(429, f"{MOST_STREAMS} streams are open: close one", headers={"Retry-After": "5"})
        self._streams += 1
        return StreamingResponse(
            self._events(world.record, since), media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )  # fmt: skip

    async def _events(self, record: _Record, since: int) -> AsyncIterator[bytes]:
        try:
            while True:
                news = record.news
                try:
                    rows = record.after(since, LARGEST_PAGE)
                except EvictedError as error:  # a reader that is too slow is told so, and goes on from where it can
                    yield b"event: evicted\ndata: " + msgspec.json.encode({"lost": error.lost}) + b"\n\n"
                    since = error.resume_after
                    continue
                for row in rows:
                    since += 1
                    yield f"id: traj-{since}\ndata: ".encode() + row + b"\n\n"
                if rows:
                    continue
                try:
                    await asyncio.wait_for(news.wait(), STREAM_BEAT)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._streams -= 1

    def stats(self, request: Request) -> Response:
        ring = self._world(request).record
        told = {
            "total_recorded": ring.newest, "total_buffered": len(ring), "evicted": ring.oldest - 1, "capacity": self.buffer,
            "streams": self._streams, "server_epoch": self.epoch,
        }  # fmt: skip
        return answer(wire.named(tuple(told), told))

    # --------------------------------------------------------------------------------------------------------- parts

    def _begin(
        self, settings: Mapping[str, Any], seats: tuple[Seat, ...], seed: int, episode: int, *, sequential: bool,
        record: _Record | None,
    ) -> _World:  # fmt: skip
        try:
            env = MarketEnv(**settings)
        except ConfigError as error:
            raise wire.FieldError("settings", str(error)) from error
        try:
            market = HostedMarket.begin(env, seats, seed=seed, episode=episode, sequential=sequential)
        except ConfigError as error:
            raise wire.FieldError("numNPCs", str(error)) from error
        except EnvError as error:
            raise wire.FieldError("seed" if "64 bits" in str(error) else "seats", str(error)) from error
        return _World(market=market, record=record or _Record(self.buffer), settings=dict(settings))

    def _room(self, name: str) -> None:
        """
        Raises:
            FieldError: No name. RequestError: 429, there are too many worlds, and all in use.
        """
        if not 0 < len(name) <= 100 or not name.isprintable():
            raise wire.FieldError("world", "give 1 to 100 printable characters")
        if name in self.worlds or len(self.worlds) < self.most_worlds:
            return
        oldest = min(self.worlds, key=lambda other: self.worlds[other].used)
        if time.monotonic() - self.worlds[oldest].used < self.idle_seconds:
            raise RequestError(
                429, f"{self.most_worlds} worlds are in use: POST /v2/close those that are over, or serve with more",
                headers={"Retry-After": "30"}, kind="full",
            )  # fmt: skip
        del self.worlds[oldest]


# ------------------------------------------------------------------------------------------------------------ answers


def _guarded(request: Request, run: Callable[[], Response]) -> Response:
    """The one catch, at the edge. A page in a browser says where it is from, and has no business here."""
    try:
        if request.headers.get("origin") is not None:
            raise RequestError(403, "web pages may not call this server", kind="forbidden")
        return run()
    except RequestError as error:
        return refusal(error)
    except wire.FieldError as error:
        return refusal(RequestError(422, str(error), kind="invalid_field", details={"field": error.field}))
    except UnknownAgentError as error:
        return refusal(RequestError(404, str(error), kind="unknown_npc"))
    except ConflictError as error:
        return refusal(RequestError(409, str(error), kind="conflict"))
    except EvictedError as error:
        more = {"evicted": error.lost, "resume_since_id": f"traj-{error.resume_after}"}
        text = f"{error}: go on with since_id={more['resume_since_id']}"
        return refusal(RequestError(410, text, kind="evicted", details=wire.named(tuple(more), more)))


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return refusal(RequestError(status, f"{request.method} {request.url.path[:100]} is no route of the market"))


def _seats(number: int, archetypes: list[str]) -> tuple[Seat, ...]:
    if not 1 <= number <= 200:
        raise wire.FieldError("numNPCs", "give a whole number from 1 to 200")
    if len(archetypes) > 1000:
        raise wire.FieldError("archetypes", "give at most 1000 teams")
    for index, team in enumerate(archetypes):
        if team not in TEAMS:
            raise wire.FieldError(f"archetypes[{index}]", f"no team {team[:60]!r}{nearest(team[:60], TEAMS)}")
    teams = archetypes or list(TEAMS)
    return tuple(Seat(agent=f"npc-{i:03d}", team=teams[i % len(teams)]) for i in range(number))


def _asked(world: _World, request: wire.ExecuteRequest) -> Asked:
    """
    Raises:
        FieldError: A field is wrong. UnknownAgentError: Nobody of this id.
    """
    market, agent = world.market, request.npc_id
    balance = market.balance(agent)
    action = wire.action_from_wire(request.action)
    action_id = request.action_id
    if action_id is None:
        action_id = f"{market.episode}/{agent}/{market.tick}"
    elif not 0 < len(action_id) <= MOST_KEY or not action_id.isprintable():
        raise wire.FieldError("actionId", f"give 1 to {MOST_KEY} printable characters")
    if request.reasoning is not None and len(request.reasoning) > wire.MOST_REASONING:
        raise wire.FieldError("reasoning", f"give at most {wire.MOST_REASONING} characters")
    return Asked(
        action_id=action_id, action=action, wire=request.action, balance=balance, reasoning=request.reasoning
    )  # fmt: skip


def _acted(acted: Acted) -> dict[str, Any]:
    told = {
        "success": acted.refusal is None, "pnl": acted.profit, "new_balance": acted.cash,
        "new_positions": wire.positions_to_wire(acted.observation),
        "social_impact": {"reputation_delta": -acted.reports, "replies_received": acted.replies}, "events": [],
    }  # fmt: skip
    if acted.refusal is not None:
        told["error"] = acted.refusal
    return wire.named(tuple(told), told)


def _outcome(settled: Settled) -> wire.OutcomeWire:
    turn = settled.outcome.turn
    return wire.OutcomeWire(
        action_id=settled.asked.action_id, npc_id=turn.agent, tick=turn.tick, settled_at=settled.outcome.settled_at,
        facts=wire.facts_to_wire(settled.outcome.facts),  # type: ignore[arg-type]
    )  # fmt: skip


def _public(moved: Moved) -> dict[str, Any]:
    """What everybody may know of a tick."""
    events: list[dict[str, Any]] = [
        {"type": "comment", "content": text, **wire.named(("actor_id",), {"actor_id": handle})}
        for handle, text in moved.comments
    ]
    events += [{"type": "resolved", **wire.named(("market_id",), {"market_id": market})} for market in moved.closed]
    if moved.done:
        events.append({"type": "episode_over"})
    changes = [{"market": name, "before": old, "after": new} for name, old, new in moved.prices if old != new]
    told = {"tick_number": moved.tick, "events": events, "market_changes": changes}
    return wire.named(tuple(told), told)


def _entry(agent: str, tick: int, asked: Asked, outcome: Mapping[str, Any]) -> dict[str, Any]:
    told = {
        "tick": tick, "npc_id": agent, "archetype": wire.ARCHETYPE, "action": dict(asked.wire), "outcome": outcome,
        "scenario": {"balance": asked.balance, "archetype": wire.ARCHETYPE}, "action_id": asked.action_id,
        "timestamp": time.time_ns() // 1_000_000,
    }  # fmt: skip
    if asked.reasoning is not None:
        told["reasoning"] = asked.reasoning
    return wire.named(tuple(told), told)


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(PAGE))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= LARGEST_PAGE:
        raise wire.FieldError("limit", f"give a whole number from 1 to {LARGEST_PAGE}")
    return int(given)


def _since(given: str | None, ring: Ring) -> int:
    """The number after which entries are wanted; the oldest that are kept where none is given."""
    if given is None or given == "":
        return ring.oldest - 1
    number = given.removeprefix("traj-")
    if not number.isascii() or not number.isdigit() or len(number) > 18:
        raise wire.FieldError("since_id", "give the id of a trajectory, as in traj-17")
    return int(number)
