"""Finding a reward by name, and what a user's function may do."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparring.envs.market.records import ThreadTruth, TurnFacts
from sparring.errors import ConfigError, TrainingError
from sparring.rewards.load import load_reward
from sparring.rewards.market import OutcomeWeights
from sparring.types import Outcome, PolicyVersion, Reward, SamplingSettings, Turn, TurnId

ID = TurnId(episode=3, agent="a07", tick=12)
TURN = Turn(
    id=ID, team="blue", policy="shared", version=PolicyVersion(incarnation=1, step=0), sampling=SamplingSettings(),
    prompt_ids=(1,), reply_ids=(2,), log_probs=(-0.1,), action=None,
)  # fmt: skip
REFUSED = TurnFacts(team="blue", action="refuse", parsed=True, truth=ThreadTruth.ATTACK, avoided=5_000)


@dataclass(frozen=True)
class CardFacts:
    reward: float | None


def settled(facts: object) -> Outcome:
    return Outcome(turn=ID, facts=facts, settled_at=14)


def test_the_built_in_rewards_read_the_markets_facts() -> None:
    assert load_reward("outcome")(TURN, settled(REFUSED)).total == pytest.approx(0.15)
    assert load_reward("outcome", weights=OutcomeWeights(scam=1.0))(TURN, settled(REFUSED)).total == pytest.approx(0.5)
    assert load_reward("classic")(TURN, settled(REFUSED)).total == pytest.approx(0.365)
    for name in ("outcome", "classic"):
        with pytest.raises(ConfigError, match=f"{name}.*reads the market's facts.*CardFacts: set reward = 'env'"):
            load_reward(name)(TURN, settled(CardFacts(1.0)))


def test_env_reads_the_facts_own_reward() -> None:
    reward = load_reward("env")
    assert reward(TURN, settled(CardFacts(0.25))) == Reward(total=0.25, parts={"reward": 0.25})
    assert reward(TURN, settled(CardFacts(None))).total is None
    assert reward.unscored == {"returned None": 1}
    with pytest.raises(ConfigError, match="TurnFacts of turn 3/a07/12 has no attribute reward"):
        reward(TURN, settled(REFUSED))


def test_env_takes_the_environments_reward_member_first() -> None:
    by_name = SimpleNamespace(reward="outcome")
    assert load_reward("env", env=by_name)(TURN, settled(REFUSED)).total == pytest.approx(0.15)
    by_function = SimpleNamespace(reward=lambda turn, outcome: len(turn.reply_ids))
    assert load_reward("env", env=by_function)(TURN, settled(REFUSED)).total == 1.0
    with pytest.raises(ConfigError, match="names itself"):
        load_reward("env", env=SimpleNamespace(reward="env"))


@pytest.mark.parametrize(
    ("value", "total"), [(1, 1.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(-2), -2.0), (Reward(total=0.1), 0.1)]
)
def test_what_a_users_function_may_return(value: object, total: float) -> None:
    assert load_reward(lambda turn, outcome: value)(TURN, settled(None)).total == total


@pytest.mark.parametrize("value", ["1", True, [1.0], {"total": 1.0}])
def test_anything_else_is_a_clear_error(value: object) -> None:
    with pytest.raises(ConfigError, match=f"returned {type(value).__name__} for turn 3/a07/12: return a float"):
        load_reward(lambda turn, outcome: value)(TURN, settled(None))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, np.float64("nan"), Reward(total=math.nan), Reward(total=1.0, parts={"a": math.inf})]
)
def test_a_number_that_is_not_finite_stops_the_run(value: object) -> None:
    def judge(turn: Turn, outcome: Outcome) -> object:
        return value

    with pytest.raises(TrainingError, match=r"judge'.*turn 3/a07/12.*finite"):
        load_reward(judge)(TURN, settled(None))


def test_a_function_that_raises_leaves_the_turn_unscored_never_zero() -> None:
    def judge(turn: Turn, outcome: Outcome) -> float:
        raise TimeoutError("the judge\ndid not answer")

    reward = load_reward(judge)
    assert [reward(TURN, settled(None)).total for _ in range(3)] == [None, None, None]
    assert reward.unscored == {"TimeoutError": 3}
    assert reward.examples == {"TimeoutError": "turn 3/a07/12: the judge"}


def test_none_leaves_the_turn_unscored() -> None:
    for value in (None, Reward(total=None)):
        reward = load_reward(lambda turn, outcome, value=value: value)
        assert reward(TURN, settled(None)).total is None
        assert reward.unscored == {"returned None": 1}


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes ``judges_of_mine.py`` into the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "judges_of_mine", raising=False)

    def write(text: str) -> None:
        (tmp_path / "judges_of_mine.py").write_text(text)

    return write


def test_a_function_in_a_module_of_the_working_folder(in_folder: Callable[[str], None]) -> None:
    in_folder(
        "def mine(turn, outcome):\n    return 0.5\n\nclass Judges:\n    strict = staticmethod(mine)\n\nnumber = 3\n"
    )
    assert load_reward("judges_of_mine:mine")(TURN, settled(None)).total == 0.5
    assert load_reward("judges_of_mine:Judges.strict")(TURN, settled(None)).total == 0.5
    with pytest.raises(ConfigError, match=r"judges_of_mine has no 'mime' \(did you mean 'mine'\?\)"):
        load_reward("judges_of_mine:mime")
    with pytest.raises(ConfigError, match="is no function but int"):
        load_reward("judges_of_mine:number")


def test_a_module_that_is_missing_or_breaks(in_folder: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match=r"cannot import no_such_module.*start from the folder"):
        load_reward("no_such_module:mine")
    in_folder("1 / 0\n")
    with pytest.raises(ConfigError, match=r"cannot import judges_of_mine \(ZeroDivisionError"):
        load_reward("judges_of_mine:mine")


@pytest.mark.parametrize("name", ["outcom", "", "nothing"])
def test_an_unknown_name_says_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=r"outcome.*package\.module:function"):
        load_reward(name)


@pytest.mark.parametrize("name", [":mine", "module:"])
def test_half_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must read package\.module:function"):
        load_reward(name)


def test_functions_that_cannot_be_a_reward_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="must take two arguments"):
        load_reward(lambda turn: 1.0)  # type: ignore[arg-type, misc]
    with pytest.raises(ConfigError, match="a name or a function"):
        load_reward(3)  # type: ignore[arg-type]


# A judge: an async reward


OTHER = replace(TURN, id=replace(ID, tick=13))


def test_a_judge_sees_all_turns_of_a_tick_at_the_same_time() -> None:
    inside = most = 0

    async def judge(turn: Turn, outcome: Outcome) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return float(turn.id.tick)

    found = load_reward(judge).settle([(TURN, settled(None)), (OTHER, settled(None))])
    assert [settlement.reward.total for settlement in found] == [12.0, 13.0] and most == 2
    assert load_reward("env", env=SimpleNamespace(reward=judge))(TURN, settled(None)).total == 12.0


def test_a_judge_works_where_an_event_loop_runs_already() -> None:
    async def judge(turn: Turn, outcome: Outcome) -> float:
        return 1.0

    async def notebook() -> float | None:
        return load_reward(judge)(TURN, settled(None)).total

    assert asyncio.run(notebook()) == 1.0


def test_a_judge_that_fails_is_late_or_says_nothing_leaves_a_turn_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparring.rewards.load.JUDGE_SECONDS", 0.05)

    async def judge(turn: Turn, outcome: Outcome) -> float | None:
        if turn.id.tick == 12:
            await asyncio.sleep(5)
        if turn.id.tick == 13:
            raise RuntimeError("no answer")
        return None if turn.id.tick == 14 else 0.5

    reward = load_reward(judge)
    turns = [replace(TURN, id=replace(ID, tick=tick)) for tick in range(12, 16)]
    found = reward.settle([(turn, settled(None)) for turn in turns])
    assert [settlement.reward.total for settlement in found] == [None, None, None, 0.5]
    assert reward.unscored == {"TimeoutError": 1, "RuntimeError": 1, "returned None": 1}


def test_a_judges_number_must_be_finite() -> None:
    async def judge(turn: Turn, outcome: Outcome) -> float:
        return math.nan

    with pytest.raises(TrainingError, match="must be finite"):
        load_reward(judge).settle([(TURN, settled(None))])
