"""Perpetual futures, kept simple: one seeded price path, margin, liquidation; the market itself is the counterparty.

The path. With sigma the volatility of a tick, ``z_t`` standard normal keyed by (seed, ticker, t), and ``r_t`` in
{-1, 0, 1} a private regime, drawn for blocks of ``regime_ticks`` ticks and keyed by (seed, ticker, block):

    ln P_t = ln P_(t-1) + drift * r_t + sigma * z_t - sigma^2 / 2        r_t = regime of block t // regime_ticks

so that without a regime the price is a martingale, and whoever finds out the regime (from past prices, or from a
signal that the world gives) has a small edge. Prices are whole cents in [1, 10^9].

A position of margin m and leverage L has notional n = m L, entered at price E. Its profit at price P is
``+-n (P - E) / E``, in exact integer arithmetic, rounded down. Its equity is m + profit. Once that is not above the
maintenance margin (a share of n), the position is liquidated and the market keeps the margin: what is left of it pays
for the positions that a jump carried below zero, since a loss never exceeds the margin. The maintenance share must be
at least sigma, above the mean overshoot of a Gaussian walk over a barrier (0.583 sigma; D. Siegmund 1979), so that
the bounded loss is no free option.
"""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import msgspec

from sparring.envs.market.ledger import Ledger

Direction = Literal["long", "short"]
PerpRefusal = Literal["bad_side", "bad_amount", "bad_leverage", "no_funds"]
"""Why a position was not opened: neither long nor short; margin below 1 or above ``MAX_MARGIN``; leverage outside
1..max_leverage; more margin than the agent has."""

MAX_MARGIN = 10**12
MAX_PRICE = 10**9
BASIS_POINTS = 10_000


class Position(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One open position.

    >>> Position(id=0, agent="a7", side="long", margin=1_000, notional=5_000, entry=200, opened_at=3).notional
    5000

    Attributes:
        id: its number in its market.
        agent: whose it is; money is in ``agent:<agent>``.
        side: long gains when the price rises, short when it falls.
        margin: cents put in, the most that can be lost.
        notional: cents of exposure, margin times leverage.
        entry: price in cents at which it was opened.
        opened_at: tick.
    """

    id: int
    agent: str
    side: Direction
    margin: int
    notional: int
    entry: int
    opened_at: int


class Liquidation(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A position that was closed by force at ``price`` cents; ``pnl`` is minus its margin, in cents."""

    position: Position
    price: int
    pnl: int


class PerpMarket(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One ticker. Margins are held in ``market:<ticker>``, which ``house`` tops up when profits exceed what it holds.

    Attributes:
        ticker: names the market; its account is ``market:<ticker>``.
        price: cents now, in [1, 10^9].
        seed: keys the path.
        tick: the tick that ``price`` belongs to.
        volatility: sigma, of the log price in one tick.
        drift: size of the private drift of the log price in one tick.
        regime_ticks: length of a regime.
        max_leverage: largest leverage, a whole number.
        maintenance_bps: maintenance margin in 1/10,000 of the notional.
        log_price: natural logarithm of the price in cents before it is rounded; filled from ``price``.
        positions: open positions, by id.
        next_position: the id of the next one.
    """

    ticker: str
    price: int
    seed: int
    tick: int = 0
    volatility: float = 0.02
    drift: float = 0.006
    regime_ticks: int = 10
    max_leverage: int = 10
    maintenance_bps: int = 250
    log_price: float | None = None
    positions: dict[int, Position] = {}
    next_position: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.price <= MAX_PRICE:
            raise ValueError(f"price must be 1..{MAX_PRICE} cents, not {self.price}")
        if not (0.0 <= self.volatility <= 1.0 and abs(self.drift) <= 1.0):
            raise ValueError("volatility must be within [0, 1] and drift within [-1, 1] a tick")
        if self.regime_ticks < 1 or self.max_leverage < 1:
            raise ValueError("regime_ticks and max_leverage must be at least 1")
        if not self.volatility * BASIS_POINTS <= self.maintenance_bps:
            raise ValueError("maintenance_bps must cover the volatility of one tick")
        if self.maintenance_bps * self.max_leverage >= BASIS_POINTS:
            raise ValueError("at max_leverage a new position would be below its maintenance margin")
        if self.log_price is None:
            self.log_price = math.log(self.price)

    @classmethod
    def open_market(
        cls, *, ticker: str, price: int, seed: int, ledger: Ledger, tick: int = 0, funding: int = 0
    ) -> PerpMarket:
        """A market with the default figures, ``funding`` cents of it from ``house``."""
        market = cls(ticker=ticker, price=price, seed=seed, tick=tick)
        ledger.transfer("house", market.account, funding, memo=f"funding:{ticker}", tick=tick)
        return market

    @property
    def account(self) -> str:
        """The market's account in the ledger."""
        return f"market:{self.ticker}"

    def regime(self, tick: int) -> int:
        """The private regime of a tick: -1 falling, 0 none, 1 rising. In no observation."""
        return Random(f"regime|{self.seed}|{self.ticker}|{tick // self.regime_ticks}").choice((-1, 0, 1))

    def advance(self, tick: int) -> int:
        """Walk the price on to ``tick`` and return it; nothing happens for a tick already reached. Whether one
        advances by one tick at a time or by many, the path is the same."""
        while self.tick < tick:
            self.tick += 1
            z = Random(f"price|{self.seed}|{self.ticker}|{self.tick}").gauss(0.0, 1.0)
            step = self.drift * self.regime(self.tick) + self.volatility * z - self.volatility**2 / 2.0
            assert self.log_price is not None
            self.log_price = min(max(self.log_price + step, 0.0), math.log(MAX_PRICE))
            self.price = min(max(round(math.exp(self.log_price)), 1), MAX_PRICE)
        return self.price

    def open(
        self, agent: str, side: Direction, margin_cents: int, leverage: int, ledger: Ledger, tick: int
    ) -> Position | PerpRefusal:
        """Open a position at the price of now; a refusal changes nothing.

        Raises TypeError when margin or leverage is a bool or not an int.
        """
        if type(margin_cents) is not int or type(leverage) is not int:
            raise TypeError("margin and leverage are ints")
        if side not in ("long", "short"):
            return "bad_side"
        if not 0 < margin_cents <= MAX_MARGIN:
            return "bad_amount"
        if not 1 <= leverage <= self.max_leverage:
            return "bad_leverage"
        if not ledger.transfer(f"agent:{agent}", self.account, margin_cents, memo=f"open_perp:{side}", tick=tick):
            return "no_funds"
        position = Position(
            id=self.next_position,
            agent=agent,
            side=side,
            margin=margin_cents,
            notional=margin_cents * leverage,
            entry=self.price,
            opened_at=tick,
        )
        self.next_position += 1
        self.positions[position.id] = position
        return position

    def positions_of(self, agent: str) -> list[Position]:
        """An agent's open positions, oldest first."""
        return [position for position in self.positions.values() if position.agent == agent]

    def unrealised(self, position: Position) -> int:
        """Profit (loss: negative) in cents at the price of now, rounded down, never below minus the margin."""
        return max(self._profit(position), -position.margin)

    def must_liquidate(self, position: Position) -> bool:
        """Whether its equity is not above the maintenance margin."""
        equity = position.margin + self._profit(position)
        return equity * BASIS_POINTS <= self.maintenance_bps * position.notional

    def close(self, position: Position, ledger: Ledger, tick: int) -> int:
        """Close at the price of now, pay out margin + profit, return the profit in cents. A position that is due for
        liquidation is liquidated, whoever comes first. Raises ValueError if it is not open in this market."""
        if self.positions.get(position.id) != position:
            raise ValueError(f"position {position.id} is not open in {self.ticker}")
        del self.positions[position.id]
        profit = -position.margin if self.must_liquidate(position) else self._profit(position)
        payout = position.margin + profit
        missing = payout - ledger.balance(self.account)
        ledger.transfer("house", self.account, missing, memo=f"funding:{self.ticker}", tick=tick)
        ledger.transfer(self.account, f"agent:{position.agent}", payout, memo="close_perp", tick=tick)
        return profit

    def liquidate(self, ledger: Ledger, tick: int) -> list[Liquidation]:
        """Close every position at or below its maintenance margin, oldest first. Call after ``advance``."""
        due = [position for position in self.positions.values() if self.must_liquidate(position)]
        return [
            Liquidation(position=position, price=self.price, pnl=self.close(position, ledger, tick)) for position in due
        ]

    def wind_down(self, ledger: Ledger, tick: int) -> dict[int, int]:
        """At the end: close everything and give what the market holds back to ``house``. Returns profit by position."""
        profits = {position.id: self.close(position, ledger, tick) for position in list(self.positions.values())}
        ledger.transfer(self.account, "house", ledger.balance(self.account), memo=f"end:{self.ticker}", tick=tick)
        return profits

    def _profit(self, position: Position) -> int:
        sign = 1 if position.side == "long" else -1
        return sign * position.notional * (self.price - position.entry) // position.entry
