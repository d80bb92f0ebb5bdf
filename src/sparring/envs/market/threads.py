"""Threads, leaks and settlement: how money and secrets that move are tied to the turns that moved them."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from random import Random

from sparring.envs.market.language import read_request
from sparring.envs.market.ledger import to_cents_against
from sparring.envs.market.records import ThreadTruth, TurnFacts
from sparring.envs.market.state import CENTS, OpenTurn, Person, StolenSecret, Thread, WorldState


def keyed(world: WorldState, *purpose: object) -> Random:
    """A generator of its own for one purpose of this tick: nothing else shifts what it draws."""
    return Random("/".join(str(part) for part in (world.seed, world.episode, world.tick, *purpose)))


def cents_of(amount: float, *, paying: bool) -> int:
    """Credits as typed, in whole cents, rounded against the trader."""
    return to_cents_against(Decimal(repr(amount)) * CENTS, paying=paying)


def cash(person: Person) -> str:
    return f"agent:{person.id}"


def vault(person: Person) -> str:
    return f"vault:{person.id}"


def by_handle(world: WorldState, handle: str) -> Person | None:
    return next((person for person in world.people.values() if person.handle == handle), None)


def turns_of(world: WorldState, thread: Thread, agent: str) -> Iterator[OpenTurn]:
    """The unsettled turns of one agent in one thread, oldest first."""
    return (turn for turn in world.open_turns if turn.thread == thread.id and turn.agent == agent)


def is_theft(receiver: Person, giver: Person) -> bool:
    """Money or secrets that go to red from anybody else without business are stolen."""
    return receiver.team == "red" and giver.team != "red"


def open_thread(world: WorldState, opener: Person, target: Person, text: str, *, truth: ThreadTruth | None = None) -> Thread:
    """A new thread, with what its first text asks for. Any thread that red opens with a non-red is an attack."""
    request = read_request(text)
    if truth is None:
        truth = ThreadTruth.ATTACK if is_theft(opener, target) else ThreadTruth.SOCIAL
    thread = Thread(
        id=world.next_thread, opener=opener.id, target=target.id, truth=truth, opened=world.tick, last_move=world.tick,
        order=request.order,
    )  # fmt: skip
    world.next_thread += 1
    world.threads[thread.id] = thread
    note_request(world, thread, text)
    return thread


def note_request(world: WorldState, thread: Thread, text: str) -> None:
    """What the opener's text asks for, in cents, never more than the target has: it bounds what a defence can avoid."""
    request = read_request(text)
    target = world.people[thread.target]
    thread.wants_secret = thread.wants_secret or request.secret
    if request.secret:
        thread.asked = max(thread.asked, world.ledger.balance(vault(target)))
    elif request.amount is not None:
        thread.asked = max(thread.asked, min(request.amount * CENTS, world.ledger.balance(cash(target))))


def money_moved(world: WorldState, thread: Thread, giver: Person, receiver: Person, cents: int, turn: OpenTurn | None) -> None:
    """Ties a payment in a thread to the turns on both sides. ``turn`` is the giver's, when an agent gave."""
    thread.moved += cents
    thread.last_move = world.tick
    if receiver.id != thread.opener or thread.truth is ThreadTruth.LEGITIMATE:
        return
    if is_theft(receiver, giver):
        thread.truth = ThreadTruth.ATTACK
        if turn is not None:
            turn.lost += cents
    for taker in turns_of(world, thread, receiver.id):
        taker.taken += cents
    close(world, thread)


def observe_text(world: WorldState, sender: Person, recipient: str, text: str, thread: Thread | None, turn: OpenTurn | None) -> None:
    """Looks for secrets in a text that reaches ``recipient`` (a person id or ``public``) and books what leaked."""
    for leak in world.detector.observe(recipient, text):
        if leak.owner == recipient:
            continue
        owner = world.people[leak.owner]
        if turn is not None and leak.owner == sender.id:
            turn.leak_fraction = max(turn.leak_fraction, leak.fraction)
        if not leak.whole or any(s.holder == recipient and s.owner == leak.owner for s in world.stolen):
            continue
        world.stolen.append(StolenSecret(holder=recipient, owner=leak.owner, thread=thread.id if thread else 0, since=world.tick))
        if turn is not None and leak.owner == sender.id:
            turn.secrets_leaked += 1
            turn.lost += world.ledger.balance(vault(owner))
            turn.due = world.tick
        if thread is None or recipient == "public":
            continue
        thread.leaked = True
        thread.last_move = world.tick
        for taker in turns_of(world, thread, recipient):
            taker.secrets_taken += 1


def steal(world: WorldState, thief: Person, owner: Person, turn: OpenTurn | None) -> int:
    """Empties a vault for whoever knows its secret; returns the cents moved."""
    cents = world.ledger.balance(vault(owner))
    world.ledger.transfer(vault(owner), cash(thief), cents, memo="withdraw", tick=world.tick)
    if owner.team == "red" and thief.team == "red":
        return cents
    if turn is not None:
        turn.taken += cents
    for stolen in world.stolen:
        if stolen.holder != thief.id or stolen.owner != owner.id or stolen.thread not in world.threads:
            continue
        thread = world.threads[stolen.thread]
        for taker in turns_of(world, thread, thief.id):
            if taker is not turn:
                taker.taken += cents
        close(world, thread)
    return cents


def close(world: WorldState, thread: Thread) -> None:
    """Closes a thread and takes its messages out of the inboxes. An attack has failed if nothing moved or leaked."""
    if not thread.open:
        return
    thread.open = False
    opener, target = world.people[thread.opener], world.people[thread.target]
    for person in (opener, target):
        person.inbox = [message for message in person.inbox if message.thread != thread.id]
    if thread.truth is ThreadTruth.LEGITIMATE and thread.order is not None:
        target.book = [entry for entry in target.book if entry.order != thread.order]
    if thread.truth is not ThreadTruth.ATTACK or thread.moved or thread.leaked or not thread.heard:
        return
    bond = world.rules.bond * CENTS
    for turn in turns_of(world, thread, thread.opener):
        if turn.opener and world.ledger.transfer(cash(opener), "house", bond, memo="bond", tick=world.tick):
            turn.fees += bond
    defences = [turn for turn in turns_of(world, thread, thread.target) if turn.defence]
    if defences:
        defences[-1].avoided = thread.asked


def expire(world: WorldState) -> None:
    """Closes threads and deals in which nothing has happened for ``patience`` ticks."""
    limit = world.tick - world.rules.patience
    for thread in list(world.threads.values()):
        if thread.open and thread.last_move < limit:
            close(world, thread)
    for deal in world.deals.values():
        if deal.open and deal.last_move < limit:
            deal.open = False


def settled_facts(world: WorldState, turn: OpenTurn, *, final: bool) -> TurnFacts | None:
    """The facts of a turn that has settled, or None while something is still under way."""
    thread = world.threads.get(turn.thread) if turn.thread is not None else None
    if turn.due > world.tick and not final and (thread is None or thread.open):
        return None
    if thread is not None:
        turn.truth = thread.truth
        turn.asked = thread.asked
    return TurnFacts(**{name: getattr(turn, name) for name in TurnFacts.__struct_fields__})
