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
from sparring.envs.market.deals import accept, counter_offer, propose, reject
from sparring.envs.market.moment import has_blocked, may_not_write, named_person, now, shown_message
from sparring.envs.market.records import Refusal, ThreadTruth
from sparring.envs.market.secrets import matches
from sparring.envs.market.state import CENTS, OpenTurn, Person, Post, Thread, WorldState
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
    target = named_person(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    refusal = may_not_write(world, person, target)
    if refusal is not None:
        return refusal
    thread = open_thread(world, person, target, action.content)
    turn.threads, turn.opener = [thread.id], True
    turn.due = world.tick + longest(world)
    _post(world, person, target, action.content, thread, turn)
    return None


def _reply_chat(world: WorldState, person: Person, action: r.ReplyChat, turn: OpenTurn) -> Refusal | None:
    message = shown_message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    thread = world.threads[message.thread]
    other = world.people[message.sender]
    refusal = may_not_write(world, person, other)
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
    members = now(world).groups.get(action.group, [])
    if person.id not in members:
        return Refusal.UNKNOWN_GROUP
    readers = [world.people[member] for member in members if member != person.id]
    readers = [reader for reader in readers if not has_blocked(world, reader, person)]
    refusal = may_not_write(world, person) or (None if readers else Refusal.BLOCKED)
    if refusal is not None:
        return refusal
    turn.opener, turn.due = True, world.tick + longest(world)
    for reader in readers:
        thread = open_thread(world, person, reader, action.content)
        turn.threads.append(thread.id)
        _post(world, person, reader, action.content, thread, turn, group=action.group)
    return None


def _invite(world: WorldState, person: Person, action: r.InviteToGroup, turn: OpenTurn) -> Refusal | None:
    target = named_person(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    refusal = may_not_write(world, person, target)
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
    refusal = may_not_write(world, person)
    if refusal is not None:
        return refusal
    world.comments.append((now(world).handles[person.id], action.content))
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
    message = shown_message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    thread = world.threads[message.thread]
    cents = _funds(world, person, action.amount)
    if isinstance(cents, Refusal):
        return cents
    return _pay_in_thread(world, person, world.people[message.sender], thread, cents, turn)


def _transfer(world: WorldState, person: Person, action: r.Transfer, turn: OpenTurn) -> Refusal | None:
    target = named_person(world, person, action.target)
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
            whole = not thread.wants_secret if thread.named is None else cents >= thread.named
            money_moved(world, thread, person, target, cents, turn, whole=whole)
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
    message = shown_message(world, person, action.message)
    if isinstance(message, Refusal):
        return message
    _turn_down(world, world.threads[message.thread], turn)
    return None


def _block(world: WorldState, person: Person, action: r.Block, turn: OpenTurn) -> Refusal | None:
    """Also a handle that its owner has left behind, while a message under it is in the inbox."""
    target = named_person(world, person, action.target)
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
    message = shown_message(world, person, action.message)
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
    message = shown_message(world, person, action.message)
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
    message = shown_message(world, person, action.message)
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
    target = named_person(world, person, action.target)
    if isinstance(target, Refusal):
        return target
    if world.ledger.balance(cash(person)) < world.rules.audit_fee * CENTS:
        return Refusal.NO_FUNDS
    _charge(world, person, world.rules.audit_fee, turn, memo="audit")
    person.records.append((action.target, target.reports_upheld, world.tick - target.born))
    turn.due = world.tick
    return None


Apply = Callable[[WorldState, Person, Any, OpenTurn], Refusal | None]
APPLY: dict[type[msgspec.Struct], Apply] = {
    r.Wait: _wait, r.SendMessage: _send_message, r.ReplyChat: _reply_chat, r.GroupMessage: _group_message,
    r.InviteToGroup: _invite, r.Comment: _comment, r.Transfer: _transfer, r.Pay: _pay, r.SendPayment: _send_payment,
    r.Refuse: _refuse, r.Ignore: _refuse, r.Block: _block, r.Report: _report, r.Escalate: _escalate,
    r.RequestVerification: _request_verification, r.Audit: _audit, r.Propose: propose,
    r.CounterOffer: counter_offer, r.Accept: accept, r.Reject: reject, r.Withdraw: _withdraw,
}  # fmt: skip
"""Trading actions are added by ``trading``."""
