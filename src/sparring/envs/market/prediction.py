"""Prediction markets with the logarithmic market scoring rule of R. Hanson, "Combinatorial Information Market Design"
(2003): an automated maker that always quotes, and whose loss is bounded.

With liquidity b and shares sold q_yes, q_no, in shares, the cost function is ``C(q) = b ln(e^(q_yes/b) + e^(q_no/b))``
credits; a trade costs C(after) - C(before); the price of yes is ``1 / (1 + e^((q_no - q_yes)/b))``. A winning share
pays one credit (100 cents). From q = (0, 0) the maker loses at most ``b ln 2`` credits, its subsidy.

Shares are counted in whole **milli-shares**: integers keep holdings and payouts exact, and one milli-share is worth at
most a tenth of a cent, so that rounding a purchase down never costs a trader more than the cent it is charged in.
With x = n/b and d = (q_side - q_other)/b the formulas are evaluated as ``C(after) - C(before) = b (softplus(d + x) -
softplus(d))`` and its inverse ``x = softplus(ln(e^c - 1) + softplus(-d))``, c = money/b, which never overflow.
"""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import msgspec

from sparring.envs.market.ledger import Ledger, to_cents_against

Side = Literal["yes", "no"]
TradeRefusal = Literal["closed", "bad_side", "bad_amount", "no_funds", "too_small", "no_shares"]
"""Why a trade has no effect: the market is closed; neither yes nor no; not positive, or above ``MAX_ORDER``; more money
than the agent has; it would buy nothing or pay nothing; more shares than the agent holds."""

MILLI = 1000
CENTS_PER_SHARE = 100
MAX_ORDER = 10**12
"""The largest order, in cents or milli-shares; keeps every figure well inside the exact range of a float."""
_ROUNDING_GUARD = 1e-12
"""Relative to the largest number in a cost: above its floating-point error, below anything that moves a price."""


class PredictionMarket(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One yes/no question. Open one with ``PredictionMarket.open``, which funds the subsidy.

    Agents trade from ``agent:<agent>``, the maker's money is in ``market:<id>``.

    Attributes:
        id: names the market; its account is ``market:<id>``.
        question: what is asked, for people and prompts.
        liquidity: Hanson's b, in shares, between 1 and 1e6.
        truth: the hidden answer; in no observation.
        resolves_at: the tick from which it no longer trades and can be resolved.
        q_yes: yes shares sold and not bought back, in milli-shares.
        q_no: the same for no.
        resolved: the outcome once resolved, else None.
        holdings: [yes, no] in milli-shares, by agent; empty once resolved.
    """

    id: str
    question: str
    liquidity: float
    truth: bool
    resolves_at: int
    q_yes: int = 0
    q_no: int = 0
    resolved: bool | None = None
    holdings: dict[str, list[int]] = {}

    def __post_init__(self) -> None:
        if not 1.0 <= self.liquidity <= 1e6:
            raise ValueError(f"liquidity must be between 1 and 1e6 shares, not {self.liquidity}")

    @classmethod
    def open(
        cls, *, id: str, question: str, liquidity: float, truth: bool, resolves_at: int, ledger: Ledger, tick: int
    ) -> PredictionMarket:
        """A market at price 0.5 whose subsidy, ``ceil(100 b ln 2)`` cents, came from ``house``."""
        market = cls(id=id, question=question, liquidity=float(liquidity), truth=truth, resolves_at=resolves_at)
        ledger.transfer("house", market.account, market.subsidy, memo=f"subsidy:{id}", tick=tick)
        return market

    @property
    def account(self) -> str:
        """The maker's account in the ledger."""
        return f"market:{self.id}"

    @property
    def subsidy(self) -> int:
        """The most that the maker can lose, in cents."""
        return to_cents_against(CENTS_PER_SHARE * self.liquidity * math.log(2.0), paying=True)

    def is_open(self, tick: int) -> bool:
        """Whether it trades at this tick."""
        return self.resolved is None and tick < self.resolves_at

    def shares(self, agent: str, side: Side) -> int:
        """Milli-shares that an agent holds."""
        return self.holdings.get(agent, [0, 0])[_index(side)]

    def price_yes(self) -> float:
        """The price of yes in credits a share, which is the market's probability, in [0, 1]."""
        return _sigmoid(self._lead("yes"))

    def price(self, side: Side) -> float:
        """The price of a side in credits a share, in [0, 1]."""
        return _sigmoid(self._lead(side))

    def cost(self, side: Side, shares: int) -> float:
        """Exact cents, not rounded, that ``shares`` milli-shares cost now; negative ``shares`` give minus what the
        maker pays for them.

        With b = 100 from (0, 0), 10 yes shares (10,000) cost 100 ln((e^0.1 + 1)/2) credits = 512.4948 cents.
        """
        lead = self._lead(side)
        x = shares / (MILLI * self.liquidity)
        if abs(x) <= 1.0:  # no cancellation for small trades
            growth = math.log1p(_sigmoid(lead) * math.expm1(x))
        else:
            growth = _softplus(lead + x) - _softplus(lead)
        return CENTS_PER_SHARE * self.liquidity * growth

    def quote_for_money(self, side: Side, cents: int) -> int:
        """The most milli-shares that ``cents`` buy, rounded down; 0 if they buy none or ``cents`` is no valid order."""
        if not 0 < cents <= MAX_ORDER:
            return 0
        shares = self._shares_for(side, cents - self._guard(side, self._shares_for(side, cents)))
        while shares > 0 and self._charge(side, shares) > cents:  # the last bits of a float
            shares -= 1
        return shares

    def refusal_to_buy(self, agent: str, side: Side, cents: int, ledger: Ledger, tick: int) -> TradeRefusal | None:
        """Why ``buy`` would have no effect, or None."""
        if not self.is_open(tick):
            return "closed"
        if side not in ("yes", "no"):
            return "bad_side"
        if not 0 < cents <= MAX_ORDER:
            return "bad_amount"
        if ledger.balance(f"agent:{agent}") < cents:
            return "no_funds"
        return None if self.quote_for_money(side, cents) > 0 else "too_small"

    def buy(self, agent: str, side: Side, cents: int, ledger: Ledger, tick: int) -> int:
        """Buy as many shares as ``cents`` pay for; returns milli-shares, 0 if refused (``refusal_to_buy`` says why).

        The charge is the cost of those shares rounded up to a cent: at most ``cents``.
        """
        if self.refusal_to_buy(agent, side, cents, ledger, tick) is not None:
            return 0
        shares = self.quote_for_money(side, cents)
        charge = self._charge(side, shares)
        if not ledger.transfer(f"agent:{agent}", self.account, charge, memo=f"buy:{side}", tick=tick):
            return 0
        self._add(agent, side, shares)
        return shares

    def refusal_to_sell(self, agent: str, side: Side, shares: int, tick: int) -> TradeRefusal | None:
        """Why ``sell`` would have no effect, or None."""
        if not self.is_open(tick):
            return "closed"
        if side not in ("yes", "no"):
            return "bad_side"
        if shares <= 0:
            return "bad_amount"
        if self.shares(agent, side) < shares:
            return "no_shares"
        return None if self._refund(side, shares) > 0 else "too_small"

    def sell(self, agent: str, side: Side, shares: int, ledger: Ledger, tick: int) -> int:
        """Sell milli-shares back to the maker; returns the cents paid, rounded down, 0 if refused."""
        if self.refusal_to_sell(agent, side, shares, tick) is not None:
            return 0
        refund = self._refund(side, shares)
        if not ledger.transfer(self.account, f"agent:{agent}", refund, memo=f"sell:{side}", tick=tick):
            return 0
        self._add(agent, side, -shares)
        return refund

    def resolve(self, ledger: Ledger, tick: int) -> dict[str, int]:
        """Pay a credit for each winning share (down to the cent) and give what is left of the maker's money back to
        ``house``. Returns cents by agent, winners only; empty before ``resolves_at`` and when already resolved."""
        if self.resolved is not None or tick < self.resolves_at:
            return {}
        self.resolved = self.truth
        paid: dict[str, int] = {}
        for agent in sorted(self.holdings):
            payout = self.holdings[agent][0 if self.truth else 1] * CENTS_PER_SHARE // MILLI
            if ledger.transfer(self.account, f"agent:{agent}", payout, memo=f"resolve:{self.id}", tick=tick):
                paid[agent] = payout
        self.holdings = {}
        left = ledger.balance(self.account)
        ledger.transfer(self.account, "house", left, memo=f"subsidy_back:{self.id}", tick=tick)
        return paid

    def _lead(self, side: Side) -> float:
        lead = self.q_yes - self.q_no if _index(side) == 0 else self.q_no - self.q_yes
        return lead / (MILLI * self.liquidity)

    def _shares_for(self, side: Side, cents: float) -> int:
        """The inverse of the cost, rounded down."""
        if cents <= 0.0:
            return 0
        money = cents / (CENTS_PER_SHARE * self.liquidity)
        log_growth = money + math.log(-math.expm1(-money))  # ln(e^money - 1)
        x = _softplus(log_growth + _softplus(-self._lead(side)))
        return math.floor(x * self.liquidity * MILLI)

    def _guard(self, side: Side, shares: int) -> float:
        size = 1.0 + abs(self._lead(side)) + abs(shares) / (MILLI * self.liquidity)
        return _ROUNDING_GUARD * CENTS_PER_SHARE * self.liquidity * size

    def _charge(self, side: Side, shares: int) -> int:
        return to_cents_against(self.cost(side, shares) + self._guard(side, shares), paying=True)

    def _refund(self, side: Side, shares: int) -> int:
        return to_cents_against(-self.cost(side, -shares) - self._guard(side, shares), paying=False)

    def _add(self, agent: str, side: Side, shares: int) -> None:
        held = self.holdings.setdefault(agent, [0, 0])
        held[_index(side)] += shares
        if _index(side) == 0:
            self.q_yes += shares
        else:
            self.q_no += shares
        if held == [0, 0]:
            del self.holdings[agent]


def signal(truth: bool, accuracy: float, key: str | int | tuple[str | int, ...]) -> bool:
    """A private noisy hint: the truth with probability ``accuracy``, else its opposite. The same key gives the same
    hint; keys are (seed, episode, market, agent, tick) or the like. Raises ValueError unless 0 <= accuracy <= 1."""
    if not 0.0 <= accuracy <= 1.0:
        raise ValueError(f"accuracy is a probability, not {accuracy}")
    right = Random(f"signal|{key!r}").random() < accuracy
    return truth if right else not truth


def _index(side: str) -> int:
    if side == "yes":
        return 0
    if side == "no":
        return 1
    raise ValueError(f"a side is yes or no, not {side!r}")


def _softplus(z: float) -> float:
    """ln(1 + e^z)."""
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def _sigmoid(z: float) -> float:
    if z >= 0.0:
        return 1.0 / (1.0 + math.exp(-z))
    return math.exp(z) / (1.0 + math.exp(z))
