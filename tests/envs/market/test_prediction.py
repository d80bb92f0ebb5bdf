"""Hanson's LMSR: values worked out by hand, bounded loss, and no profit from round trips."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.envs.market.ledger import Ledger
from sparring.envs.market.prediction import MAX_ORDER, PredictionMarket, Side, signal

AGENTS = ("a", "b", "c")


def open_market(
    liquidity: float = 100.0, truth: bool = True, cents: int = 10_000_000
) -> tuple[PredictionMarket, Ledger]:
    ledger = Ledger.open({"house": 0, **{f"agent:{agent}": cents for agent in AGENTS}})
    market = PredictionMarket.open(
        id="m0", question="Rain?", liquidity=liquidity, truth=truth, resolves_at=10, ledger=ledger, tick=0
    )
    return market, ledger


def test_subsidy_is_b_ln_2_from_the_house() -> None:
    market, ledger = open_market()
    assert market.subsidy == 6932  # 100 * 100 * 0.693147... = 6931.47 cents
    assert (ledger.balance("house"), ledger.balance("market:m0")) == (-6932, 6932)
    assert market.price_yes() == 0.5


def test_cost_of_ten_yes_shares_by_hand() -> None:
    market, ledger = open_market()
    # 100 ln((e^0.1 + 1) / 2) = 100 ln 1.0525854590378238 = 5.1249479... credits
    assert market.cost("yes", 10_000) == pytest.approx(100 * 100 * math.log((math.exp(0.1) + 1) / 2), abs=1e-9)
    assert market.cost("yes", 10_000) == pytest.approx(512.4948, abs=1e-4)
    assert market.cost("no", 10_000) == pytest.approx(512.4948, abs=1e-4)
    shares = market.buy("a", "yes", 513, ledger, 0)
    # the inverse: 100 ln(2 e^0.0513 - 1) = 10.00962... shares for 5.13 credits
    assert shares == 10_009
    assert shares == math.floor(1000 * 100 * math.log(2 * math.exp(0.0513) - 1))
    assert ledger.balance("agent:a") == 10_000_000 - 513
    assert market.price_yes() == pytest.approx(1 / (1 + math.exp(-0.10009)), abs=1e-12)
    assert market.price("yes") + market.price("no") == pytest.approx(1.0, abs=1e-15)


def test_large_orders_use_the_other_branch_and_agree_with_the_definition() -> None:
    market, _ = open_market()
    market.q_yes, market.q_no = 50_000, 20_000
    # C = 100 ln(e^(q_yes/100) + e^(q_no/100)); 150 shares: ln(e^2 + e^0.2) - ln(e^0.5 + e^0.2)
    by_hand = 100 * 100 * (math.log(math.exp(2.0) + math.exp(0.2)) - math.log(math.exp(0.5) + math.exp(0.2)))
    assert market.cost("yes", 150_000) == pytest.approx(by_hand, rel=1e-13)
    by_hand = 100 * 100 * (math.log(math.exp(0.5) + math.exp(2.2)) - math.log(math.exp(0.5) + math.exp(0.2)))
    assert market.cost("no", 200_000) == pytest.approx(by_hand, rel=1e-13)


def test_sell_pays_rounded_down_and_frees_the_holding() -> None:
    market, ledger = open_market()
    shares = market.buy("a", "no", 2_000, ledger, 0)
    assert market.shares("a", "no") == shares == market.q_no
    assert market.sell("a", "no", shares, ledger, 1) == 1_999
    assert market.holdings == {}
    assert market.price_yes() == 0.5


def test_refusals_are_typed_and_without_effect() -> None:
    market, ledger = open_market()
    market.buy("b", "yes", 100, ledger, 0)
    before = msgspec.msgpack.encode((market, ledger))
    assert market.refusal_to_buy("a", "yes", 0, ledger, 0) == "bad_amount"
    assert market.refusal_to_buy("a", "yes", MAX_ORDER + 1, ledger, 0) == "bad_amount"
    assert market.refusal_to_buy("a", "maybe", 10, ledger, 0) == "bad_side"  # type: ignore[arg-type]
    assert market.refusal_to_buy("nobody", "yes", 10, ledger, 0) == "no_funds"
    assert market.refusal_to_buy("a", "yes", 10, ledger, 10) == "closed"
    assert market.refusal_to_buy("a", "yes", 10, ledger, 9) is None
    assert market.refusal_to_sell("b", "yes", 10**30, 0) == "no_shares"
    assert market.refusal_to_sell("b", "no", 1, 0) == "no_shares"
    assert market.refusal_to_sell("b", "yes", 1, 0) == "too_small"
    assert market.refusal_to_sell("b", "yes", -1, 0) == "bad_amount"
    assert market.refusal_to_sell("b", "yes", 50, 10) == "closed"
    assert market.buy("a", "yes", -7, ledger, 0) == market.buy("a", "yes", 10**40, ledger, 0) == 0
    assert market.sell("b", "yes", 1, ledger, 0) == market.sell("c", "no", 5, ledger, 0) == 0
    assert market.resolve(ledger, 9) == {}
    assert msgspec.msgpack.encode((market, ledger)) == before


def test_resolution_pays_a_credit_a_winning_share_and_returns_the_rest() -> None:
    market, ledger = open_market(truth=True)
    yes = market.buy("a", "yes", 5_000, ledger, 0)
    market.buy("b", "no", 3_000, ledger, 0)
    assert market.resolve(ledger, 10) == {"a": yes * 100 // 1000}
    assert market.resolved is True
    assert ledger.balance("market:m0") == 0
    assert ledger.balance("agent:b") == 10_000_000 - 3_000
    assert ledger.balance("house") == 8_000 - yes // 10
    assert market.resolve(ledger, 11) == {}
    assert market.buy("a", "yes", 100, ledger, 3) == 0


def test_extreme_prices_stay_finite() -> None:
    market, ledger = open_market(liquidity=1.0, cents=10**13)
    assert market.buy("a", "yes", 10**8, ledger, 0) == 1_000_000_693  # 1,000,000 + ln 2 - e^-1000000 shares, b = 1
    assert market.price_yes() == 1.0
    long_shot = market.buy("b", "no", 1, ledger, 0)
    assert long_shot > 0
    assert math.isfinite(market.cost("no", long_shot))
    assert market.buy("c", "yes", MAX_ORDER, ledger, 0) > 0
    assert market.buy("c", "no", MAX_ORDER, ledger, 0) > 0
    assert ledger.balance(market.account) >= max(market.q_yes, market.q_no) // 10
    market.resolve(ledger, 10)
    assert ledger.total() == 3 * 10**13


@pytest.mark.parametrize("liquidity", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_liquidity_out_of_range_raises(liquidity: float) -> None:
    with pytest.raises(ValueError, match="liquidity"):
        open_market(liquidity)


Trades = st.lists(
    st.tuples(
        st.sampled_from(AGENTS),
        st.sampled_from(["yes", "no"]),
        st.integers(1, 10**6) | st.integers(1, 100),
        st.sampled_from(["buy", "sell", "sell all"]),
    ),
    max_size=30,
)


def trade(market: PredictionMarket, ledger: Ledger, trades: list[tuple[str, Side, int, str]]) -> None:
    for agent, side, amount, kind in trades:
        if kind == "buy":
            market.buy(agent, side, amount, ledger, 0)
        else:
            held = market.shares(agent, side)
            market.sell(agent, side, held if kind == "sell all" else min(amount, held), ledger, 0)


@given(Trades, st.sampled_from([1.0, 10.0, 100.0, 12345.678, 1e6]), st.booleans())
def test_money_is_conserved_and_loss_is_bounded(
    trades: list[tuple[str, Side, int, str]], liquidity: float, truth: bool
) -> None:
    market, ledger = open_market(liquidity, truth)
    trade(market, ledger, trades)
    assert ledger.total() == 30_000_000
    assert sum(held[0] for held in market.holdings.values()) == market.q_yes
    assert sum(held[1] for held in market.holdings.values()) == market.q_no
    assert 0.0 <= market.price_yes() <= 1.0
    worst = max(market.q_yes, market.q_no) // 10
    assert ledger.balance(market.account) >= worst  # whatever the outcome, the maker can pay
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(market), type=PredictionMarket)
    assert restored == market
    market.resolve(ledger, 10)
    assert ledger.balance("house") >= -market.subsidy
    assert ledger.total() == 30_000_000


@given(Trades, st.sampled_from(["yes", "no"]), st.lists(st.integers(1, 10**5), min_size=1, max_size=6), st.data())
def test_round_trips_never_profit(
    trades: list[tuple[str, Side, int, str]], side: Side, parts: list[int], data: st.DataObject
) -> None:
    market, ledger = open_market()
    trade(market, ledger, [t for t in trades if t[0] != "a"])
    before = ledger.balance("agent:a")
    for cents in parts:
        market.buy("a", side, cents, ledger, 0)
    while market.shares("a", side) > 0:
        held = market.shares("a", side)
        if market.sell("a", side, data.draw(st.integers(1, held)), ledger, 0) == 0:
            market.sell("a", side, held, ledger, 0)
            break
    assert ledger.balance("agent:a") <= before


@given(Trades, st.sampled_from(["yes", "no"]), st.integers(1, 10**7), st.sampled_from([1.0, 100.0, 1e6]))
def test_quote_is_the_most_that_the_money_buys(
    trades: list[tuple[str, Side, int, str]], side: Side, cents: int, liquidity: float
) -> None:
    market, ledger = open_market(liquidity)
    trade(market, ledger, trades)
    shares = market.quote_for_money(side, cents)
    assert market.cost(side, shares) <= cents
    tolerance = 1e-10 * 100 * liquidity * (1 + shares / (1000 * liquidity))  # far below a cent but for b = 1e6
    assert market.cost(side, shares + 2) > cents - tolerance


def test_signal_is_keyed_and_right_as_often_as_it_says() -> None:
    keys = [(7, 0, "m0", f"a{i}", i) for i in range(4000)]
    right = [signal(True, 0.7, key) for key in keys]
    assert right == [signal(True, 0.7, key) for key in keys]
    assert abs(sum(right) / 4000 - 0.7) < 0.03
    assert [signal(False, 0.7, key) for key in keys] == [not value for value in right]
    assert signal(True, 1.0, 5) is True
    assert signal(True, 0.0, 5) is False
    with pytest.raises(ValueError, match="probability"):
        signal(True, 1.5, 0)
