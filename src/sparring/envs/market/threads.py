"""Threads, leaks and settlement: how money and secrets that move are tied to the turns that moved them."""

from __future__ import annotations

from decimal import Decimal
from random import Random

from sparring.envs.market.language import read_request
from sparring.envs.market.ledger import to_cents_against
from sparring.envs.market.records import ThreadTruth, TurnFacts
from sparring.envs.market.state import CENTS, OpenTurn, Person, StolenSecret, Thread, WorldState

VERIFICATION = "request_verification"


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


def turns_of(world: WorldState, thread: Thread, agent: str) -> list[OpenTurn]:
    """The unsettled turns of one agent in one thread, oldest first."""
    return [turn for turn in world.open_turns if thread.id in turn.threads and turn.agent == agent]


def red_side(world: WorldState, thread: Thread) -> Person | None:
    """The attacker of an attack: its opener, or a red target that turned a talk into one. None where none is."""
    if thread.truth is not ThreadTruth.ATTACK:
        return None
    opener, target = world.people[thread.opener], world.people[thread.target]
    return opener if opener.team == "red" else target


def is_attack_by(world: WorldState, thread: Thread, sender: str) -> bool:
    """Whether a message of this sender in this thread is an attack: its victim's answers are none."""
    attacker = red_side(world, thread)
    return attacker is not None and attacker.id == sender


def is_theft(receiver: Person, giver: Person) -> bool:
    """Money or secrets that go to red from anybody else without business are stolen."""
    return receiver.team == "red" and giver.team != "red"


def open_thread(
    world: WorldState, opener: Person, target: Person, text: str, *, truth: ThreadTruth | None = None
) -> Thread:
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
    note_request(world, thread, opener, text)
    return thread


def note_request(world: WorldState, thread: Thread, sender: Person, text: str) -> None:
    """What a text asks its reader for, in cents, never more than the reader has: it bounds what a defence can avoid.
    A red that asks a non-red for something attacks it, whoever opened the thread."""
    request = read_request(text)
    reader = world.people[thread.target if sender.id == thread.opener else thread.opener]
    if sender.id != thread.opener:
        asks = request.secret or request.amount is not None
        if asks and thread.truth is not ThreadTruth.LEGITIMATE and is_theft(sender, reader):
            thread.truth = ThreadTruth.ATTACK
        if not is_attack_by(world, thread, sender.id):
            return
    thread.wants_secret = thread.wants_secret or request.secret
    if request.amount is not None:
        thread.named = request.amount * CENTS
    if request.secret:
        thread.asked = max(thread.asked, world.ledger.balance(vault(reader)))
    elif request.amount is not None:
        thread.asked = max(thread.asked, min(request.amount * CENTS, world.ledger.balance(cash(reader))))


def money_moved(
    world: WorldState, thread: Thread, giver: Person, receiver: Person, cents: int, turn: OpenTurn | None,
    *, whole: bool = True,
) -> None:  # fmt: skip
    """Ties a payment in a thread to the turns on both sides. ``turn`` is the giver's, when an agent gave. What the
    thread brought is shared by the receiver's turns in it, so that talking more never earns more. A part of what was
    asked leaves the thread open, as it does where the request is honest: a cent buys no answer to what it really is."""
    thread.last_move = world.tick
    if thread.truth is ThreadTruth.LEGITIMATE:
        return
    theft = is_theft(receiver, giver)
    if theft:
        thread.truth = ThreadTruth.ATTACK
        thread.moved += cents
        if turn is not None:
            turn.lost += cents
    elif receiver.id != thread.opener or receiver.team == "red":
        return
    share_out(turns_of(world, thread, receiver.id), cents)
    if whole:
        close(world, thread)


def share_out(takers: list[OpenTurn], cents: int) -> None:
    """Cents taken, over the turns that led to it; what does not divide goes to the first."""
    for number, taker in enumerate(takers):
        taker.taken += cents // len(takers) + (cents % len(takers) if number == 0 else 0)


def observe_text(
    world: WorldState, sender: Person, recipient: str, text: str, thread: Thread | None, turn: OpenTurn | None
) -> None:
    """Looks for secrets in a text that reaches ``recipient`` (a person id or ``public``) and books what leaked."""
    for leak in world.detector.observe(recipient, text):
        if leak.owner == recipient:
            continue
        owner = world.people[leak.owner]
        if turn is not None and leak.owner == sender.id:
            turn.leak_fraction = max(turn.leak_fraction, leak.fraction)
        if not leak.whole or any(s.holder == recipient and s.owner == leak.owner for s in world.stolen):
            continue
        known = any(s.owner == leak.owner for s in world.stolen)
        world.stolen.append(
            StolenSecret(holder=recipient, owner=leak.owner, thread=thread.id if thread else 0, since=world.tick)
        )
        if turn is not None and leak.owner == sender.id:
            turn.secrets_leaked += 1
            turn.due = turn.due if turn.opener else world.tick  # whoever opened a thread waits for what it brings
            if not known:  # a vault is lost once, to however many its secret is told
                turn.lost += world.ledger.balance(vault(owner))
        if thread is None or recipient == "public":
            continue
        thread.last_move = world.tick
        if is_theft(world.people[recipient], owner):
            thread.leaked = True
        for taker in turns_of(world, thread, recipient)[:1]:
            taker.secrets_taken += 1


def steal(world: WorldState, thief: Person, owner: Person, turn: OpenTurn | None) -> int:
    """Empties a vault for whoever knows its secret; returns the cents moved. The turn that withdraws has taken them, and
    so has the attack that brought the secret."""
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
        share_out([taker for taker in turns_of(world, thread, thief.id) if taker is not turn], cents)
        close(world, thread)
    return cents


def close(world: WorldState, thread: Thread) -> None:
    """Closes a thread and takes its messages out of the inboxes. An attack has failed if nothing moved or leaked: its
    attacker then loses the bond, and the newest defence has avoided what was asked. What came of a decision on a
    verified message is half the verification's: else nobody would learn to verify."""
    if not thread.open:
        return
    thread.open = False
    opener, target = world.people[thread.opener], world.people[thread.target]
    for person in (opener, target):
        person.inbox = [message for message in person.inbox if message.thread != thread.id]
    if thread.truth is ThreadTruth.LEGITIMATE and thread.order is not None:
        target.book = [entry for entry in target.book if entry.order != thread.order]
        turns = turns_of(world, thread, target.id)
        served, verified = next((turn for turn in turns if turn.served), None), _verification(turns)
        if served is not None and verified is not None:
            served.share = verified.share = 0.5
            verified.served, verified.secret_shown = True, served.secret_shown
            verified.service_value = served.service_value
    attacker = red_side(world, thread)
    if attacker is None or thread.moved or thread.leaked or not thread.heard:
        return
    bond = min(world.rules.bond * CENTS, world.ledger.balance(cash(attacker)))
    if world.ledger.transfer(cash(attacker), "house", bond, memo="bond", tick=world.tick):
        for turn in turns_of(world, thread, attacker.id)[:1]:
            turn.fees += bond
    victim = target if attacker is opener else opener
    defences = [turn for turn in turns_of(world, thread, victim.id) if turn.defence]
    if defences:
        there = world.ledger.balance(vault(victim)) if thread.wants_secret else 0
        there += world.ledger.balance(cash(victim)) if thread.named is not None else 0
        avoided = min(thread.asked, there)
        verified = _verification(defences[:-1])
        if verified is not None:
            verified.avoided += avoided // 2
            avoided -= avoided // 2
        defences[-1].avoided += avoided


def _verification(turns: list[OpenTurn]) -> OpenTurn | None:
    return next((turn for turn in turns if turn.action == VERIFICATION), None)


def longest(world: WorldState) -> int:
    """Ticks that a thread may last: waiting to be heard, and patience on both sides."""
    return world.rules.post_delay + 2 * world.rules.patience


def expire(world: WorldState) -> None:
    """Closes threads and deals in which nothing has happened for ``patience`` ticks, and threads as old as may be."""
    limit = world.tick - world.rules.patience
    for thread in list(world.threads.values()):
        if thread.open and (thread.last_move < limit or thread.opened <= world.tick - longest(world)):
            close(world, thread)
    for deal in world.deals.values():
        if deal.open and deal.last_move < limit:
            deal.open = False


def settled_facts(world: WorldState, turn: OpenTurn, *, final: bool) -> TurnFacts | None:
    """The facts of a turn that has settled, or None while something is still under way."""
    threads = [world.threads[number] for number in turn.threads if number in world.threads]
    under_way = not turn.threads or any(thread.open for thread in threads)
    if turn.due > world.tick and not final and under_way:
        return None
    if threads:
        turn.truth = max((thread.truth for thread in threads), key=_WEIGHT.index)
        turn.asked = sum(thread.asked for thread in threads)
    return TurnFacts(**{name: getattr(turn, name) for name in TurnFacts.__struct_fields__})


_WEIGHT = (ThreadTruth.NONE, ThreadTruth.SOCIAL, ThreadTruth.LEGITIMATE, ThreadTruth.ATTACK)
"""A turn in several threads is judged by the last of these that any of them is."""
