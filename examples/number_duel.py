"""A game in 60 lines: ``sparring train shared --env examples.number_duel:NumberDuel --reward env``."""

from random import Random

import msgspec

from sparring.errors import EnvError
from sparring.types import Outcome, PromptParts, StepOutcome, TurnId


class Claim(msgspec.Struct, frozen=True, tag_field="action", tag="claim"):
    number: int


class Seen(msgspec.Struct, frozen=True):
    tick: int
    limit: int


class Facts(msgspec.Struct, frozen=True):
    reward: float  # what `--reward env` trains on


class NumberDuel:
    name, teams, action_type, facts_type = "number_duel", ("left", "right"), Claim, Facts
    rules = 'Claim a number: {"action":"claim","number":1}. The higher one within the limit wins.'
    team_rules = {"left": "You are left.", "right": "You are right."}
    personas = {"left": ["Ola, quick.", "Odo, slow."], "right": ["Eve, calm.", "Emil, loud."]}
    bots = {"best": lambda seen, rng: Claim(seen.limit), "random": lambda seen, rng: Claim(rng.randint(1, 9))}

    def reset(self, *, seats, seed, episode):
        by_team = [[seat.agent for seat in seats if seat.team == team] for team in self.teams]
        self.state = {"pairs": list(zip(*by_team, strict=True)), "seed": seed, "episode": episode, "tick": 0}

    def observe(self):
        pairs, seed, episode, tick = self.state.values()
        seen = Seen(tick, Random(f"{seed}/{episode}/{tick}").randint(2, 9))
        return {agent: seen for pair in pairs for agent in pair if tick < 4}

    def render(self, seen, *, newest=None):
        return PromptParts(shared=f"Tick {seen.tick}, limit {seen.limit}", private="")

    def step(self, actions):
        seen, tick, outcomes = self.observe(), self.state["tick"], []
        if set(actions) != set(seen):
            raise EnvError("step() takes one action of every agent that observes")
        claim = {a: c.number if isinstance(c, Claim) and c.number <= seen[a].limit else 0 for a, c in actions.items()}
        for left, right in self.state["pairs"]:
            for me, rival in ((left, right), (right, left)):
                turn = TurnId(episode=self.state["episode"], agent=me, tick=tick)
                facts = Facts(float(claim[me] > claim[rival]))
                outcomes.append(Outcome(turn=turn, facts=facts, settled_at=tick))
        self.state["tick"] += 1
        return StepOutcome(outcomes=tuple(outcomes), terminated=frozenset(claim if tick == 3 else ()), done=tick == 3)

    def snapshot(self):
        return msgspec.json.encode(self.state)

    def restore(self, data):
        self.state = msgspec.json.decode(data)
