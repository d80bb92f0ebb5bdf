"""A market that others play over the network, without the network: who may act when, what came of which action, and
what is remembered of it. The routes are in ``server``.

Two ways to play. *Simultaneous*: actions are queued, and the tick carries all of them out at once, as ``MarketEnv.step``
does; the same seed and the same actions are the same episode as in process. *Sequential*, for clients of the original
contract, which want to be answered at once: an action is carried out when it comes, in the order of arrival, so that
later agents meet what earlier ones did; all of them still see, and refer to, the tick's beginning. Nobody acts twice in a
tick, and whoever has not acted when it ends waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import blake3

from sparring.envs.market import records as r
from sparring.envs.market.ledger import Ledger
from sparring.envs.market.state import CENTS, Person, WorldState
from sparring.envs.market.threads import cash, keyed, vault
from sparring.envs.market.world import MarketEnv, apply_action, begin_tick, end_tick
from sparring.errors import SparringError
from sparring.types import Outcome, Seat, StepOutcome, TurnId


class UnknownAgentError(SparringError):
    """Nobody of this id plays here."""


class ConflictError(SparringError):
    """Not now: the agent has acted, the tick is another, or the episode is over."""


class EvictedError(SparringError):
    """What came after this number is not all there any more.

    Attributes:
        lost: how many entries are gone.
        resume_after: the number after which everything is there.
    """

    def __init__(self, lost: int, resume_after: int) -> None:
        super().__init__(f"{lost} entries after this one were dropped, the buffer was full")
        self.lost, self.resume_after = lost, resume_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """An action that waits for its tick, or a turn for its settlement."""

    action_id: str
    wire: Mapping[str, object]
    """As it came, for the record."""
    balance: float
    """Credits, when it was decided."""
    reasoning: str | None = None
    action: object = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A turn that settled, with the action it was."""

    outcome: Outcome
    asked: Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a tick brought: what everybody may know, and what settled."""

    tick: int
    settled: tuple[Settled, ...]
    comments: tuple[tuple[str, str], ...]
    """(Handle, text) of what was said in public."""
    closed: tuple[str, ...]
    """Prediction markets that were resolved."""
    prices: tuple[tuple[str, float, float], ...]
    """(Market, before, after): chance of yes, or credits."""
    truncated: frozenset[str]
    done: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Acted:
    """What an action did at once, in sequential play. What follows from it later is told when it settles."""

    refusal: str | None
    """None where it was carried out."""
    profit: float
    """Change of the agent's worth by this action alone, credits: cash, vault and what its positions would bring."""
    cash: float
    observation: r.MarketObservation
    """After it."""
    reports: int
    """Reports upheld against the agent since its last action."""
    replies: int
    """Answers that it got since its last action."""


@dataclass(kw_only=True)
class HostedMarket:
    """One episode of one client.

    Attributes:
        env: the market.
        seats: who plays.
        sequential: actions are carried out as they come.
        queue: actions of this tick, by agent.
        unsettled: what was asked, by turn, until it settles.
    """

    env: MarketEnv
    seats: tuple[Seat, ...]
    seed: int
    episode: int
    sequential: bool
    queue: dict[str, Asked] = field(default_factory=dict)
    unsettled: dict[TurnId, Asked] = field(default_factory=dict)
    _acted: set[str] = field(default_factory=set)
    _seen: Mapping[str, r.MarketObservation] | None = None
    """What everybody saw at the tick's beginning, once somebody has acted."""
    _social: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Reports and tick at an agent's last action."""

    @classmethod
    def begin(cls, env: MarketEnv, seats: Sequence[Seat], *, seed: int, episode: int, sequential: bool) -> HostedMarket:
        """
        Raises:
            EnvError, ConfigError: See ``MarketEnv.reset``.
        """
        env.reset(seats=seats, seed=seed, episode=episode)
        return cls(env=env, seats=tuple(seats), seed=seed, episode=episode, sequential=sequential)

    @classmethod
    def restored(cls, env: MarketEnv, snapshot: bytes) -> HostedMarket:
        """
        Raises:
            EnvError: It is no snapshot.
        """
        env.restore(snapshot)
        world = env.world
        seats = tuple(Seat(agent=agent, team=world.people[agent].team) for agent in world.seats)
        return cls(env=env, seats=seats, seed=world.seed, episode=world.episode, sequential=False)

    @property
    def tick(self) -> int:
        return self.env.world.tick

    @property
    def done(self) -> bool:
        return self.env.world.done

    def digest(self) -> str:
        """Names the state: equal states have equal digests."""
        return blake3.blake3(self.env.snapshot()).hexdigest(length=16)

    def balance(self, agent: str) -> float:
        """Credits in cash."""
        world = self.env.world
        return world.ledger.balance(cash(self._person(agent))) / CENTS

    def observations(self) -> Mapping[str, r.MarketObservation]:
        """What every agent sees in this tick; empty when the episode is over."""
        return self.env.observe() if self._seen is None else self._seen

    def observation(self, agent: str) -> r.MarketObservation:
        """
        Raises:
            UnknownAgentError, ConflictError: Nobody of this id; the episode is over.
        """
        self._person(agent)
        self._goes_on()
        return self.observations()[agent]

    # ------------------------------------------------------------------------------------------------- simultaneous

    def put(self, agent: str, asked: Asked) -> None:
        """Queues an action.

        Raises:
            UnknownAgentError, ConflictError: Nobody of this id; it has one in the queue; the id is in use; it is over.
        """
        self._person(agent)
        self._goes_on()
        if agent in self.queue:
            raise ConflictError(f"{agent} has an action in this tick ({self.queue[agent].action_id}): POST tick first")
        taken = (*self.queue.values(), *self.unsettled.values())
        if any(other.action_id == asked.action_id for other in taken):
            raise ConflictError(f"action id {asked.action_id!r} belongs to another action that has not settled")
        self.queue[agent] = asked

    def missing(self) -> list[str]:
        """Agents without an action in this tick."""
        return [seat.agent for seat in self.seats if seat.agent not in self.queue] if not self.done else []

    def advance(self) -> Moved:
        """Carries the queue out; who has no action in it waits.

        Raises:
            ConflictError: It is over.
        """
        self._goes_on()
        before = _Public.of(self.env.world)
        actions = {seat.agent: r.Wait() for seat in self.seats} | {a: asked.action for a, asked in self.queue.items()}
        self.unsettled |= {self._turn(agent): asked for agent, asked in self.queue.items()}
        outcome = self.env.step(actions)
        self.queue = {}
        return self._moved(before, outcome)

    # --------------------------------------------------------------------------------------------------- sequential

    def act(self, agent: str, asked: Asked) -> Acted:
        """Carries an action out at once.

        Raises:
            UnknownAgentError, ConflictError: Nobody of this id; it has acted in this tick; the episode is over.
        """
        person = self._person(agent)
        self._goes_on()
        if agent in self._acted:
            raise ConflictError(f"{agent} has acted in tick {self.tick}: POST /tick first")
        world = self.env.world
        if self._seen is None:
            self._seen = self.env.observe()
            begin_tick(world)
        reports, since = self._social.get(agent, (0, -1))
        replies = sum(message.replies > 0 and message.delivered > since for message in person.inbox)
        worth = _worth(world, person)
        turn = apply_action(world, agent, asked.action)
        self._acted.add(agent)
        self.unsettled[self._turn(agent)] = asked
        self._social[agent] = (person.reports_upheld, world.tick)
        refusal = None if turn.refusal is None else turn.refusal.value.replace("_", " ")
        return Acted(
            refusal=refusal if turn.parsed or refusal else "not an action",
            profit=(_worth(world, person) - worth) / CENTS, cash=world.ledger.balance(cash(person)) / CENTS,
            observation=self.env.observe()[agent], reports=max(0, person.reports_upheld - reports), replies=replies,
        )  # fmt: skip

    def move_on(self) -> Moved:
        """Ends the tick: who has not acted waits.

        Raises:
            ConflictError: It is over.
        """
        self._goes_on()
        world = self.env.world
        before = _Public.of(world)
        if world.moment is None:
            begin_tick(world)
        late = [agent for agent in world.seats if agent not in self._acted]
        keyed(world, "order").shuffle(late)
        for agent in late:
            apply_action(world, agent, r.Wait())
        self._acted, self._seen = set(), None
        return self._moved(before, end_tick(world))

    # -------------------------------------------------------------------------------------------------------- parts

    def _person(self, agent: str) -> Person:
        person = self.env.world.people.get(agent)
        if person is None or not person.seated:
            raise UnknownAgentError(f"no agent {agent[:60]!r} plays here")
        return person

    def _goes_on(self) -> None:
        if self.done:
            raise ConflictError("the episode is over: POST init or reset")

    def _turn(self, agent: str) -> TurnId:
        return TurnId(episode=self.episode, agent=agent, tick=self.tick)

    def _moved(self, before: _Public, outcome: StepOutcome) -> Moved:
        world = self.env.world
        after = _Public.of(world)
        settled = []
        for one in outcome.outcomes:
            asked = self.unsettled.pop(one.turn, None) or Asked(
                action_id=str(one.turn), wire={"type": "wait"}, balance=0
            )
            settled.append(Settled(outcome=one, asked=asked))
        spoken = (
            world.comments[len(before.comments) :] if world.comments[: len(before.comments)] == before.comments else []
        )
        return Moved(
            tick=world.tick, settled=tuple(settled), comments=tuple(spoken),
            closed=tuple(market for market in before.open if market not in after.open),
            prices=tuple((name, price, after.prices[name]) for name, price in before.prices.items() if name in after.prices),
            truncated=outcome.truncated, done=outcome.done,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Public:
    """What everybody may see of a moment."""

    comments: list[tuple[str, str]]
    open: tuple[str, ...]
    prices: dict[str, float]

    @classmethod
    def of(cls, world: WorldState) -> _Public:
        prices = {market.id: round(market.price_yes(), 4) for market in world.predictions}
        prices |= {market.ticker: market.price / CENTS for market in world.perps}
        return cls(comments=list(world.comments), open=tuple(m.id for m in world.predictions), prices=prices)


def _worth(world: WorldState, person: Person) -> int:
    """Cents: cash, vault, what the shares would be sold for, margins with what they would bring. At the price alone, a
    buyer would seem to have gained what it moved the price by."""
    ledger: Ledger = world.ledger
    total = ledger.balance(cash(person)) + ledger.balance(vault(person))
    sides: tuple[r.Side, ...] = ("yes", "no")
    for market in world.predictions:
        for side in sides:
            total += round(-market.cost(side, -market.shares(person.id, side)))
    for perp in world.perps:
        total += sum(position.margin + perp.unrealised(position) for position in perp.positions_of(person.id))
    return total


class Ring:
    """The newest entries of a numbered record, as bytes. Numbers begin at 1 and are never used again."""

    def __init__(self, most: int) -> None:
        self._kept: deque[bytes] = deque(maxlen=most)
        self.newest = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest(self) -> int:
        """Number of the oldest entry kept; one more than the newest where none is."""
        return self.newest - len(self._kept) + 1

    def append(self, entry: bytes) -> int:
        """Keeps an entry, which drops the oldest where the ring is full; returns its number."""
        self._kept.append(entry)
        self.newest += 1
        return self.newest

    def after(self, number: int, most: int) -> list[bytes]:
        """At most ``most`` entries that follow this number (0: from the beginning), oldest first.

        Raises:
            EvictedError: Some of them are gone.
            ConflictError: The number has not been given yet.
        """
        if number > self.newest:
            raise ConflictError(f"no entry {number} yet, the newest is {self.newest}: it is of another server's life")
        if number + 1 < self.oldest:
            raise EvictedError(lost=self.oldest - number - 1, resume_after=self.oldest - 1)
        begin = number + 1 - self.oldest
        return [self._kept[index] for index in range(begin, min(begin + most, len(self._kept)))]
