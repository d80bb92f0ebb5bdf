"""The ledger: one constant sum, refusals without effect, exact rounding against the trader."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.envs.market.ledger import MAX_CENTS, Ledger, may_be_overdrawn, to_cents_against

ACCOUNTS = ("agent:a", "agent:b", "vault:a", "escrow:7", "house", "market:m")


def open_ledger() -> Ledger:
    return Ledger.open({"agent:a": 500, "agent:b": 300, "house": 0})


def test_transfer_moves_money_and_writes_both_sides() -> None:
    ledger = open_ledger()
    assert ledger.transfer("agent:a", "escrow:7", 200, memo="deal:7", tick=4)
    assert (ledger.balance("agent:a"), ledger.balance("escrow:7"), ledger.total()) == (300, 200, 800)
    entry = ledger.entries[0]
    assert (entry.tick, entry.source, entry.destination, entry.cents, entry.memo) == (
        4,
        "agent:a",
        "escrow:7",
        200,
        "deal:7",
    )


@pytest.mark.parametrize(
    ("source", "destination", "cents"),
    [
        ("agent:a", "agent:b", 0),
        ("agent:a", "agent:b", -5),
        ("agent:a", "agent:b", 501),
        ("agent:a", "agent:a", 10),
        ("agent:nobody", "agent:a", 1),
        ("agent:house", "agent:a", 1),
        ("house", "agent:a", MAX_CENTS + 1),
        ("house", "agent:a", 10**40),
    ],
)
def test_refused_transfer_changes_nothing(source: str, destination: str, cents: int) -> None:
    ledger = open_ledger()
    assert not ledger.transfer(source, destination, cents, memo="", tick=0)
    assert ledger == open_ledger()


@pytest.mark.parametrize("cents", [1.0, True, "5", None, float("nan")])
def test_cents_that_are_no_int_raise(cents: object) -> None:
    with pytest.raises(TypeError, match="cents are an int"):
        open_ledger().transfer("agent:a", "agent:b", cents, memo="", tick=0)  # type: ignore[arg-type]


def test_house_and_markets_may_be_overdrawn() -> None:
    ledger = open_ledger()
    assert ledger.transfer("house", "market:m", 1000, memo="", tick=0)
    assert ledger.transfer("market:m", "agent:a", 1500, memo="", tick=0)
    assert (ledger.balance("house"), ledger.balance("market:m"), ledger.total()) == (-1000, -500, 800)


def test_opening_balances_are_checked() -> None:
    with pytest.raises(ValueError, match="agent:a"):
        Ledger.open({"agent:a": -1})
    with pytest.raises(ValueError, match="name"):
        Ledger.open({"": 1})
    with pytest.raises(TypeError):
        Ledger.open({"agent:a": 1.5})  # type: ignore[dict-item]
    assert Ledger.open({"house": -100}).total() == -100


def test_net_flow_nets_round_trips_and_survives_pruning() -> None:
    ledger = open_ledger()
    ledger.transfer("agent:a", "agent:b", 100, memo="", tick=1)
    ledger.transfer("agent:b", "agent:a", 30, memo="", tick=2)
    assert (ledger.net_flow("agent:a", "agent:b"), ledger.net_flow("agent:b", "agent:a")) == (70, -70)
    before = dict(ledger.balances)
    assert ledger.prune(2) == 1
    assert [entry.tick for entry in ledger.entries] == [2]
    assert ledger.balances == before
    assert ledger.net_flow("agent:a", "agent:b") == 70
    assert ledger.net_flow("agent:a", "agent:a") == 0


Moves = st.lists(
    st.tuples(st.sampled_from(ACCOUNTS), st.sampled_from(ACCOUNTS), st.integers(-50, 10**6) | st.integers()),
    max_size=40,
)


@given(Moves)
def test_sum_is_constant_no_overdraft_and_entries_explain_balances(moves: list[tuple[str, str, int]]) -> None:
    ledger = open_ledger()
    rebuilt = dict(ledger.balances)
    for tick, (source, destination, cents) in enumerate(moves):
        ledger.transfer(source, destination, cents, memo="m", tick=tick)
        assert ledger.total() == 800
        assert all(balance >= 0 or may_be_overdrawn(account) for account, balance in ledger.balances.items())
    for entry in ledger.entries:
        rebuilt[entry.source] = rebuilt.get(entry.source, 0) - entry.cents
        rebuilt[entry.destination] = rebuilt.get(entry.destination, 0) + entry.cents
    assert rebuilt == ledger.balances
    for one in ACCOUNTS:
        for other in ACCOUNTS:
            there = sum(e.cents for e in ledger.entries if (e.source, e.destination) == (one, other))
            back = sum(e.cents for e in ledger.entries if (e.source, e.destination) == (other, one))
            assert ledger.net_flow(one, other) == there - back
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger), type=Ledger)
    assert restored == ledger


@pytest.mark.parametrize(
    ("amount", "pays", "receives"),
    [
        (512.49, 513, 512),
        (3.0, 3, 3),
        (Fraction(1, 3), 1, 0),
        (Decimal("2.0000000000000000000001"), 3, 2),
        (-1.5, -1, -2),
        (7, 7, 7),
        (0.1 + 0.2, 1, 0),
        (2.0**53 + 2.0, 2**53 + 2, 2**53 + 2),
    ],
)
def test_rounding_is_against_the_trader(amount: float | Fraction | Decimal, pays: int, receives: int) -> None:
    assert to_cents_against(amount, paying=True) == pays
    assert to_cents_against(amount, paying=False) == receives


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -float("inf"), Decimal("NaN"), Decimal("Infinity")])
def test_rounding_rejects_what_is_not_finite(amount: float | Decimal) -> None:
    with pytest.raises(ValueError, match="finite"):
        to_cents_against(amount, paying=True)


@pytest.mark.parametrize("amount", [True, "1", None])
def test_rounding_rejects_what_is_no_number(amount: object) -> None:
    with pytest.raises(TypeError):
        to_cents_against(amount, paying=True)  # type: ignore[arg-type]


@given(st.floats(allow_nan=False, allow_infinity=False) | st.fractions())
def test_rounding_never_favours_the_trader(amount: float | Fraction) -> None:
    assert to_cents_against(amount, paying=False) <= Fraction(amount) <= to_cents_against(amount, paying=True)
    assert to_cents_against(amount, paying=True) - to_cents_against(amount, paying=False) <= 1
