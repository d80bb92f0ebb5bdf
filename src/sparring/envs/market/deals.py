"""Deals: one item of goods for credits, by offer and counter-offer, through escrow, with private valuations."""

from __future__ import annotations

from sparring.envs.market import records as r
from sparring.envs.market.moment import may_not_write, named_person, shown_deal
from sparring.envs.market.records import Refusal
from sparring.envs.market.state import Deal, OpenTurn, Person, WorldState
from sparring.envs.market.threads import cash, cents_of


def propose(world: WorldState, person: Person, action: r.Propose, turn: OpenTurn) -> Refusal | None:
    target = named_person(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    if action.item not in person.values:
        return Refusal.UNKNOWN_ITEM
    refusal = may_not_write(world, person, target)
    if refusal is not None:
        return refusal
    price = cents_of(action.amount, paying=action.side == "buy")
    refusal = _cannot_offer(world, person, action.item, price, sells=action.side == "sell")
    if refusal is not None:
        return refusal
    seller, buyer = (target, person) if action.side == "buy" else (person, target)
    deal = offer(world, seller, buyer, action.item, price, proposer=person)
    deal.proposal_tick = world.tick
    turn.trade = f"deal:{deal.id}"
    return None


def _cannot_offer(world: WorldState, person: Person, item: str, price: int, *, sells: bool) -> Refusal | None:
    """Nobody offers goods or money that it does not have."""
    if price <= 0:
        return Refusal.BAD_AMOUNT
    if sells:
        return Refusal.NOT_YOURS if person.goods.get(item, 0) < 1 else None
    return Refusal.NO_FUNDS if world.ledger.balance(cash(person)) < price else None


def offer(world: WorldState, seller: Person, buyer: Person, item: str, price: int, *, proposer: Person) -> Deal:
    """Puts a deal before the other side."""
    other = buyer if proposer is seller else seller
    deal = Deal(
        id=world.next_deal, seller=seller.id, buyer=buyer.id, item=item, price=price, waiting=other.id,
        proposer=proposer.id, opened=world.tick, last_move=world.tick,
    )  # fmt: skip
    world.next_deal += 1
    world.deals[deal.id] = deal
    return deal


def counter_offer(world: WorldState, person: Person, action: r.CounterOffer, turn: OpenTurn) -> Refusal | None:
    deal = shown_deal(world, person, action.deal)
    if deal is None:
        return Refusal.UNKNOWN_DEAL
    price = cents_of(action.amount, paying=deal.buyer == person.id)
    refusal = _cannot_offer(world, person, deal.item, price, sells=deal.seller == person.id)
    if refusal is not None:
        return refusal
    deal.price, deal.last_move = price, world.tick
    deal.waiting = deal.seller if deal.buyer == person.id else deal.buyer
    deal.proposer, deal.proposal_tick = person.id, world.tick
    turn.trade = f"deal:{deal.id}"
    return None


def accept(world: WorldState, person: Person, action: r.Accept, turn: OpenTurn) -> Refusal | None:
    deal = shown_deal(world, person, action.deal)
    if deal is None:
        return Refusal.UNKNOWN_DEAL
    turn.due = world.tick
    return complete(world, deal, person, turn)


def complete(world: WorldState, deal: Deal, acceptor: Person, turn: OpenTurn | None) -> Refusal | None:
    """Goods and money change hands through escrow; the true surplus of each side, from its private valuation, goes to
    the turn that made it agree. A deal that undoes an earlier one among seats takes back exactly what that one gave, so
    that round trips pay zero at whatever prices; residents agree only to what is good for them."""
    seller, buyer = world.people[deal.seller], world.people[deal.buyer]
    if seller.goods.get(deal.item, 0) < 1:
        return Refusal.NOT_YOURS
    if world.ledger.balance(cash(buyer)) < deal.price:
        return Refusal.NO_FUNDS
    escrow = f"escrow:{deal.id}"
    world.ledger.transfer(cash(buyer), escrow, deal.price, memo="deal", tick=world.tick)
    seller.goods[deal.item] -= 1
    buyer.goods[deal.item] = buyer.goods.get(deal.item, 0) + 1
    world.ledger.transfer(escrow, cash(seller), deal.price, memo="deal", tick=world.tick)
    deal.open = False
    gains = {
        buyer.id: buyer.values.get(deal.item, 0) - deal.price,
        seller.id: deal.price - seller.values.get(deal.item, 0),
    }
    if seller.seated and buyer.seated:
        gains = {
            buyer.id: _undoing(buyer, deal.item, gains[buyer.id], bought=1),
            seller.id: _undoing(seller, deal.item, gains[seller.id], bought=-1),
        }
    if turn is not None:
        turn.surplus += gains[acceptor.id]
    for other in world.open_turns:
        if other.trade == f"deal:{deal.id}" and other.agent == deal.proposer and other.tick == deal.proposal_tick:
            other.surplus += gains[other.agent]
            other.due = world.tick
    return None


def _undoing(person: Person, item: str, gain: int, *, bought: int) -> int:
    """The surplus of a deal with another seat: its gain, or what takes back the newest opposite deal's."""
    before, gains = person.bought.get(item, 0), person.deals_between.setdefault(item, [])
    person.bought[item] = before + bought
    if before * bought < 0:
        return -gains.pop()
    gains.append(gain)
    return gain


def reject(world: WorldState, person: Person, action: r.Reject, turn: OpenTurn) -> Refusal | None:
    deal = shown_deal(world, person, action.deal)
    if deal is None:
        return Refusal.UNKNOWN_DEAL
    deal.open = False
    turn.due = world.tick
    for other in world.open_turns:
        if other.trade == f"deal:{deal.id}":
            other.due = min(other.due, world.tick)
    return None
