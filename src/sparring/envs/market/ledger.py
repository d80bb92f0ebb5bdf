"""Money: double entry in integer cents. Every movement has a source and a destination, so the sum never changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

import msgspec

MAX_CENTS = 2**62
"""No balance and no net flow grows beyond this (a snapshot stores 64-bit integers); what would is refused."""


class Entry(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One movement of money.

    >>> Entry(tick=3, source="agent:a", destination="agent:b", cents=250, memo="deal:7").cents
    250

    Attributes:
        tick: the tick in which it happened.
        source: the account that paid.
        destination: the account that received.
        cents: how much, > 0.
        memo: why, for people and for facts (a deal, thread or order id).
    """

    tick: int
    source: str
    destination: str
    cents: int
    memo: str


class Ledger(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All accounts and what moved between them. Open one with ``Ledger.open``.

    Accounts are strings such as ``"agent:<id>"``, ``"vault:<id>"``, ``"escrow:<id>"``, ``"house"``, ``"market:<id>"``.
    An account that was never named holds 0 and comes to be when money first reaches it. Only accounts whose name
    starts with ``house`` or ``market:`` may be overdrawn.

    >>> ledger = Ledger.open({"agent:a": 500, "house": 0})
    >>> ledger.transfer("agent:a", "agent:b", 200, memo="gift", tick=0), ledger.balance("agent:b"), ledger.total()
    (True, 200, 500)

    Attributes:
        balances: cents, by account.
        entries: movements since the last ``prune``, oldest first.
        flows: net cents, over the whole life of the ledger, from the first account of a pair (in string order) to the
            second; ``prune`` does not touch it.
    """

    balances: dict[str, int]
    entries: list[Entry] = []
    flows: dict[str, dict[str, int]] = {}

    @classmethod
    def open(cls, balances: Mapping[str, int]) -> Ledger:
        """A ledger with these opening balances in cents.

        Raises TypeError on an amount that is not an int, ValueError on an empty name, a balance beyond ``MAX_CENTS``,
        or a negative one where the account may not be overdrawn.
        """
        for account, cents in balances.items():
            _require_cents(cents)
            if not account:
                raise ValueError("an account needs a name")
            if abs(cents) > MAX_CENTS or (cents < 0 and not may_be_overdrawn(account)):
                raise ValueError(f"account {account!r} cannot open with {cents} cents")
        return cls(balances=dict(balances))

    def balance(self, account: str) -> int:
        """Cents in an account; 0 for one that was never named."""
        return self.balances.get(account, 0)

    def total(self) -> int:
        """The sum of all accounts in cents: the same for ever."""
        return sum(self.balances.values())

    def transfer(self, source: str, destination: str, cents: int, *, memo: str, tick: int) -> bool:
        """Move ``cents``. False, and nothing has changed, when cents <= 0, source is destination, the source lacks
        the money (and may not be overdrawn), or a figure would pass ``MAX_CENTS``.

        Raises TypeError when ``cents`` is a bool or not an int, ValueError on an empty account name.
        """
        _require_cents(cents)
        if not source or not destination:
            raise ValueError("an account needs a name")
        if cents <= 0 or source == destination:
            return False
        source_after = self.balance(source) - cents
        destination_after = self.balance(destination) + cents
        if source_after < 0 and not may_be_overdrawn(source):
            return False
        low, high = sorted((source, destination))
        flow_after = self.flows.get(low, {}).get(high, 0) + (cents if source == low else -cents)
        if max(-source_after, destination_after, abs(flow_after)) > MAX_CENTS:
            return False
        self.balances[source] = source_after
        self.balances[destination] = destination_after
        self.flows.setdefault(low, {})[high] = flow_after
        self.entries.append(Entry(tick=tick, source=source, destination=destination, cents=cents, memo=memo))
        return True

    def net_flow(self, source: str, destination: str) -> int:
        """Cents that went from source to destination less what came back directly, since the ledger opened.
        Round trips give 0. Antisymmetric: ``net_flow(a, b) == -net_flow(b, a)``."""
        if source <= destination:
            return self.flows.get(source, {}).get(destination, 0)
        return -self.flows.get(destination, {}).get(source, 0)

    def prune(self, before_tick: int) -> int:
        """Forget entries older than ``before_tick``; returns how many. Balances and net flows stay as they are."""
        kept = [entry for entry in self.entries if entry.tick >= before_tick]
        dropped = len(self.entries) - len(kept)
        self.entries = kept
        return dropped


def may_be_overdrawn(account: str) -> bool:
    """Whether an account may hold less than 0: the house and the markets it stands behind."""
    return account.startswith(("house", "market:"))


def to_cents_against(amount: float | int | Fraction | Decimal, *, paying: bool) -> int:
    """Whole cents from a fractional number **of cents**, rounded against the trader: up when the trader pays
    (``paying=True``), down when it receives. Exact: a float is taken at its exact binary value.

    >>> to_cents_against(512.2, paying=True), to_cents_against(512.9, paying=False)
    (513, 512)

    Raises ValueError on NaN or infinity, TypeError on a bool or what is no number.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | float | Fraction | Decimal):
        raise TypeError(f"an amount is a number, not {type(amount).__name__}")
    if not isinstance(amount, Fraction) and not (isinstance(amount, int) or math.isfinite(amount)):
        raise ValueError(f"an amount must be finite, not {amount}")
    exact = Fraction(amount)
    return math.ceil(exact) if paying else math.floor(exact)


def _require_cents(cents: object) -> None:
    if isinstance(cents, bool) or not isinstance(cents, int):
        raise TypeError(f"cents are an int, not {type(cents).__name__}")
