"""Perpetual futures: exact profit, bounded loss, a reproducible path, conserved money."""

from __future__ import annotations

import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.envs.market.ledger import Ledger
from sparring.envs.market.perpetual import PerpMarket, Position


def open_market(price: int = 10_000, seed: int = 1) -> tuple[PerpMarket, Ledger]:
    ledger = Ledger.open({"house": 0, "agent:a": 100_000, "agent:b": 100_000})
    return PerpMarket.open_market(ticker="BTC", price=price, seed=seed, ledger=ledger, funding=50_000), ledger


def opened(result: object) -> Position:
    assert isinstance(result, Position)
    return result


def test_profit_by_hand_rounded_down_on_both_sides() -> None:
    market, ledger = open_market(price=300)
    long = opened(market.open("a", "long", 1_000, 5, ledger, 0))
    short = opened(market.open("b", "short", 1_000, 5, ledger, 0))
    assert (long.notional, ledger.balance("agent:a"), ledger.balance("market:BTC")) == (5_000, 99_000, 52_000)
    market.price = 310  # 5000 * 10 / 300 = 166.67 cents
    assert (market.unrealised(long), market.unrealised(short)) == (166, -167)
    assert market.close(long, ledger, 1) == 166
    assert market.close(short, ledger, 1) == -167
    assert (ledger.balance("agent:a"), ledger.balance("agent:b")) == (100_166, 99_833)
    assert ledger.total() == 200_000
    with pytest.raises(ValueError, match="not open"):
        market.close(long, ledger, 2)


def test_liquidation_at_maintenance_margin_and_loss_never_exceeds_margin() -> None:
    market, ledger = open_market(price=10_000)
    position = opened(market.open("a", "long", 1_000, 10, ledger, 0))
    market.price = 9_251  # equity 1000 - 749 = 251 > 250, the maintenance margin of 2.5 % of 10,000
    assert market.liquidate(ledger, 1) == []
    market.price = 9_250
    assert market.unrealised(position) == -750
    (gone,) = market.liquidate(ledger, 2)
    assert (gone.position, gone.price, gone.pnl) == (position, 9_250, -1_000)
    assert ledger.balance("agent:a") == 99_000
    jump = opened(market.open("b", "short", 2_000, 10, ledger, 2))
    market.price = 90_000
    assert market.unrealised(jump) == -2_000
    assert market.close(jump, ledger, 3) == -2_000  # closing first is no way out
    assert ledger.balance("agent:b") == 98_000
    assert market.positions == {}


def test_house_stands_behind_profits() -> None:
    market, ledger = open_market(price=100)
    position = opened(market.open("a", "long", 100_000, 10, ledger, 0))
    market.price = 1_000
    assert market.close(position, ledger, 1) == 9_000_000
    assert ledger.balance("market:BTC") == 0
    assert ledger.balance("house") == -9_000_000
    assert ledger.total() == 200_000


def test_refusals_are_typed_and_without_effect() -> None:
    market, ledger = open_market()
    before = msgspec.msgpack.encode((market, ledger))
    assert market.open("a", "up", 100, 2, ledger, 0) == "bad_side"  # type: ignore[arg-type]
    assert market.open("a", "long", 0, 2, ledger, 0) == "bad_amount"
    assert market.open("a", "long", -10, 2, ledger, 0) == "bad_amount"
    assert market.open("a", "long", 10**40, 2, ledger, 0) == "bad_amount"
    assert market.open("a", "long", 100, 0, ledger, 0) == "bad_leverage"
    assert market.open("a", "long", 100, 11, ledger, 0) == "bad_leverage"
    assert market.open("a", "long", 100_001, 2, ledger, 0) == "no_funds"
    with pytest.raises(TypeError):
        market.open("a", "long", 1.5, 2, ledger, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        market.open("a", "long", 100, True, ledger, 0)
    assert msgspec.msgpack.encode((market, ledger)) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("price", 0), ("price", 10**10), ("volatility", -0.1), ("volatility", 0.1), ("max_leverage", 40)],
)
def test_settings_that_make_no_sense_raise(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"price|volatility|max_leverage"):
        msgspec.convert({"ticker": "X", "price": 100, "seed": 0, field: value}, PerpMarket, strict=False)


def test_path_is_the_same_in_one_stride_or_many_and_after_restore() -> None:
    strides, _ = open_market()
    prices = [strides.advance(tick) for tick in range(1, 41)]
    leap, _ = open_market()
    assert leap.advance(40) == prices[-1]
    assert leap.advance(40) == leap.advance(3) == prices[-1]
    half, _ = open_market()
    half.advance(20)
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(half), type=PerpMarket)
    assert restored == half
    assert [restored.advance(tick) for tick in range(21, 41)] == prices[20:]
    other, _ = open_market(seed=2)
    assert [other.advance(tick) for tick in range(1, 41)] != prices


def test_path_has_the_stated_moments() -> None:
    by_regime: dict[int, list[float]] = {-1: [], 0: [], 1: []}
    for seed in range(60):
        market, _ = open_market(price=10_000_000, seed=seed)
        last = market.price
        for tick in range(1, 101):
            now = market.advance(tick)
            by_regime[market.regime(tick)].append(math.log(now / last))
            last = now
    for regime, steps in by_regime.items():
        error = 4 * 0.02 / math.sqrt(len(steps))
        assert statistics.fmean(steps) == pytest.approx(0.006 * regime - 0.0002, abs=error)
        assert statistics.stdev(steps) == pytest.approx(0.02, rel=0.08)
    assert len({market.regime(tick) for tick in range(20, 30)}) == 1


def test_bounded_loss_is_no_free_option() -> None:
    """A hedge of both sides at the highest leverage, held over many paths, does not beat the house."""
    profits = []
    for seed in range(400):
        market, ledger = open_market(price=1_000_000, seed=seed)
        market.drift = 0.0
        market.open("a", "long", 10_000, 10, ledger, 0)
        market.open("a", "short", 10_000, 10, ledger, 0)
        for tick in range(1, 31):
            market.advance(tick)
            market.liquidate(ledger, tick)
        market.wind_down(ledger, 30)
        profits.append(ledger.balance("agent:a") - 100_000)
    assert statistics.fmean(profits) < 2 * statistics.stdev(profits) / math.sqrt(len(profits))


Moves = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["long", "short"]),
        st.integers(-5, 60_000),
        st.integers(0, 12),
        st.sampled_from(["open", "close", "tick", "jump"]),
        st.integers(1, 10**6),
    ),
    max_size=25,
)


@given(Moves, st.integers(0, 2**31))
def test_money_is_conserved_and_nobody_loses_more_than_margins(
    moves: list[tuple[str, str, int, int, str, int]], seed: int
) -> None:
    market, ledger = open_market(seed=seed)
    for tick, (agent, side, margin, leverage, kind, price) in enumerate(moves, 1):
        if kind == "open":
            before = ledger.balance(f"agent:{agent}")
            result = market.open(agent, side, margin, leverage, ledger, tick)  # type: ignore[arg-type]
            if isinstance(result, Position):
                assert market.unrealised(result) == 0
                assert ledger.balance(f"agent:{agent}") == before - margin
        elif kind == "close":
            for position in market.positions_of(agent)[:1]:
                paid_before = ledger.balance(f"agent:{agent}")
                profit = market.close(position, ledger, tick)
                assert profit >= -position.margin
                assert ledger.balance(f"agent:{agent}") - paid_before == position.margin + profit
        elif kind == "jump":
            market.price = price
        else:
            market.advance(tick)
            assert all(gone.pnl == -gone.position.margin for gone in market.liquidate(ledger, tick))
        assert ledger.total() == 200_000
        assert ledger.balance("market:BTC") >= 0
        assert min(ledger.balance("agent:a"), ledger.balance("agent:b")) >= 0
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(market), type=PerpMarket)
    assert restored == market
    market.wind_down(ledger, 99)
    assert ledger.balance("market:BTC") == 0
    assert ledger.total() == 200_000


@given(st.integers(1, 10**9), st.sampled_from(["long", "short"]), st.integers(1, 100_000), st.integers(1, 10))
def test_round_trip_at_one_price_pays_zero(price: int, side: str, margin: int, leverage: int) -> None:
    market, ledger = open_market(price=price)
    position = opened(market.open("a", side, margin, leverage, ledger, 0))  # type: ignore[arg-type]
    assert market.close(position, ledger, 0) == 0
    assert ledger.balance("agent:a") == 100_000
