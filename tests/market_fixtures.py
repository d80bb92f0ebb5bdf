"""Playing the market by hand: a quiet world, where nothing happens but what a test does."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from sparring.envs.market import records as r
from sparring.envs.market.language import Family, families
from sparring.envs.market.records import InboxMessage, MarketObservation, TurnFacts
from sparring.envs.market.residents import attackers, honest_request, residents, scripted_attack
from sparring.envs.market.state import Person, Thread
from sparring.envs.market.threads import cash, vault
from sparring.envs.market.world import MarketEnv, deliver
from sparring.types import Seat, StepOutcome

RED, BLUE, GRAY, RED2, BLUE2 = "a03", "a01", "a04", "a00", "a02"
SEATS = tuple(
    Seat(agent=agent, team=team)
    for agent, team in ((RED2, "red"), (BLUE, "blue"), (BLUE2, "blue"), (RED, "red"), (GRAY, "gray"))
)
QUIET: Mapping[str, Any] = {
    "request_rate": 0.0, "deal_rate": 0.0, "scripted_attackers": 0, "red_sender_share": 1.0, "ticks": 30,
}  # fmt: skip
PAY = next(family for family in families("train") if family.ask == "pay")
SECRET = next(family for family in families("train") if family.ask == "secret")


class Play:
    """An episode under way, with the facts of all turns that have settled."""

    def __init__(self, *, seed: int = 0, episode: int = 0, seats: tuple[Seat, ...] = SEATS, **settings: Any) -> None:
        self.env = MarketEnv(**{**QUIET, **settings})
        self.env.reset(seats=seats, seed=seed, episode=episode)
        self.world_seats = [seat.agent for seat in seats]
        self.facts: dict[tuple[str, int], TurnFacts] = {}
        self.settled_at: dict[tuple[str, int], int] = {}

    @property
    def world(self) -> Any:
        return self.env.world

    def person(self, agent: str) -> Person:
        found: Person = self.world.people[agent]
        return found

    def handle(self, agent: str) -> str:
        return self.person(agent).handle

    def secret(self, agent: str) -> str:
        return "-".join(self.person(agent).canary.words)

    def sees(self, agent: str) -> MarketObservation:
        return self.env.observe()[agent]

    def message(self, agent: str) -> InboxMessage:
        """The newest message of an agent."""
        return self.sees(agent).inbox[-1]

    def cash(self, agent: str) -> int:
        """Cents."""
        cents: int = self.world.ledger.balance(cash(self.person(agent)))
        return cents

    def vault(self, agent: str) -> int:
        cents: int = self.world.ledger.balance(vault(self.person(agent)))
        return cents

    def do(self, actions: Mapping[str, object] | None = None) -> StepOutcome:
        """One tick; who is not named waits."""
        moves: dict[str, object] = {agent: r.Wait() for agent in self.world_seats}
        step = self.env.step(moves | dict(actions or {}))
        for settled in step.outcomes:
            key = (settled.turn.agent, settled.turn.tick)
            assert key not in self.facts, "settled twice"
            assert isinstance(settled.facts, TurnFacts)
            self.facts[key], self.settled_at[key] = settled.facts, settled.settled_at
        return step

    def act(self, agent: str, action: object) -> int:
        """One tick with one action; returns its tick."""
        tick: int = self.world.tick
        self.do({agent: action})
        return tick

    def result(self, agent: str, action: object) -> TurnFacts:
        """Acts, and plays on until that turn has settled."""
        tick = self.act(agent, action)
        while (agent, tick) not in self.facts:
            self.do()
        return self.facts[agent, tick]

    def finish(self) -> None:
        while not self.world.done:
            self.do()

    # what may come to an agent

    def honest(self, agent: str, family: Family = PAY, *, seed: int = 0) -> Thread:
        thread = honest_request(self.world, self.person(agent), Random(seed), family=family)
        assert thread is not None
        deliver(self.world)
        return thread

    def attack(self, agent: str, family: Family = PAY, *, twist: str = "no_entry", seed: int = 0) -> Thread:
        """Needs ``scripted_attackers``."""
        scammer = attackers(self.world)[0]
        thread = scripted_attack(
            self.world, scammer, self.person(agent), Random(seed), family=family, twist=twist, words=Random(seed)
        )
        deliver(self.world)
        return thread

    def red_writes(self, text: str = "order #11 is shipped, please pay $40", *, to: str = BLUE, red: str = RED) -> int:
        """A red seat opens a thread; returns its tick. The target reads it in the next."""
        return self.act(red, r.SendMessage(target=self.handle(to), content=text))

    def resident(self, temper: str | None = None) -> Person:
        return next(p for p in residents(self.world) if temper in (None, p.temper))


def state_of(env: MarketEnv) -> Any:
    """The whole state but notices, as plain data."""
    state = msgspec.to_builtins(env.world)
    for person in state["people"].values():
        person["notice"] = None
    return state
