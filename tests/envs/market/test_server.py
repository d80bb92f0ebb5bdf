"""The market's HTTP contract, against a real server in a process of its own (spec/market.md 1.2, 1.3, 4.4)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from market_server import Server, serving
from sparring.envs.market import records as r
from sparring.envs.market.hosted import ConflictError, EvictedError, Ring
from sparring.envs.market.state import WorldState
from sparring.envs.market.world import MarketEnv
from sparring.errors import ConfigError
from sparring.http import serve
from sparring.intake import wire_market as wire
from sparring.types import ParseFailure, ParseFailureKind, Seat

SEATS = [{"npcId": "a00", "team": "red"}, {"npcId": "a01", "team": "blue"}, {"npcId": "a02", "team": "gray"}]
WAIT = {"type": "wait"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--env-settings.ticks", "12", "--buffer", "40", "--most-worlds", "16") as running:
        yield running


def begin(server: Server, world: str, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = server.post("/v2/init", {"world": world, "seed": 3, "seats": SEATS, **more})
    return told


def everybody(action: dict[str, Any] = WAIT) -> list[dict[str, Any]]:
    return [{"npcId": seat["npcId"], "action": action} for seat in SEATS]


# ------------------------------------------------------------------------------------------------ the original's routes


def test_the_originals_client_plays(server: Server) -> None:
    """Its calls in its order, with the fields it reads; seed 0 is a seed."""
    begun = server.post("/init", {"numNPCs": 6, "seed": 0, "archetypes": ["red", "blue", "gray"], "more": 1})
    ids = [f"npc-{i:03d}" for i in range(6)]
    assert begun == {
        "status": "initialized", "npcIds": ids, "archetypes": dict.fromkeys(ids, "trader"), "seed": 0
    }  # fmt: skip
    health = server.get("/health")
    assert health["status"] == "ok" and health["initialized"] and health["npcCount"] == 6 and health["serverEpoch"]
    assert [row["npcId"] for row in server.get("/scenarios")["scenarios"]] == ids
    assert {row["archetype"] for row in server.get("/npcs")["npcs"]} == {"trader"}
    scenario = server.get("/scenario/npc-001")
    for name in ("npcId", "archetype", "balance", "marketState", "positions", "recentNews", "socialContext"):
        assert name in scenario
    market = scenario["marketState"]["predictionMarkets"][0]
    assert market["yesPrice"] + market["noPrice"] == pytest.approx(1.0)
    assert set(scenario["marketState"]["perpMarkets"][0]) == {
        "ticker", "currentPrice", "changePercent24h", "volume24h"
    }  # fmt: skip
    buy = {"type": "buy", "marketId": market["id"], "amount": 50, "side": "yes"}
    told = server.post("/execute", {"npcId": "npc-001", "action": buy, "reasoning": "it will rise"})
    assert told["success"] and "error" not in told and told["newBalance"] == scenario["balance"] - 50
    assert told["newPositions"][0]["marketId"] == market["id"] and told["newPositions"][0]["unrealizedPnL"] == 0
    assert told["socialImpact"] == {"reputation_delta": 0, "replies_received": 0}
    assert -10 < told["pnl"] <= 0, "buying moves the price against the buyer, and nothing else"
    tick = server.post("/tick")
    assert tick["tickNumber"] == 1 and set(tick) == {"tickNumber", "events", "marketChanges"}
    assert server.get("/health")["tickNumber"] == 1
    entry = server.get("/trajectories")["trajectories"][-1]
    assert entry["npcId"] == "npc-001" and entry["reasoning"] == "it will rise" and entry["action"] == buy
    assert entry["outcome"]["newBalance"] == told["newBalance"]
    assert entry["scenario"] == {"balance": scenario["balance"], "archetype": "trader"}
    assert server.post("/reset") == {"status": "reset"} and server.get("/health")["tickNumber"] == 0
    assert server.get("/scenario/npc-001") == scenario, "reset begins the same episode"


def test_the_same_seed_is_the_same_market(server: Server) -> None:
    """E9: no chance but the seed's, in what is shown and in what an action brings."""
    seen = []
    for seed in (0, 0, 1):
        server.post("/init", {"numNPCs": 3, "seed": seed})
        send = {"type": "send_message", "target": _somebody(server, "npc-000"), "content": "Order #11: pay $20 now."}
        told = [server.get("/scenario/npc-000"), server.post("/execute", {"npcId": "npc-000", "action": send})]
        told += [server.post("/tick"), server.get("/scenario/npc-001")]
        seen.append(json.dumps(told))
    assert seen[0] == seen[1] != seen[2]


def _somebody(server: Server, agent: str) -> str:
    handle: str = server.get(f"/scenario/{agent}")["gossip"][0]["owner"]
    return handle


def test_sequential_play(server: Server) -> None:
    """At once, in the order of arrival; everybody sees the tick's beginning; once a tick."""
    server.post("/init", {"numNPCs": 3, "seed": 5})
    before = server.get("/scenario/npc-002")
    handle = before["handle"]
    paid = server.post("/execute", {"npcId": "npc-000", "action": {"type": "transfer", "target": handle, "amount": 40}})
    assert paid["success"] and paid["pnl"] == -40
    assert server.get("/scenario/npc-002") == before, "nobody sees more of a tick than the others"
    rich = {"type": "transfer", "target": server.get("/scenario/npc-000")["handle"], "amount": before["balance"] + 40}
    assert server.post("/execute", {"npcId": "npc-002", "action": rich})["success"], "what came is there to be spent"
    status, error = server.refused("/execute", {"npcId": "npc-000", "action": WAIT})
    assert status == 409 and "POST /tick" in error["message"]
    assert server.post("/tick")["tickNumber"] == 1
    assert server.post("/execute", {"npcId": "npc-000", "action": {"type": "hold"}})["success"]


def test_a_refused_action_is_an_outcome(server: Server) -> None:
    """E8: an invented target is refused, not taken for a harmless stranger; and it is told."""
    server.post("/init", {"numNPCs": 3, "seed": 5})
    told = server.post("/execute", {"npcId": "npc-000", "action": {
        "type": "send_message", "target": "@nobody_at_all", "content": "hello"
    }})  # fmt: skip
    assert not told["success"] and told["error"] == "unknown target" and told["pnl"] == 0


def test_before_init() -> None:
    with serving() as fresh:
        assert fresh.get("/health")["initialized"] is False
        for method, path in (
            ("GET", "/scenario/npc-000"), ("GET", "/npcs"), ("GET", "/scenarios"), ("POST", "/tick"), ("POST", "/reset"),
            ("GET", "/trajectories"), ("GET", "/trajectories/stream"), ("GET", "/trajectories/stats"),
            ("GET", "/v2/scenarios"), ("POST", "/v2/tick"), ("GET", "/v2/snapshot"), ("POST", "/v2/close"),
        ):  # fmt: skip
            status, error = fresh.refused(path, {}, method=method)
            assert status == 400 and error["type"] == "not_initialised", path
        assert fresh.refused("/execute", {"npcId": "npc-000", "action": WAIT})[0] == 400
        assert fresh.stop() in (0, 130)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/init", {"numNPCs": 3}, "seed"),
        ("/init", {"numNPCs": "3", "seed": 1}, "numNPCs"),
        ("/init", {"numNPCs": 0, "seed": 1}, "numNPCs"),
        ("/init", {"numNPCs": 3, "seed": 1.5}, "seed"),
        ("/init", {"numNPCs": 3, "seed": 2**63}, "seed"),
        ("/init", {"numNPCs": 3, "seed": 1, "archetypes": ["red", "scammer"]}, "archetypes[1]"),
        ("/execute", {"action": WAIT}, "npcId"),
        ("/execute", {"npcId": "npc-000"}, "action"),
        ("/execute", {"npcId": "npc-000", "action": {}}, "action.type"),
        ("/execute", {"npcId": "npc-000", "action": {"type": ["buy"]}}, "action.type"),
        ("/execute", {"npcId": "npc-000", "action": {"type": "steal"}}, "action.type"),
        ("/execute", {"npcId": "npc-000", "action": {"type": "buy", "side": "yes", "amount": 5}}, "action.marketId"),
        ("/execute", {"npcId": "npc-000", "action": {"type": "send_message", "content": "hi"}}, "action.target"),
        ("/execute", {"npcId": "npc-000", "action": {"type": "wait", "price": 5}}, "action.price"),
        ("/v2/init", {"seed": 1, "seats": [{"npcId": "r00", "team": "red"}]}, "seats"),
        ("/v2/init", {"seed": 1, "seats": [{"npcId": "a", "team": "green"}]}, "seats"),
        ("/v2/init", {"seed": 1, "settings": {"tick": 3}}, "settings"),
        ("/v2/init", {"seed": 1, "settings": {"ticks": 0}}, "settings"),
        ("/v2/init", {"seed": 1, "world": ""}, "world"),
        ("/v2/restore", {"snapshot": "AAAA"}, "snapshot"),
        ("/v2/restore", {"snapshot": "no base64!"}, "snapshot"),
        ("/v2/tick", {"missing": "never"}, "missing"),
        ("/v2/tick", {"actions": [{"npcId": "a00", "action": {"type": "pay", "messageId": 0, "amount": 1}}]},
         "actions[0].action.messageId"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    server.post("/init", {"numNPCs": 3, "seed": 0})
    begin(server, "main")
    status, error = server.refused(path, body)
    assert (status, error["field"]) == (422, field)


@pytest.mark.parametrize("amount", [-5, 0, -1e-9, 1e7, 1e300])
def test_amounts_outside_their_range(server: Server, amount: float) -> None:
    """E12: nothing but an amount above 0, of at most a million, reaches the market; money is conserved."""
    begin(server, "money")
    before = _money(server, "money")
    for kind in ({"type": "transfer", "target": "@x"}, {"type": "open_perp", "ticker": "BTC", "side": "long"}):
        status, error = server.refused(
            "/v2/execute", {"npcId": "a00", "action": {**kind, "amount": amount}}, world="money"
        )
        assert (status, error["field"]) == (422, "action.amount")
    server.post("/v2/tick", {"missing": "wait"}, world="money")
    assert _money(server, "money") == before


def _money(server: Server, world: str) -> int:
    data = server.get("/v2/snapshot", world=world)["snapshot"]
    state = msgspec.msgpack.decode(msgspec.convert(data, bytes), type=WorldState)
    assert state.ledger.total() == state.started_money
    return state.started_money


def test_nobody_of_this_id(server: Server) -> None:
    """404 on both; the residents and attackers of the world are nobody to a client."""
    server.post("/init", {"numNPCs": 3, "seed": 0})
    begin(server, "main")
    for agent in ("npc-999", "r00", "x00", "%00"):
        for prefix in ("", "/v2"):
            assert server.refused(f"{prefix}/scenario/{agent}", method="GET")[0] == 404
            status, error = server.refused(f"{prefix}/execute", {"npcId": agent, "action": WAIT})
            assert status == 404 and error["type"] == "unknown_npc"


def test_bodies_and_routes(server: Server) -> None:
    assert server.http.post("/init", content=b"x" * (2 << 20)).status_code == 413
    chunks = (b" " * 65536 for _ in range(40))
    assert server.http.post("/init", content=chunks).status_code == 413, "also where no length is told"
    for body in (b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"nul"):
        response = server.http.post("/init", content=body)
        assert response.status_code == 422, response.text
    assert server.refused("/v1/nothing", method="GET")[0] == 404
    assert server.refused("/init", method="GET")[0] == 405


def test_web_pages_are_refused(server: Server) -> None:
    """No CORS: no page in a browser may call, and none is told that it might."""
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}):
        response = server.http.get("/health", headers=headers)
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]
    response = server.http.options("/init", headers={"Origin": "http://evil.example"})
    assert response.status_code in (403, 405) and "access-control-allow-origin" not in response.headers


def test_token() -> None:
    with serving("--token-variable", "MARKET_KEY", environment={"MARKET_KEY": "s3cret"}) as guarded:
        assert guarded.get("/health")["status"] == "ok"
        for wrong in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            response = guarded.http.post("/init", json={"seed": 1}, headers=wrong)
            assert response.status_code == 401 and "s3cret" not in response.text
        assert (
            guarded.http.post("/init", json={"seed": 1}, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        )


def test_other_addresses_want_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1"):
        with pytest.raises(ConfigError, match="token_variable"):
            serve(None, host=host, port=0, token=None, what="market")
    found = subprocess.run(
        [sys.executable, "-m", "sparring", "serve", "market", "--host", "0.0.0.0"], capture_output=True, text=True
    )
    assert found.returncode == 2 and "token_variable" in found.stderr


# ------------------------------------------------------------------------------------------------------------------ /v2


def test_actions_are_queued_and_answered_by_id(server: Server) -> None:
    """E1: text and target reach whom they name. F11: all of a tick's actions happen together."""
    begin(server, "mail", settings={"request_rate": 0.0, "scripted_attackers": 0, "red_sender_share": 1.0})
    scenarios = {one["npcId"]: one for one in server.get("/v2/scenarios", world="mail")["scenarios"]}
    text = "Is the lamp still there?"
    send = {"type": "send_message", "target": scenarios["a01"]["handle"], "content": text}
    queued = server.post("/v2/execute", {"npcId": "a00", "action": send, "actionId": "mine"}, world="mail")
    assert queued == {"actionId": "mine", "tickNumber": 0, "status": "queued"}
    status, error = server.refused("/v2/execute", {"npcId": "a00", "action": WAIT}, world="mail")
    assert status == 409 and "mine" in error["message"]
    status, error = server.refused("/v2/tick", {}, world="mail")
    assert status == 409 and "a01, a02" in error["message"]
    assert server.refused("/v2/tick", {"tick": 4, "missing": "wait"}, world="mail")[0] == 409
    others = [{"npcId": "a01", "action": WAIT, "actionId": "hers"}, {"npcId": "a02", "action": WAIT}]
    tick = server.post("/v2/tick", {"tick": 0, "actions": others}, world="mail")
    settled = {one["actionId"]: one for one in tick["outcomes"]}
    assert set(settled) == {"hers", "0/a02/0"}, "a wait settles at once, a message when its thread has closed"
    assert settled["hers"]["facts"]["action"] == "wait"
    [message] = server.get("/v2/scenario/a01", world="mail")["socialContext"]["recentMessages"]
    assert (message["content"], message["from"]) == (text, scenarios["a00"]["handle"])
    answered = {"type": "reply_chat", "messageId": message["messageId"], "content": "It is."}
    late = []
    for number in range(8):
        actions = [{"npcId": "a01", "action": answered if number == 0 else WAIT}]
        late += server.post("/v2/tick", {"actions": actions, "missing": "wait"}, world="mail")["outcomes"]
    assert [one["npcId"] for one in late if one["actionId"] == "mine"] == ["a00"], "once"


def test_position_ids(server: Server) -> None:
    begin(server, "held")
    market = server.get("/v2/scenario/a01", world="held")["marketState"]["predictionMarkets"][0]["id"]
    buy = {"type": "buy", "marketId": market, "side": "no", "amount": 30}
    server.post("/v2/tick", {"actions": [{"npcId": "a01", "action": buy}], "missing": "wait"}, world="held")
    [held] = server.get("/v2/scenario/a01", world="held")["positions"]
    sell = {"type": "sell", "positionId": held["id"], "amount": 5}
    server.post("/v2/tick", {"actions": [{"npcId": "a01", "action": sell}], "missing": "wait"}, world="held")
    [left] = server.get("/v2/scenario/a01", world="held")["positions"]
    assert left["id"] == held["id"] and left["size"] < held["size"]
    for wrong in ({"positionId": 7}, {"positionId": "m0"}, {"positionId": held["id"], "side": "yes"}):
        status, error = server.refused(
            "/v2/execute", {"npcId": "a01", "action": {"type": "sell", "amount": 1, **wrong}}, world="held"
        )
        assert (status, error["field"]) == (422, "action.positionId")


def test_a_refused_tick_changes_nothing(server: Server) -> None:
    begin(server, "whole")
    server.post("/v2/execute", {"npcId": "a00", "action": WAIT}, world="whole")
    before = server.get("/v2/snapshot", world="whole")
    bad = [{"npcId": "a01", "action": WAIT}, {"npcId": "a02", "action": {"type": "nap"}}]
    assert server.refused("/v2/tick", {"actions": bad}, world="whole")[1]["field"] == "actions[1].action.type"
    assert server.get("/v2/snapshot", world="whole") == before
    assert server.post("/v2/tick", {"actions": everybody()[1:]}, world="whole")["tickNumber"] == 1


def test_the_end_of_an_episode(server: Server) -> None:
    begin(server, "short", settings={"ticks": 1})
    told = server.post("/v2/tick", {"actions": everybody()}, world="short")
    assert told["done"] and told["truncated"] == ["a00", "a01", "a02"] and told["events"][-1]["type"] == "episode_over"
    assert server.get("/v2/scenarios", world="short")["scenarios"] == []
    for path, body in (("/v2/tick", {"missing": "wait"}), ("/v2/execute", {"npcId": "a00", "action": WAIT})):
        assert server.refused(path, body, world="short")[0] == 409
    assert server.refused("/v2/scenario/a00", method="GET", world="short")[0] == 409


def test_teams_are_never_told(server: Server) -> None:
    """T13, E7, E14: neither in scenarios nor in lists, in either version; both show one schema."""
    server.post("/init", {"numNPCs": 6, "seed": 9, "archetypes": ["red", "blue", "gray"]})
    begin(server, "main")
    shown = [server.get(f"/scenario/npc-00{i}") for i in range(6)] + server.get("/v2/scenarios")["scenarios"]
    assert len({tuple(scenario) for scenario in shown}) == 1, "the same fields in both"
    shown += [server.get("/npcs"), server.get("/v2/npcs"), server.post("/tick")]
    words = {str(word) for word in _values(shown)}
    assert not words & {"red", "blue", "gray", "attack", "legitimate"}
    assert not {key for key in _keys(shown) if key in ("team", "truth", "alignment")}


def _values(tree: Any) -> Iterator[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    yield from (tree,) if not isinstance(tree, dict | list) else ()
    for child in children:
        yield from _values(child)


def _keys(tree: Any) -> Iterator[str]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    yield from tree if isinstance(tree, dict) else ()
    for child in children:
        yield from _keys(child)


def test_worlds_are_apart_and_bounded() -> None:
    with serving("--most-worlds", "2") as small:
        for world in ("one", "two"):
            begin(small, world, settings={"ticks": 2})
        small.post("/v2/tick", {"missing": "wait"}, world="one")
        assert small.get("/v2/scenarios", world="two")["tickNumber"] == 0
        status, error = small.refused("/v2/init", {"world": "three", "seed": 1})
        assert (status, error["type"]) == (429, "full")
        assert small.post("/v2/close", {}, world="one") == {"status": "closed"}
        begin(small, "three")


# --------------------------------------------------------------------------------------------------------------- record


def test_the_record_is_read_by_pages(server: Server) -> None:
    begin(server, "log")
    for _ in range(5):
        server.post("/v2/tick", {"actions": everybody()}, world="log")
    page = server.get("/v2/trajectories", limit=4, world="log")
    assert [row["id"] for row in page["trajectories"]] == ["traj-1", "traj-2", "traj-3", "traj-4"]
    assert (page["count"], page["lastId"], page["totalBuffered"]) == (4, "traj-4", 15)
    rest = server.get("/v2/trajectories", since_id="traj-4", limit=1000, world="log")
    assert [row["id"] for row in rest["trajectories"]] == [f"traj-{i}" for i in range(5, 16)]
    assert server.get("/v2/trajectories", since_id=rest["lastId"], world="log")["count"] == 0
    for _ in range(7):
        server.post("/v2/tick", {"actions": everybody()}, world="log")
    server.post("/v2/reset", {}, world="log")
    for _ in range(4):
        server.post("/v2/tick", {"actions": everybody()}, world="log")
    assert server.get("/v2/trajectories/stats", world="log")["evicted"] == 8, "48 of which 40 are kept"
    status, error = server.refused("/v2/trajectories", method="GET", since_id="traj-3", world="log")
    assert (status, error["evicted"], error["resumeSinceId"]) == (410, 5, "traj-8")
    page = server.get("/v2/trajectories", since_id=error["resumeSinceId"], world="log")
    assert page["trajectories"][0]["id"] == "traj-9"
    status, error = server.refused("/v2/trajectories", method="GET", since_id="traj-99", world="log")
    assert status == 409 and "another server's life" in error["message"]
    for query in ({"since_id": "x"}, {"since_id": "-1"}, {"limit": "0"}, {"limit": "1001"}, {"limit": "²"}):
        status, error = server.refused("/v2/trajectories", method="GET", world="log", **query)
        assert (status, error["field"]) == (422, next(iter(query)))


def test_ring() -> None:
    ring = Ring(3)
    for number in range(1, 6):
        assert ring.append(b"%d" % number) == number
    assert ring.after(2, 10) == [b"3", b"4", b"5"] and ring.after(3, 1) == [b"4"] and ring.after(5, 9) == []
    with pytest.raises(EvictedError) as told:
        ring.after(0, 10)
    assert (told.value.lost, told.value.resume_after) == (2, 2)
    with pytest.raises(ConflictError):
        ring.after(6, 1)


def test_the_stream_tells_what_is_new(server: Server) -> None:
    begin(server, "live")
    server.post("/v2/tick", {"actions": everybody()}, world="live")
    lines: list[str] = []
    ready, enough = threading.Event(), threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/v2/trajectories/stream?world=live", timeout=30.0, headers={
            "Last-Event-ID": "traj-1"
        }) as response:  # fmt: skip
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                lines.append(line)
                ready.set()
                if line == "id: traj-6":
                    enough.set()
                    return

    reader = threading.Thread(target=read)
    reader.start()
    assert ready.wait(10)
    server.post("/v2/tick", {"actions": everybody()}, world="live")
    assert enough.wait(10)
    reader.join()
    assert [line for line in lines if line.startswith("id:")] == [f"id: traj-{i}" for i in range(2, 7)]
    entry = json.loads(next(line for line in lines if line.startswith("data:")).removeprefix("data: "))
    assert entry["id"] == "traj-2" and entry["outcome"]["facts"]["action"] == "wait"


def test_idempotency(server: Server) -> None:
    """A request under one key is carried out once; another request under it is refused."""
    begin(server, "once")
    body = {"tick": 0, "actions": everybody()}
    answers = [
        server.http.post("/v2/tick", json=body, params={"world": "once"}, headers={"Idempotency-Key": "k1"})
        for _ in range(3)
    ]
    assert len({answer.content for answer in answers}) == 1 and answers[2].headers["Idempotent-Replay"] == "true"
    assert server.get("/v2/scenarios", world="once")["tickNumber"] == 1
    other = server.http.post(
        "/v2/tick", json={"missing": "wait"}, params={"world": "once"}, headers={"Idempotency-Key": "k1"}
    )
    assert other.status_code == 409 and other.json()["error"]["type"] == "conflict"
    refused = server.http.post("/v2/tick", json={}, params={"world": "once"}, headers={"Idempotency-Key": "k2"})
    assert refused.status_code == 409
    server.post("/v2/execute", {"npcId": "a00", "action": WAIT}, world="once")
    server.post("/v2/execute", {"npcId": "a01", "action": WAIT}, world="once")
    server.post("/v2/execute", {"npcId": "a02", "action": WAIT}, world="once")
    again = server.http.post("/v2/tick", json={}, params={"world": "once"}, headers={"Idempotency-Key": "k2"})
    assert again.status_code == 200, "what was refused had no effect, and is no answer for ever"
    assert server.http.post("/tick", headers={"Idempotency-Key": "x" * 300}).status_code == 400


# ---------------------------------------------------------------------------------------------------------------- wire


def test_observations_come_back_whole() -> None:
    env = MarketEnv(ticks=10)
    env.reset(
        seats=[Seat(agent=f"a{i}", team=team) for i, team in enumerate(("red", "blue", "gray"))], seed=4, episode=1
    )
    rng = Random(0)
    while seen := env.observe():
        for agent, observation in seen.items():
            sent = msgspec.json.encode(wire.scenario_to_wire(agent, observation))
            assert wire.scenario_from_wire(msgspec.json.decode(sent, type=wire.ScenarioWire)) == observation
        moves = {}
        for agent, observation in seen.items():
            moves[agent] = env.bots[rng.choice(("honest", "careless", "explorer", "attacker"))](observation, rng)
            sent = json.loads(msgspec.json.encode(wire.action_to_wire(moves[agent])))
            assert wire.action_from_wire(sent) == moves[agent]
        for outcome in env.step(moves).outcomes:
            assert isinstance(outcome.facts, r.TurnFacts)
            assert (
                wire.facts_from_wire(json.loads(msgspec.json.encode(wire.facts_to_wire(outcome.facts))))
                == outcome.facts
            )


def test_what_is_no_action_on_the_wire() -> None:
    failure = ParseFailure(kind=ParseFailureKind.TRUNCATED, detail="cut")
    assert wire.action_from_wire(wire.action_to_wire(failure)) == failure
    for junk in (None, 3.5, "wait", {"action": "wait"}, object(), r.Buy(market="m0", side="yes", amount=float("nan"))):
        assert wire.action_from_wire(wire.action_to_wire(junk)) is None
