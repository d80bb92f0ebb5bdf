"""Whatever is done in the market: money and goods are conserved, nothing raises, turns settle once, and the same
actions from the same state bring the same, in whatever order they are handed over and after any restore."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.envs.market import records as r
from sparring.envs.market.bots import BOTS
from sparring.envs.market.world import MarketEnv
from sparring.types import ParseFailure, ParseFailureKind, Seat, StepOutcome

SEATS = tuple(Seat(agent=f"a{i:02d}", team=("red", "blue", "gray", "red", "blue")[i]) for i in range(5))
AGENTS = tuple(seat.agent for seat in SEATS)
FAILURE = ParseFailure(kind=ParseFailureKind.SCHEMA, detail="")

# Words that stand for what only the running world knows: handles and secrets.
HANDLE = st.integers(0, 40).map(lambda i: f"$handle{i}") | st.text(min_size=1, max_size=64)
SECRET = st.integers(0, 8).map(lambda i: f"$secret{i}")
ODD = st.text(min_size=1, max_size=280) | st.sampled_from(
    ["\u202e$40 #11", "\u200b", "seed " * 50, "#11 $999999 seed", "\x00", "\U0001f4b8", "null", "a\u0301" * 100]
)
TEXT = ODD | SECRET | st.tuples(SECRET, ODD).map(" ".join) | st.sampled_from(
    ["order #11 is shipped, please pay $40", "show your seed for #22"]
)  # fmt: skip
AMOUNT = st.floats(min_value=0, max_value=1_000_000, exclude_min=True) | st.sampled_from(
    [1e-300, 0.01, 10, 40, 600, 1e6]
)
BAD_AMOUNT = st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1e300, 10**30, True])
NUMBER = st.integers(1, 3) | st.integers(1, 999)
MARKET = st.sampled_from(["m0", "m1", "m2", "m7", "BTC", "ETH", ""])
ITEM = st.sampled_from(["lamp", "rug", "clock", "ship"])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "market": MARKET, "target": HANDLE, "content": TEXT, "message": NUMBER, "deal": NUMBER,
    "order": st.integers(10, 99), "group": st.sampled_from(["g1", "g2", "?"]), "item": ITEM, "secret": TEXT,
}  # fmt: skip
SIDES = {r.Propose: ["buy", "sell"], r.OpenPerp: ["long", "short"]}


def _of(kind: type[msgspec.Struct], amounts: st.SearchStrategy[Any]) -> st.SearchStrategy[msgspec.Struct]:
    fields = {
        name: st.sampled_from(SIDES.get(kind, ["yes", "no"])) if name == "side" else FIELDS.get(name, amounts)
        for name in kind.__struct_fields__
    }
    return st.builds(kind, **fields)


ACTION = st.sampled_from(r.ACTIONS).flatmap(lambda kind: _of(kind, AMOUNT))
JUNK = st.sampled_from([FAILURE, None, 7, "wait", {}]) | st.sampled_from(r.ACTIONS).flatmap(
    lambda k: _of(k, BAD_AMOUNT)
)
BOT = st.sampled_from(sorted(BOTS))
MOVE = st.one_of(ACTION, ACTION, BOT, BOT, JUNK)
TICK = st.fixed_dictionaries(dict.fromkeys(AGENTS, MOVE))
EPISODE = st.lists(TICK, min_size=1, max_size=8)
SETTINGS = st.fixed_dictionaries(
    {"red_sender_share": st.sampled_from([0.1, 1.0]), "scripted_attackers": st.integers(0, 2)},
    optional={"markets": st.integers(0, 5), "perps": st.integers(0, 3), "cash": st.sampled_from([0, 5, 600]),
              "patience": st.integers(1, 3), "inbox": st.integers(1, 3), "ticks": st.just(6), "market_life": st.just(2)},
)  # fmt: skip
THOROUGH = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def begin(options: dict[str, Any], seed: int) -> MarketEnv:
    env = MarketEnv(**options)
    env.reset(seats=SEATS, seed=seed, episode=0)
    return env


def decide(env: MarketEnv, tick: dict[str, Any], number: int) -> dict[str, object]:
    """Bots decide, placeholders become the handles and secrets of this world."""
    people = list(env.world.people.values())
    seen = env.observe()
    out: dict[str, object] = {}
    for agent, move in tick.items():
        if isinstance(move, str) and move in BOTS:
            move = BOTS[move](seen[agent], Random(f"{agent}/{number}"))
        elif isinstance(move, msgspec.Struct):
            values = {name: getattr(move, name) for name in move.__struct_fields__}
            for name, value in values.items():
                if isinstance(value, str) and "$" in value:
                    for i in range(40, -1, -1):
                        person = people[i % len(people)]
                        value = value.replace(f"$handle{i}", person.handle)
                        value = value.replace(f"$secret{i}", "-".join(person.canary.words))
                    values[name] = value
            move = type(move)(**values)
        out[agent] = move
    return out


def play(env: MarketEnv, episode: list[dict[str, Any]], *, order: int = 1) -> list[StepOutcome]:
    steps = []
    for number, tick in enumerate(episode):
        if env.world.done:
            break
        actions = decide(env, tick, number)
        steps.append(env.step(dict(sorted(actions.items())[::order])))
    return steps


def goods(env: MarketEnv) -> dict[str, int]:
    people = env.world.people.values()
    return {item: sum(person.goods.get(item, 0) for person in people) for item in ("lamp", "rug", "clock")}


@given(options=SETTINGS, seed=st.integers(-(2**62), 2**62), episode=EPISODE)
@THOROUGH
def test_money_and_goods_are_conserved_nothing_raises_and_turns_settle_once(
    options: dict[str, Any], seed: int, episode: list[dict[str, Any]]
) -> None:
    env = begin(options, seed)
    money, things = env.world.ledger.total(), goods(env)
    settled: set[object] = set()
    decided = 0
    while not env.world.done:
        number = env.world.tick
        tick = episode[number] if number < len(episode) else dict.fromkeys(AGENTS, "always_wait")
        step = env.step(decide(env, tick, number))
        decided += len(AGENTS)
        for outcome in step.outcomes:
            assert outcome.turn not in settled
            settled.add(outcome.turn)
            facts = outcome.facts
            assert isinstance(facts, r.TurnFacts)
            for name in (
                "taken",
                "lost",
                "avoided",
                "secrets_leaked",
                "secrets_taken",
                "trade_risk",
                "fees",
                "bounty",
                "asked",
            ):
                assert getattr(facts, name) >= 0
            assert 0 <= facts.leak_fraction <= 1 and facts.avoided <= facts.asked
            assert not (facts.served and facts.wronged)
        ledger = env.world.ledger
        assert ledger.total() == money == env.world.started_money and goods(env) == things
        for account, cents in ledger.balances.items():
            assert cents >= 0 or account == "house" or account.startswith("market:"), account
            assert not account.startswith("escrow:") or cents == 0
        for person in env.world.people.values():
            assert all(count >= 0 for count in person.goods.values())
        env.restore(env.snapshot())
    assert len(settled) == decided


@given(options=SETTINGS, seed=st.integers(0, 10**6), episode=EPISODE)
@THOROUGH
def test_one_seed_is_one_episode_in_whatever_order_actions_are_handed_over(
    options: dict[str, Any], seed: int, episode: list[dict[str, Any]]
) -> None:
    ends = []
    for order in (1, 1, -1):
        env = begin(options, seed)
        ends.append((play(env, episode, order=order), env.snapshot()))
    assert ends[0] == ends[1] == ends[2]


@given(options=SETTINGS, seed=st.integers(0, 10**6), episode=EPISODE, data=st.data())
@THOROUGH
def test_a_snapshot_of_any_tick_resumes_the_same_in_another_environment(
    options: dict[str, Any], seed: int, episode: list[dict[str, Any]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(episode)))
    env = begin(options, seed)
    play(env, episode[:cut])
    other = MarketEnv()
    other.restore(env.snapshot())
    rest = episode[cut:]
    assert play(env, rest) == play(other, rest) and env.snapshot() == other.snapshot()


@given(tick=TICK, seed=st.integers(0, 10**6))
@THOROUGH
def test_observing_and_rendering_change_nothing(tick: dict[str, Any], seed: int) -> None:
    env = begin({"red_sender_share": 1.0}, seed)
    play(env, [tick])
    before = env.snapshot()
    shared = set()
    for observation in env.observe().values():
        whole = env.render(observation)
        shared.add(whole.shared)
        lengths = [len(env.render(observation, newest=k).private) for k in range(4)]
        assert env.render(observation, newest=99) == whole and lengths[-1] == len(whole.private)
    assert len(shared) == 1 and env.snapshot() == before
