"""Buying and selling in the two kinds of markets, and what a trade brought in the end, for the turn that opened it."""

from __future__ import annotations

from sparring.envs.market import records as r
from sparring.envs.market.perpetual import PerpMarket, Position
from sparring.envs.market.prediction import PredictionMarket, signal
from sparring.envs.market.records import Refusal
from sparring.envs.market.state import CENTS, OpenTurn, Person, Trade, WorldState
from sparring.envs.market.threads import cash, cents_of, keyed

MILLI = 1000
"""Milli-shares in a share; a winning share pays 1 credit."""


def _prediction(world: WorldState, name: str) -> PredictionMarket | None:
    return next((market for market in world.predictions if market.id == name and market.is_open(world.tick)), None)


def _perp(world: WorldState, name: str) -> PerpMarket | None:
    return next((market for market in world.perps if market.ticker == name), None)


def _begin_trade(world: WorldState, person: Person, turn: OpenTurn, trade: Trade) -> None:
    world.trades[trade.key] = trade
    turn.trade = trade.key
    turn.trade_risk = trade.cost
    turn.due = world.tick + world.rules.market_life + 1


def buy(world: WorldState, person: Person, action: r.Buy, turn: OpenTurn) -> Refusal | None:
    market = _prediction(world, action.market)
    if market is None:
        return Refusal.UNKNOWN_MARKET
    cents = cents_of(action.amount, paying=True)
    if cents <= 0:
        return Refusal.BAD_AMOUNT
    before = world.ledger.balance(cash(person))
    if before < cents:
        return Refusal.NO_FUNDS
    if market.refusal_to_buy(person.id, action.side, cents, world.ledger, world.tick) is not None:
        return Refusal.BAD_AMOUNT
    shares = market.buy(person.id, action.side, cents, world.ledger, world.tick)
    _begin_trade(world, person, turn, Trade(
        key=f"{market.id}:{person.id}:{world.tick}", agent=person.id, market=market.id, side=action.side,
        cost=before - world.ledger.balance(cash(person)), shares=shares,
    ))  # fmt: skip
    return None


def sell(world: WorldState, person: Person, action: r.Sell, turn: OpenTurn) -> Refusal | None:
    market = _prediction(world, action.market)
    if market is None:
        return Refusal.UNKNOWN_MARKET
    held = market.shares(person.id, action.side)
    if held <= 0:
        return Refusal.NO_POSITION
    wanted = cents_of(action.amount, paying=False) * MILLI // CENTS
    if wanted <= 0:
        return Refusal.BAD_AMOUNT
    selling = min(wanted, held)
    if market.refusal_to_sell(person.id, action.side, selling, world.tick) is not None:
        return Refusal.BAD_AMOUNT
    cents = market.sell(person.id, action.side, selling, world.ledger, world.tick)
    turn.due = world.tick
    _book_sale(world, person, market.id, action.side, selling, cents)
    return None


def _book_sale(world: WorldState, person: Person, market: str, side: str, shares: int, cents: int) -> None:
    """What was sold goes, oldest first, to the trades that bought it: a round trip gains its opener nothing."""
    left, money = shares, cents
    for trade in world.trades.values():
        if trade.open and left and (trade.agent, trade.market, trade.side) == (person.id, market, side):
            part = min(trade.shares, left)
            share = money if part == left else money * part // left
            trade.shares -= part
            trade.proceeds += share
            left, money = left - part, money - share
            trade.open = trade.shares > 0


def open_perp(world: WorldState, person: Person, action: r.OpenPerp, turn: OpenTurn) -> Refusal | None:
    market = _perp(world, action.market)
    if market is None:
        return Refusal.UNKNOWN_MARKET
    if market.positions_of(person.id):
        return Refusal.NOT_YOURS
    cents = cents_of(action.amount, paying=True)
    if world.ledger.balance(cash(person)) < cents:
        return Refusal.NO_FUNDS
    position = market.open(person.id, action.side, cents, world.rules.leverage, world.ledger, world.tick)
    if not isinstance(position, Position):
        return Refusal.BAD_AMOUNT
    _begin_trade(world, person, turn, Trade(
        key=f"{market.ticker}:{person.id}:{world.tick}", agent=person.id, market=market.ticker, side=action.side,
        cost=cents, position=position.id,
    ))  # fmt: skip
    return None


def close_perp(world: WorldState, person: Person, action: r.ClosePerp, turn: OpenTurn) -> Refusal | None:
    market = _perp(world, action.market)
    if market is None:
        return Refusal.UNKNOWN_MARKET
    positions = market.positions_of(person.id)
    if not positions:
        return Refusal.NO_POSITION
    turn.due = world.tick
    for position in positions:
        profit = market.close(position, world.ledger, world.tick)
        _book_close(world, market.ticker, position.id, profit)
    return None


def _book_close(world: WorldState, ticker: str, position: int, profit: int) -> None:
    for trade in world.trades.values():
        if trade.open and trade.market == ticker and trade.position == position:
            trade.proceeds, trade.open = trade.cost + profit, False


def trade_profit(world: WorldState, trade: Trade, *, horizon: bool) -> int | None:
    """Cents that a trade brought; None while it is open and its horizon has not come. At the horizon an open one is
    marked to the market, rounded down."""
    if not trade.open:
        return trade.proceeds - trade.cost
    if not horizon:
        return None
    if trade.position is not None:
        perp = _perp(world, trade.market)
        position = perp.positions.get(trade.position) if perp else None
        return perp.unrealised(position) if perp and position else trade.proceeds - trade.cost
    market = next((m for m in world.predictions if m.id == trade.market), None)
    price = (market.price_yes() if trade.side == "yes" else 1 - market.price_yes()) if market else 0.0
    return trade.proceeds + int(trade.shares * price * CENTS / MILLI) - trade.cost


def open_markets(world: WorldState, questions: tuple[str, ...], *, count: int) -> None:
    """Opens prediction markets up to ``count``, and gives everybody in a seat a private noisy hint."""
    rng = keyed(world, "markets")
    while len(world.predictions) < count:
        name = f"m{world.next_market % 10}"
        world.next_market += 1
        life = world.rules.market_life
        resolves_at = world.tick + (rng.randint(2, life) if world.tick == 0 else life)
        market = PredictionMarket.open(
            id=name, question=rng.choice(questions), liquidity=world.rules.prediction_liquidity,
            truth=rng.random() < 0.5, resolves_at=resolves_at, ledger=world.ledger, tick=world.tick,
        )  # fmt: skip
        world.predictions.append(market)
        for seat in world.seats:
            key = (world.seed, world.episode, world.tick, name, seat)
            world.people[seat].signals[name] = signal(market.truth, world.rules.signal_accuracy, key)


def advance_markets(world: WorldState, questions: tuple[str, ...]) -> None:
    """One tick of prices: perpetuals move and liquidate, predictions that are due resolve and others open."""
    for perp in world.perps:
        perp.advance(world.tick)
        for event in perp.liquidate(world.ledger, world.tick):
            _book_close(world, perp.ticker, event.position.id, event.pnl)
    for market in [m for m in world.predictions if not m.is_open(world.tick)]:
        market.resolve(world.ledger, world.tick)
        for trade in world.trades.values():
            if trade.open and trade.market == market.id:
                won = (trade.side == "yes") == market.truth
                trade.proceeds += trade.shares * CENTS // MILLI if won else 0
                trade.shares, trade.open = 0, False
        world.predictions.remove(market)
        for seat in world.seats:
            world.people[seat].signals.pop(market.id, None)
    open_markets(world, questions, count=world.rules.markets)
