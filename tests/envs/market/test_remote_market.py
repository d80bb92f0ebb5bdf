"""The market of a server as an environment: the same episode as in process, also over lost answers and a killed server."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from market_server import Server, serving
from sparring.envs.check import check_env
from sparring.envs.load import load_env
from sparring.envs.market.remote import MarketClient, RemoteMarket
from sparring.envs.market.world import MarketEnv
from sparring.errors import ConfigError, EnvError
from sparring.types import ParseFailure, ParseFailureKind, Seat

SEATS = tuple(
    Seat(agent=f"a{i:02d}", team=team) for i, team in enumerate(("blue", "red", "gray", "red", "blue", "gray"))
)
FAILURE = ParseFailure(kind=ParseFailureKind.NO_JSON, detail="no '{' in the reply")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def moves(env: Any, seen: Any, tick: int) -> dict[str, object]:
    """Bots of all kinds, now and then a reply that was none."""
    found: dict[str, object] = {}
    for agent, observation in seen.items():
        rng = Random(f"{agent}/{tick}")
        name = rng.choice(sorted(env.bots))
        found[agent] = FAILURE if rng.random() < 0.1 else env.bots[name](observation, rng)
    return found


def play(env: Any, *, ticks: int = 10_000, begin: int = 0) -> Iterator[tuple[Any, ...]]:
    """All that an episode shows, tick by tick."""
    for tick in range(begin, begin + ticks):
        seen = dict(env.observe())
        if not seen:
            return
        yield (seen, env.step(moves(env, seen, tick)), env.snapshot())


@pytest.mark.parametrize("seed", [0, 11])
def test_the_same_seed_is_the_same_episode_over_http(server: Server, seed: int) -> None:
    """Records and states equal to the last bit, from the first tick to the last, in two episodes."""
    here, there = MarketEnv(ticks=9), RemoteMarket(server.url, ticks=9)
    for episode in (0, 1):
        for env in (here, there):
            env.reset(seats=SEATS, seed=seed, episode=episode)
        assert there.snapshot() == here.snapshot()
        ticks = 0
        for mine, its in zip(play(here), play(there), strict=True):
            assert mine == its
            ticks += 1
        assert ticks == 9
    there.close()


def test_states_go_from_one_to_the_other(server: Server) -> None:
    """A run in process can go on at a server, and the other way round."""
    here, there, again = MarketEnv(ticks=6), RemoteMarket(server.url, ticks=6), MarketEnv()
    here.reset(seats=SEATS, seed=2, episode=0)
    list(play(here, ticks=3))
    there.restore(here.snapshot())
    again.restore(there.snapshot())
    assert list(play(there, begin=3)) == list(play(again, begin=3)) == list(play(here, begin=3))


def test_it_keeps_the_contract(server: Server) -> None:
    report = check_env(load_env(server.url, settings={"ticks": 1}), agents_per_team=1)
    assert set(report.players) == {"bots", "random", "parse_failures", "junk"}


def test_a_killed_server_changes_nothing() -> None:
    """kill -9 in the middle and a restart: the episode goes on as if nothing had been."""
    here = MarketEnv(ticks=8)
    here.reset(seats=SEATS, seed=5, episode=3)
    wanted = list(play(here))
    first = Server()
    there = RemoteMarket(first.url, ticks=8)
    there.reset(seats=SEATS, seed=5, episode=3)
    got = list(play(there, ticks=3))
    first.kill()
    with serving(port=first.port):
        got += list(play(there, ticks=3, begin=3))
    with serving(port=first.port):
        got += list(play(there, begin=6))
    assert got == wanted


def test_another_market_after_a_restart_is_an_error() -> None:
    first = Server("--env-settings.residents", "8")
    there = RemoteMarket(first.url, ticks=8)
    there.reset(seats=SEATS, seed=5, episode=3)
    list(play(there, ticks=2))
    first.kill()
    with serving("--env-settings.residents", "9", port=first.port), pytest.raises(EnvError, match="another there"):
        there.observe()


class Lossy(httpx.BaseTransport):
    """The request reaches the server, and every second answer is lost on its way."""

    def __init__(self) -> None:
        self.real, self.number, self.lost = httpx.HTTPTransport(), 0, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.real.handle_request(request)
        self.number += 1
        if self.number % 2:
            response.read()
            self.lost += 1
            raise httpx.ReadError("the connection was lost", request=request)
        return response


def test_lost_answers_are_asked_for_again_and_done_once(server: Server) -> None:
    here, there = MarketEnv(ticks=5), RemoteMarket(server.url, ticks=5)
    there.close()
    lossy = Lossy()
    there.client = MarketClient(server.url, transport=lossy)
    for env in (here, there):
        env.reset(seats=SEATS, seed=8, episode=0)
    assert list(play(here)) == list(play(there))
    assert lossy.lost > 10


def test_errors_say_what_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"env_settings\.tick: "):
        load_env(server.url, settings={"tick": 3})
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN"):
        RemoteMarket(server.url, token_variable="NO_SUCH_TOKEN")
    nobody = RemoteMarket("http://127.0.0.1:9", patience=0.2)
    with pytest.raises(EnvError, match="is it running"):
        nobody.reset(seats=SEATS, seed=0, episode=0)
    with pytest.raises(EnvError, match=r"call reset\(\)"):
        nobody.observe()
    unknown = RemoteMarket(server.url)
    with pytest.raises(EnvError, match="no team 'green'"):
        unknown.reset(seats=[Seat(agent="a", team="green")], seed=0, episode=0)
    monkeypatch.setenv("SPARRING_MARKET_TOKEN", "right")
    with serving("--token-variable", "SPARRING_MARKET_TOKEN") as guarded:
        RemoteMarket(guarded.url).reset(seats=SEATS, seed=0, episode=0)
        monkeypatch.setenv("SPARRING_MARKET_TOKEN", "wrong")
        with pytest.raises(EnvError, match="SPARRING_MARKET_TOKEN"):
            RemoteMarket(guarded.url).reset(seats=SEATS, seed=0, episode=0)


def test_a_loop_trains_on_it_as_in_process(server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--env URL`` in place of ``--env market``: the same run."""
    import sparring as sp

    monkeypatch.chdir(tmp_path)
    reports = []
    for env in ("market", server.url):
        report = sp.train_shared(
            env=env, ticks=2, worlds=2, agents_per_team=1, seed=4, min_batch=2, quiet=True, threads=1,
            sampling={"max_new_tokens": 24}, env_settings={"ticks": 2},
        )  # fmt: skip
        reports.append({
            name: value for name, value in msgspec.to_builtins(report).items() if name not in ("run", "seconds")
        })  # fmt: skip
    assert reports[0] == reports[1] and reports[0]["trained_replies"] > 0
