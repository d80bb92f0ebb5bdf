"""What the actions of a tick refer to: the numbers, handles, groups and blocks that were observed (``state.Moment``)."""

from __future__ import annotations

from sparring.envs.market.records import Refusal
from sparring.envs.market.state import Deal, Message, Moment, Person, WorldState


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


def now(world: WorldState) -> Moment:
    assert world.moment is not None, "actions are applied by MarketEnv.step"
    return world.moment


def shown_message(world: WorldState, person: Person, number: int) -> Message | Refusal:
    """The message that had this number; its thread may have been closed by another action of this tick."""
    shown = now(world).messages[person.id]
    if not 1 <= number <= len(shown):
        return Refusal.UNKNOWN_MESSAGE
    found = next((message for message in person.inbox if message.id == shown[number - 1]), None)
    return Refusal.THREAD_CLOSED if found is None or not world.threads[found.thread].open else found


def shown_deal(world: WorldState, person: Person, number: int) -> Deal | None:
    shown = now(world).deals[person.id]
    deal = world.deals.get(shown[number - 1]) if 1 <= number <= len(shown) else None
    return deal if deal is not None and deal.open and deal.waiting == person.id else None


def named_person(world: WorldState, person: Person, handle: str) -> Person | Refusal:
    target = now(world).people.get(handle)
    if target is None:
        return Refusal.UNKNOWN_TARGET
    return Refusal.SELF_TARGET if target == person.id else world.people[target]


def may_not_write(world: WorldState, person: Person, target: Person | None = None) -> Refusal | None:
    """Why somebody may not speak now, to anybody or to ``target``; None where it may."""
    if person.id in now(world).frozen:
        return Refusal.FROZEN
    return Refusal.BLOCKED if target is not None and has_blocked(world, target, person) else None


def has_blocked(world: WorldState, person: Person, other: Person) -> bool:
    """Whether, at this tick's beginning, ``person`` took no messages from ``other``."""
    seen = now(world)
    return seen.handles[other.id] in seen.blocked.get(person.id, ())
