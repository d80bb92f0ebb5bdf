"""``check_env`` passes what keeps the contract and names, with its fix, whatever does not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from sparring.envs.contract import Env, check_env
from sparring.envs.load import load_env
from sparring.envs.market.world import MarketEnv
from sparring.errors import EnvError
from sparring.types import Outcome, PromptParts, Seat, StepOutcome, TurnId


class Say(msgspec.Struct, frozen=True, tag_field="action", tag="say"):
    number: int


class Pass(msgspec.Struct, frozen=True, tag_field="action", tag="pass"):
    pass


class Seen(msgspec.Struct, frozen=True):
    tick: int
    drawn: int
    total: int


class Facts(msgspec.Struct, frozen=True):
    said: int


class Good:
    """Agents say numbers for four ticks; a turn settles one tick later."""

    name = "good"
    teams: Any = ("left", "right")
    rules: Any = "Say a number."
    team_rules: Any = {"left": "You are left.", "right": ""}  # noqa: RUF012
    action_type: Any = Say | Pass
    facts_type: Any = Facts
    bots: Any = {"one": lambda seen, rng: Say(1), "any": lambda seen, rng: Say(rng.randint(1, 9))}  # noqa: RUF012

    def reset(self, *, seats: Sequence[Seat], seed: int, episode: int) -> None:
        self.state: dict[str, Any] = {
            "agents": [seat.agent for seat in seats], "seed": seed, "episode": episode, "tick": 0, "total": 0, "open": {},
        }  # fmt: skip

    def observe(self) -> Mapping[str, object]:
        s = self.state
        if s["tick"] >= 4:
            return {}
        drawn = Random(f"{s['seed']}/{s['episode']}/{s['tick']}").randint(1, 9)
        return {agent: Seen(tick=s["tick"], drawn=drawn, total=s["total"]) for agent in s["agents"]}

    def render(self, observation: Any, *, newest: int | None = None) -> PromptParts:
        return PromptParts(shared=f"Tick {observation.tick}", private="a\nb" if newest != 0 else "a")

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        s = self.state
        if set(actions) != set(self.observe()):
            raise EnvError("one action of every agent that observes")
        outcomes = self.settle()
        for agent in s["agents"]:
            action = actions[agent]
            s["open"][agent] = action.number if isinstance(action, Say) else 0
        s["total"] += sum(s["open"].values())
        s["tick"] += 1
        done = s["tick"] == 4
        outcomes += self.settle() if done else ()
        return StepOutcome(outcomes=outcomes, truncated=frozenset(s["agents"] if done else ()), done=done)

    def settle(self) -> tuple[Outcome, ...]:
        s = self.state
        settled = tuple(
            Outcome(turn=TurnId(episode=s["episode"], agent=agent, tick=s["tick"] - 1), facts=Facts(said), settled_at=s["tick"])
            for agent, said in s["open"].items()
        )  # fmt: skip
        s["open"] = {}
        return settled

    def snapshot(self) -> Any:
        return msgspec.json.encode(self.state)

    def restore(self, data: bytes) -> None:
        self.state = msgspec.json.decode(data)


def test_a_good_environment_passes_and_is_reported() -> None:
    report = check_env(Good(), seed=3)
    assert (report.env, report.players, report.notes) == ("good", ("bots", "random", "parse_failures", "junk"), ())
    assert report.turns > 100 and report.episodes > 20
    assert report.render().startswith("good keeps the contract: ")


def test_the_market_and_the_example_pass() -> None:
    assert check_env(MarketEnv(), seed=1).turns > 500
    assert check_env(load_env("examples.number_duel:NumberDuel")).players[0] == "bots"


def test_one_without_bots_or_schema_is_tested_as_far_as_can_be_and_told() -> None:
    class NoBots(Good):
        bots = None

    report = check_env(NoBots(), agents_per_team=1)
    assert report.players == ("random", "parse_failures", "junk") and "no bots" in report.notes[0]


# --------------------------------------------------------------------------------------------------- broken ones


def without(member: str) -> Any:
    class Lacks(Good):
        def __getattribute__(self, name: str) -> Any:
            if name == member:
                raise AttributeError(name)
            return super().__getattribute__(name)

    return Lacks()


@pytest.mark.parametrize("member", ["name", "teams", "rules", "team_rules", "action_type", "facts_type", "reset",
                                    "observe", "render", "step", "snapshot", "restore"])  # fmt: skip
def test_a_missing_member_is_named(member: str) -> None:
    with pytest.raises(EnvError, match=f"^{member} is missing: give"):
        check_env(without(member))


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("name", 3, "name must be a short text"),
        ("rules", None, "rules must be a text"),
        ("teams", ["a", "b"], "teams must be a tuple"),
        ("teams", (), "at least one team"),
        ("teams", ("left", "left"), "names a team twice"),
        ("team_rules", {"left": "x"}, "no text for team 'right'"),
        ("team_rules", "left", "team_rules must be a mapping"),
        ("facts_type", "Facts", "facts_type must be a class"),
        ("action_type", Say | msgspec.Struct, "action_type cannot be decoded"),
        ("step", 3, "step cannot be called"),
        ("bots", [1], "bots must be a mapping"),
        ("bots", {"odd": lambda seen, rng: {"action": "shout"}}, "bot 'odd' gave .* which action_type does not take"),
        ("bots", {"bad": lambda seen, rng: 1 / 0}, "bot 'bad' raised ZeroDivisionError"),
        ("personas", {"left": ["x"]}, "personas has no list of texts for team 'right'"),
        ("suite", object(), "suite lacks figures"),
        ("reward", 1.0, "reward must be a function"),
    ],
)
def test_a_wrong_member_is_named(member: str, value: Any, message: str) -> None:
    env = Good()
    setattr(env, member, value)
    with pytest.raises(EnvError, match=message):
        check_env(env)


class KeepsOld(Good):
    def reset(self, **given: Any) -> None:
        total = getattr(self, "state", {"total": 0})["total"]
        super().reset(**given)
        self.state["total"] = total + 1


class GlobalRandom(Good):
    def settle(self) -> tuple[Outcome, ...]:
        return tuple(replace(o, facts=Facts(random.randrange(10**9))) for o in super().settle())


class OrderMatters(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        self.state["total"] = 10 * self.state["total"] + self.state["agents"].index(next(iter(actions)))
        return outcome


class Forgets(Good):
    def reset(self, **given: Any) -> None:
        super().reset(**given)
        self.hidden = 0

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        self.hidden += 1
        outcome = super().step(actions)
        self.state["total"] += self.hidden
        return outcome


class ObserveCounts(Good):
    def observe(self) -> Mapping[str, object]:
        self.state["total"] += 1
        return super().observe()


class ObserveRandom(Good):
    def observe(self) -> Mapping[str, object]:
        return {agent: replace_total(seen, random.randrange(10**9)) for agent, seen in super().observe().items()}

    def render(self, observation: Any, *, newest: int | None = None) -> PromptParts:
        return PromptParts(shared="", private="")


def replace_total(seen: Any, total: int) -> Seen:
    return Seen(tick=seen.tick, drawn=seen.drawn, total=total)


class RenderWrites(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> PromptParts:
        self.state["total"] += 1
        return super().render(observation, newest=newest)


class RenderText(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return "Tick"


class RenderNothing(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return PromptParts(shared="x", private=None)  # type: ignore[arg-type]


class RenderBackwards(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return PromptParts(shared="x", private="long" if newest == 0 else "")


class RenderShort(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return PromptParts(shared="x", private="all" if newest is None else "")


class RenderFails(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return PromptParts(shared="x", private="abc"[: 1 // newest] if newest is not None else "abc")


class SharedDiffers(Good):
    def render(self, observation: Any, *, newest: int | None = None) -> Any:
        return PromptParts(shared=str(id(observation)), private="")


class Strangers(Good):
    def observe(self) -> Mapping[str, object]:
        return {**super().observe(), "ghost": Seen(tick=0, drawn=0, total=0)}


class ObserveList(Good):
    def observe(self) -> Any:
        return list(super().observe().values())


class EmptyEarly(Good):
    def observe(self) -> Mapping[str, object]:
        return {} if self.state["tick"] == 2 else super().observe()


class NeverDone(Good):
    def observe(self) -> Mapping[str, object]:
        s = self.state
        return {agent: Seen(tick=s["tick"], drawn=0, total=0) for agent in s["agents"]}

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return replace(super().step(actions), done=False, truncated=frozenset())


class ObservesOn(Good):
    def observe(self) -> Mapping[str, object]:
        return super().observe() or {"a00": Seen(tick=9, drawn=0, total=0)}


class ChokesOnFailures(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        if set(actions) == set(self.observe()):
            assert all(action.number < 10**9 for action in actions.values() if not isinstance(action, Pass))  # type: ignore[attr-defined]
        return super().step(actions)


class TakesAnybody(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return super().step({agent: actions.get(agent, Pass()) for agent in self.observe()})


class KeyErrors(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return super().step({agent: actions[agent] for agent in self.observe()})


class ChangesFirst(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        self.state["total"] += len(set(actions) - set(self.state["agents"])) + (not actions)
        return super().step(actions)


class SettlesTwice(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        return replace(outcome, outcomes=outcome.outcomes * 2)


class SettlesLess(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        return replace(outcome, outcomes=outcome.outcomes[1:])


class WrongTick(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        moved = tuple(replace(o, turn=replace(o.turn, tick=o.turn.tick + 1)) for o in outcome.outcomes)
        return replace(outcome, outcomes=moved)


class WrongEpisode(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        moved = tuple(replace(o, turn=replace(o.turn, episode=77)) for o in outcome.outcomes)
        return replace(outcome, outcomes=moved)


class WrongFacts(Good):
    def settle(self) -> tuple[Outcome, ...]:
        return tuple(replace(o, facts={"said": 1}) for o in super().settle())


class EarlyFacts(Good):
    def settle(self) -> tuple[Outcome, ...]:
        return tuple(replace(o, settled_at=-1) for o in super().settle())


class NotOutcomes(Good):
    def settle(self) -> Any:
        return tuple(o.facts for o in super().settle())


class StepTuple(Good):
    def step(self, actions: Mapping[str, object]) -> Any:
        return (super().step(actions), 0.0, False)


class NobodyEnds(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return replace(super().step(actions), truncated=frozenset())


class EndsBothWays(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        outcome = super().step(actions)
        return replace(outcome, terminated=outcome.truncated)


class EndsGhost(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return replace(super().step(actions), terminated=frozenset({"ghost"}))


class EndsAndActs(Good):
    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        return replace(super().step(actions), truncated=frozenset({"a00", "a01", "a02", "a03"}))


class SnapshotText(Good):
    def snapshot(self) -> Any:
        return super().snapshot().decode()


class Pickles(Good):
    def snapshot(self) -> Any:
        return b"\x80\x04" + super().snapshot() + b"."


class SnapshotClock(Good):
    calls = 0

    def snapshot(self) -> Any:
        self.calls += 1
        return msgspec.json.encode([self.state, self.calls])


class RestoreNothing(Good):
    def restore(self, data: bytes) -> None:
        pass


class RestoreFails(Good):
    def restore(self, data: bytes) -> None:
        raise ValueError("cannot")


BROKEN: Mapping[type[Good], str] = {
    KeepsOld: "same seats, seed and episode began another episode",
    GlobalRandom: "use no global random numbers",
    OrderMatters: "the order of the mapping .* actions are simultaneous",
    Forgets: r"after restore\(\) at tick .* the episode went on in another way",
    ObserveCounts: r"observe\(\) or render\(\) changed the state|began another episode",
    ObserveRandom: r"observe\(\) twice gave different|began another episode",
    RenderWrites: r"observe\(\) or render\(\) changed the state",
    RenderText: "must return sparring.types.PromptParts, not str",
    RenderNothing: "must give texts",
    RenderBackwards: "newest=0.* is longer",
    RenderShort: "a large number keeps all messages",
    RenderFails: r"render\(observation, newest=0\) raised ZeroDivisionError",
    SharedDiffers: "different shared parts",
    Strangers: "names 'ghost', which has no seat",
    ObserveList: "must return a mapping",
    EmptyEarly: r"observe\(\) is empty in tick 2",
    NeverDone: "does not end",
    ObservesOn: r"observe\(\) names agents after step\(\) said done",
    ChokesOnFailures: r"step\(\) with actions .*ParseFailure.* raised AttributeError",
    TakesAnybody: "without any action went through",
    KeyErrors: "without any action raised KeyError: raise sparring.errors.EnvError",
    ChangesFirst: "raised EnvError but changed the state",
    SettlesTwice: "which is not open: .*settles exactly once",
    SettlesLess: "turns never settled",
    WrongTick: "which is not open",
    WrongEpisode: "settled turn 77/",
    WrongFacts: "facts of type dict, facts_type is Facts",
    EarlyFacts: "settled at -1",
    NotOutcomes: "must hold sparring.types.Outcome",
    StepTuple: "must return sparring.types.StepOutcome, not tuple",
    NobodyEnds: "neither terminated nor truncated",
    EndsBothWays: "both terminated and truncated",
    EndsGhost: "terminated names 'ghost'",
    EndsAndActs: "which step.. called truncated before",
    SnapshotText: "must return bytes, not str",
    Pickles: "returns a pickle",
    SnapshotClock: "twice gave different bytes|began another episode",
    RestoreNothing: "is not data|went on in another way",
    RestoreFails: r"restore\(\) raised ValueError: cannot",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_what_is_broken_is_named(broken: type[Good]) -> None:
    with pytest.raises(EnvError, match=BROKEN[broken]):
        check_env(broken())


def test_a_market_that_is_broken_is_found_too() -> None:
    class Lossy(MarketEnv):
        def step(self, actions: Mapping[str, object]) -> StepOutcome:
            outcome = super().step(actions)
            return replace(outcome, outcomes=outcome.outcomes[:-1])

    with pytest.raises(EnvError, match="never settled"):
        check_env(Lossy())


def test_the_good_one_is_an_env_to_the_type_checker_too() -> None:
    env: Env = Good()
    assert isinstance(env, Env)
