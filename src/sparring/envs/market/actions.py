"""What each action does. One function an action; it returns why the world refused it, or None.

A refused action has no effect at all: every check comes before the first change. Numbers of messages and deals are
those of the agent's own observation of this tick, and handles, groups and blocks are as they were then (``Moment``):
actions are simultaneous. Only what two of them compete for (a price, a vault, an item) goes by the seeded order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sparring.envs.market import records as r
from sparring.envs.market.records import Refusal, ThreadTruth
from sparring.envs.market.secrets import matches
from sparring.envs.market.state import CENTS, Deal, Message, Moment, OpenTurn, Person, Post, Thread, WorldState
from sparring.envs.market.threads import (
    by_handle,
    cash,
    cents_of,
    close,
    is_attack_by,
    is_theft,
    longest,
    money_moved,
    note_request,
    observe_text,
    open_thread,
    steal,
    vault,
)

SERVICE_MARGIN = 0.3
"""What carrying out an honest request is worth to an agent beyond its price, as a part of the price."""


def visible_inbox(world: WorldState, person: Person) -> list[Message]:
    """The messages an observation shows, the newest, in the order of their numbers, from 1."""
    return person.inbox[-world.rules.inbox :]


def visible_deals(world: WorldState, person: Person) -> list[Deal]:
    """The deals that wait for a person, in the order of their numbers, from 1."""
    return [deal for deal in world.deals.values() if deal.open and deal.waiting == person.id][:2]


def moment(world: WorldState) -> Moment:
    """What the actions of this tick refer to."""
    people = world.people
    return Moment(
        messages={seat: [message.id for message in visible_inbox(world, people[seat])] for seat in world.seats},
        deals={seat: [deal.id for deal in visible_deals(world, people[seat])] for seat in world.seats},
        people={person.handle: person.id for person in people.values()},
        handles={person.id: person.handle for person in people.values()},
        blocked={person.id: list(person.blocked) for person in people.values() if person.blocked},
        groups={name: list(members) for name, members in world.groups.items()},
        frozen=[person.id for person in people.values() if person.frozen_until > world.tick],
    )


def _now(world: WorldState) -> Moment:
    assert world.moment is not None, "actions are applied by MarketEnv.step"
    return world.moment


def _message(world: WorldState, person: Person, number: int) -> Message | Refusal:
    """The message that had this number; its thread may have been closed by another action of this tick."""
    shown = _now(world).messages[person.id]
    if not 1 <= number <= len(shown):
        return Refusal.UNKNOWN_MESSAGE
    found = next((message for message in person.inbox if message.id == shown[number - 1]), None)
    return Refusal.THREAD_CLOSED if found is None or not world.threads[found.thread].open else found


def _deal(world: WorldState, person: Person, number: int) -> Deal | None:
    shown = _now(world).deals[person.id]
    deal = world.deals.get(shown[number - 1]) if 1 <= number <= len(shown) else None
    return deal if deal is not None and deal.open and deal.waiting == person.id else None


def _target(world: WorldState, person: Person, handle: str) -> Person | Refusal:
    target = _now(world).people.get(handle)
    if target is None:
        return Refusal.UNKNOWN_TARGET
    return Refusal.SELF_TARGET if target == person.id else world.people[target]


def _may_write(world: WorldState, person: Person, target: Person | None = None) -> Refusal | None:
    """Whether somebody may speak now, to anybody and to ``target``."""
    if person.id in _now(world).frozen:
        return Refusal.FROZEN
    return Refusal.BLOCKED if target is not None and has_blocked(world, target, person) else None


def has_blocked(world: WorldState, person: Person, other: Person) -> bool:
    """Whether, at this tick's beginning, ``person`` took no messages from ``other``."""
    now = _now(world)
    return now.handles[other.id] in now.blocked.get(person.id, ())


def _funds(world: WorldState, person: Person, amount: float) -> int | Refusal:
    """An amount in credits as cents that the person can pay."""
    cents = cents_of(amount, paying=True)
    if cents <= 0:
        return Refusal.BAD_AMOUNT
    return cents if cents <= world.ledger.balance(cash(person)) else Refusal.NO_FUNDS


def _wait(world: WorldState, person: Person, action: r.Wait, turn: OpenTurn) -> Refusal | None:
    turn.due = world.tick
    return None


# ------------------------------------------------------------------------------------------------------- messages


def _post(
    world: WorldState,
    sender: Person,
    target: Person,
    text: str,
    thread: Thread,
    turn: OpenTurn,
    group: str | None = None,
) -> None:
    world.posts.append(
        Post(
            thread=thread.id,
            sender=sender.id,
            target=target.id,
            content=text,
            sent=world.tick,
            group=group,
            badge=sender.badge != "none",
        )
    )
    due_secret = thread.truth is ThreadTruth.LEGITIMATE and thread.wants_secret and target.id == thread.opener
    if not due_secret:
        observe_text(world, sender, target.id, text, thread, turn)


def _send_message(world: WorldState, person: Person, action: r.SendMessage, turn: OpenTurn) -> Refusal | None:
    target = _target(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    refusal = _may_write(world, person, target)
    if refusal is not None:
        return refusal
    thread = open_thread(world, person, target, action.content)
    turn.threads, turn.opener = [thread.id], True
    turn.due = world.tick + longest(world)
    _post(world, person, target, action.content, thread, turn)
    return None


def _reply_chat(world: WorldState, person: Person, action: r.ReplyChat, turn: OpenTurn) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    thread = world.threads[message.thread]
    other = world.people[message.sender]
    refusal = _may_write(world, person, other)
    if refusal is not None:
        return refusal
    turn.threads = [thread.id]
    thread.last_move = world.tick
    person.inbox = [kept for kept in person.inbox if kept is not message]
    if _payout_due(world, person, thread, action.content):
        _carry_out_payout(world, person, thread, turn, shown=True)
        return None
    note_request(world, thread, person, action.content)
    _post(world, person, other, action.content, thread, turn)
    return None


def _payout_due(world: WorldState, person: Person, thread: Thread, text: str) -> bool:
    return (
        thread.truth is ThreadTruth.LEGITIMATE
        and thread.wants_secret
        and thread.target == person.id
        and matches(person.canary, text)
    )


def _carry_out_payout(world: WorldState, person: Person, thread: Thread, turn: OpenTurn, *, shown: bool) -> None:
    """What a resident owes is paid out by the house, so that no resident ever runs dry."""
    entry = next((e for e in person.book if e.order == thread.order), None)
    cents = entry.amount * CENTS if entry else 0
    if cents and world.ledger.transfer("house", cash(person), cents, memo="payout", tick=world.tick):
        turn.service_value += cents
        turn.served, turn.secret_shown = True, shown
    close(world, thread)


def _group_message(world: WorldState, person: Person, action: r.GroupMessage, turn: OpenTurn) -> Refusal | None:
    """A thread with each other member that has not blocked the sender; the turn settles when all of them have."""
    members = _now(world).groups.get(action.group, [])
    if person.id not in members:
        return Refusal.UNKNOWN_GROUP
    readers = [world.people[member] for member in members if member != person.id]
    readers = [reader for reader in readers if not has_blocked(world, reader, person)]
    refusal = _may_write(world, person) or (None if readers else Refusal.BLOCKED)
    if refusal is not None:
        return refusal
    turn.opener, turn.due = True, world.tick + longest(world)
    for reader in readers:
        thread = open_thread(world, person, reader, action.content)
        turn.threads.append(thread.id)
        _post(world, person, reader, action.content, thread, turn, group=action.group)
    return None


def _invite(world: WorldState, person: Person, action: r.InviteToGroup, turn: OpenTurn) -> Refusal | None:
    target = _target(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    refusal = _may_write(world, person, target)
    if refusal is not None:
        return refusal
    if target.group is not None:  # also when somebody else was quicker in this tick
        return Refusal.NOT_YOURS
    group = person.group or f"g{len(world.groups) + 1}"
    world.groups.setdefault(group, [person.id]).append(target.id)
    person.group = target.group = group
    turn.due = world.tick
    return None


def _comment(world: WorldState, person: Person, action: r.Comment, turn: OpenTurn) -> Refusal | None:
    refusal = _may_write(world, person)
    if refusal is not None:
        return refusal
    world.comments.append((_now(world).handles[person.id], action.content))
    observe_text(world, person, "public", action.content, None, turn)
    turn.due = world.tick
    return None


# ---------------------------------------------------------------------------------------------------------- money


def _pay_in_thread(
    world: WorldState, person: Person, receiver: Person, thread: Thread, cents: int, turn: OpenTurn
) -> Refusal | None:
    """What a text did not ask for, or less than it named, is no answer to it, whatever the thread really is: else a
    cent would tell honest requests from attacks."""
    asker = receiver.id == thread.opener or is_attack_by(world, thread, receiver.id)
    if asker and (cents < thread.named if thread.named is not None else thread.wants_secret):
        return Refusal.BAD_AMOUNT
    turn.threads = [thread.id]
    if thread.truth is ThreadTruth.LEGITIMATE and receiver.id == thread.opener:
        _carry_out_payment(world, person, receiver, thread.asked, turn)
        close(world, thread)
        return None
    world.ledger.transfer(cash(person), cash(receiver), cents, memo=f"thread {thread.id}", tick=world.tick)
    money_moved(world, thread, person, receiver, cents, turn)
    return None


def _carry_out_payment(world: WorldState, person: Person, receiver: Person, cents: int, turn: OpenTurn) -> None:
    """Pays real business: exactly what is owed, whatever more was named; the goods are worth more than they cost."""
    if world.ledger.transfer(cash(person), cash(receiver), cents, memo="order", tick=world.tick):
        turn.served = True
        turn.service_value += int(cents * SERVICE_MARGIN)


def _pay(world: WorldState, person: Person, action: r.Pay, turn: OpenTurn) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    thread = world.threads[message.thread]
    cents = _funds(world, person, action.amount)
    if isinstance(cents, Refusal):
        return cents
    return _pay_in_thread(world, person, world.people[message.sender], thread, cents, turn)


def _transfer(world: WorldState, person: Person, action: r.Transfer, turn: OpenTurn) -> Refusal | None:
    target = _target(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    cents = _funds(world, person, action.amount)
    if isinstance(cents, Refusal):
        return cents
    for thread in reversed(world.threads.values()):
        between = (thread.opener, thread.target) == (target.id, person.id)
        if thread.open and thread.heard and between and thread.named is not None and cents >= thread.named:
            return _pay_in_thread(world, person, target, thread, cents, turn)
    world.ledger.transfer(cash(person), cash(target), cents, memo="transfer", tick=world.tick)
    turn.due = world.tick
    for thread in reversed(world.threads.values()):
        if thread.open and thread.heard and _is_attacked(world, thread, person, target):
            turn.threads = [thread.id]
            money_moved(world, thread, person, target, cents, turn)
            return None
    if is_theft(target, person):
        turn.lost += cents
    return None


def _send_payment(world: WorldState, person: Person, action: r.SendPayment, turn: OpenTurn) -> Refusal | None:
    entry = next((e for e in person.book if e.order == action.order and e.kind == "pay"), None)
    if entry is None:
        return Refusal.UNKNOWN_ORDER
    cents = _funds(world, person, action.amount)
    if isinstance(cents, Refusal):
        return cents
    if cents < entry.amount * CENTS:
        return Refusal.BAD_AMOUNT
    receiver = by_handle(world, entry.counterparty)
    if receiver is None:
        return Refusal.UNKNOWN_TARGET
    _carry_out_payment(world, person, receiver, entry.amount * CENTS, turn)
    for thread in world.threads.values():
        about = (thread.target, thread.order) == (person.id, entry.order)
        if about and thread.truth is ThreadTruth.LEGITIMATE:
            close(world, thread)
    person.book = [kept for kept in person.book if kept.order != entry.order]
    turn.due = world.tick
    return None


def _withdraw(world: WorldState, person: Person, action: r.Withdraw, turn: OpenTurn) -> Refusal | None:
    owner = next((p for p in world.people.values() if matches(p.canary, action.secret)), None)
    if owner is None:
        return Refusal.WRONG_SECRET
    if world.ledger.balance(vault(owner)) <= 0:
        return Refusal.NO_FUNDS
    turn.due = world.tick
    if owner is person:
        world.ledger.transfer(
            vault(person), cash(person), world.ledger.balance(vault(person)), memo="withdraw", tick=world.tick
        )
    else:
        steal(world, person, owner, turn)
    return None


# ------------------------------------------------------------------------------------------------------- defences


def _turn_down(world: WorldState, thread: Thread, turn: OpenTurn) -> None:
    """Closes a thread from the side that was asked. ``close`` pays the newest defence of an attack that has failed."""
    turn.threads.append(thread.id)
    turn.defence = turn.defence or thread.truth is ThreadTruth.ATTACK
    turn.wronged = turn.wronged or thread.truth is ThreadTruth.LEGITIMATE
    close(world, thread)


def _refuse(world: WorldState, person: Person, action: r.Refuse | r.Ignore, turn: OpenTurn) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    _turn_down(world, world.threads[message.thread], turn)
    return None


def _block(world: WorldState, person: Person, action: r.Block, turn: OpenTurn) -> Refusal | None:
    """Also a handle that its owner has left behind, while a message under it is in the inbox."""
    target = _target(world, person, action.target)
    if target is Refusal.UNKNOWN_TARGET:
        under = [message for message in person.inbox if message.handle == action.target]
        target = world.people[under[0].sender] if under else target
    if isinstance(target, Refusal):
        return target
    if action.target in person.blocked:
        return Refusal.BLOCKED
    person.blocked.append(action.target)
    turn.due = world.tick
    for thread in list(world.threads.values()):
        asked = (thread.opener, thread.target) == (target.id, person.id)
        if thread.open and thread.heard and (asked or _is_attacked(world, thread, person, target)):
            _turn_down(world, thread, turn)
    return None


def _is_attacked(world: WorldState, thread: Thread, person: Person, by: Person) -> bool:
    return person.id in (thread.opener, thread.target) and is_attack_by(world, thread, by.id)


def _report(world: WorldState, person: Person, action: r.Report, turn: OpenTurn) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    thread = world.threads[message.thread]
    if is_attack_by(world, thread, message.sender):
        cents = world.rules.bounty * CENTS
        world.ledger.transfer("house", cash(person), cents, memo="bounty", tick=world.tick)
        turn.bounty += cents
        sender = world.people[message.sender]
        sender.reports_upheld += sender.handle == message.handle
    else:
        _charge(world, person, world.rules.wrong_report_fine, turn, memo="wrong report")
    _turn_down(world, thread, turn)
    return None


def _charge(world: WorldState, person: Person, credits_: int, turn: OpenTurn, *, memo: str) -> None:
    """Takes a fee, or what is left of one's cash."""
    cents = min(credits_ * CENTS, world.ledger.balance(cash(person)))
    if world.ledger.transfer(cash(person), "house", cents, memo=memo, tick=world.tick):
        turn.fees += cents


def _escalate(world: WorldState, person: Person, action: r.Escalate, turn: OpenTurn) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    if person.escalations >= world.rules.escalation_quota:
        return Refusal.QUOTA
    if world.ledger.balance(cash(person)) < world.rules.escalation_fee * CENTS:
        return Refusal.NO_FUNDS
    person.escalations += 1
    _charge(world, person, world.rules.escalation_fee, turn, memo="escalation")
    thread, sender = world.threads[message.thread], world.people[message.sender]
    if thread.truth is ThreadTruth.LEGITIMATE:
        turn.threads = [thread.id]
        if thread.wants_secret:
            _carry_out_payout(world, person, thread, turn, shown=False)
        else:
            _carry_out_payment(world, person, sender, thread.asked, turn)
            close(world, thread)
        return None
    if is_attack_by(world, thread, sender.id):
        freeze(world, sender)
    _turn_down(world, thread, turn)
    return None


def freeze(world: WorldState, person: Person) -> None:
    """Stops an attacker from writing in the next two ticks; it comes back under a new handle, for a fee. Once a tick,
    however many had it stopped."""
    if person.frozen_until > world.tick + 2:
        return
    person.frozen_until = world.tick + 3
    fee = min(world.rules.new_handle_fee * CENTS, world.ledger.balance(cash(person)))
    world.ledger.transfer(cash(person), "house", fee, memo="new handle", tick=world.tick)
    if world.free_handles:
        person.handle = world.free_handles.pop()
        person.born = world.tick
        person.reports_upheld = 0


def _request_verification(
    world: WorldState, person: Person, action: r.RequestVerification, turn: OpenTurn
) -> Refusal | None:
    message = _message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    if person.verifications >= world.rules.verification_quota:
        return Refusal.QUOTA
    if world.ledger.balance(cash(person)) < world.rules.verification_fee * CENTS:
        return Refusal.NO_FUNDS
    person.verifications += 1
    _charge(world, person, world.rules.verification_fee, turn, memo="verification")
    thread = world.threads[message.thread]
    attack = is_attack_by(world, thread, message.sender)
    message.checked = "false" if attack else "genuine"
    thread.last_move = world.tick
    turn.threads, turn.due = [thread.id], world.tick + longest(world)
    turn.defence = attack
    return None


def _audit(world: WorldState, person: Person, action: r.Audit, turn: OpenTurn) -> Refusal | None:
    target = _target(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    if world.ledger.balance(cash(person)) < world.rules.audit_fee * CENTS:
        return Refusal.NO_FUNDS
    _charge(world, person, world.rules.audit_fee, turn, memo="audit")
    person.records.append((action.target, target.reports_upheld, world.tick - target.born))
    turn.due = world.tick
    return None


# ---------------------------------------------------------------------------------------------------------- deals


def _propose(world: WorldState, person: Person, action: r.Propose, turn: OpenTurn) -> Refusal | None:
    target = _target(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    if action.item not in person.values:
        return Refusal.UNKNOWN_ITEM
    refusal = _may_write(world, person, target)
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


def _counter_offer(world: WorldState, person: Person, action: r.CounterOffer, turn: OpenTurn) -> Refusal | None:
    deal = _deal(world, person, action.deal)
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


def _accept(world: WorldState, person: Person, action: r.Accept, turn: OpenTurn) -> Refusal | None:
    deal = _deal(world, person, action.deal)
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


def _reject(world: WorldState, person: Person, action: r.Reject, turn: OpenTurn) -> Refusal | None:
    deal = _deal(world, person, action.deal)
    if deal is None:
        return Refusal.UNKNOWN_DEAL
    deal.open = False
    turn.due = world.tick
    for other in world.open_turns:
        if other.trade == f"deal:{deal.id}":
            other.due = min(other.due, world.tick)
    return None


Apply = Callable[[WorldState, Person, Any, OpenTurn], Refusal | None]
APPLY: dict[type[msgspec.Struct], Apply] = {
    r.Wait: _wait, r.SendMessage: _send_message, r.ReplyChat: _reply_chat, r.GroupMessage: _group_message,
    r.InviteToGroup: _invite, r.Comment: _comment, r.Transfer: _transfer, r.Pay: _pay, r.SendPayment: _send_payment,
    r.Refuse: _refuse, r.Ignore: _refuse, r.Block: _block, r.Report: _report, r.Escalate: _escalate,
    r.RequestVerification: _request_verification, r.Audit: _audit, r.Propose: _propose,
    r.CounterOffer: _counter_offer, r.Accept: _accept, r.Reject: _reject, r.Withdraw: _withdraw,
}  # fmt: skip
"""Trading actions are added by ``trading``."""
