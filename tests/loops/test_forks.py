"""Group-relative advantages: k replies to one state, played to settlement with common random numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loop_toys import final_tensors, small
from sparring.errors import ConfigError
from sparring.learning.advantages import CreditedTurn
from sparring.learning.settings import AdvantageSettings
from sparring.loops import shared
from sparring.loops.shared import train_shared
from sparring.types import TurnId

GROUPS: dict[str, Any] = {"kind": "group", "scale": "none", "forks": 3}


@pytest.fixture
def credited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[TurnId, str], tuple[CreditedTurn, ...]]]:
    """Groups and credited turns of every batch."""
    seen: list[tuple[dict[TurnId, str], tuple[CreditedTurn, ...]]] = []
    real = shared.credit

    def spy(settlements: Any, settings: Any, state: Any, *, groups: Any) -> Any:
        found = real(settlements, settings, state, groups=groups)
        assert found[0].dropped == 0
        seen.append((groups, found[0].turns))
        return found

    monkeypatch.setattr(shared, "credit", spy)
    return seen


@pytest.mark.parametrize("settings", [{"env": "loop_toys:LateEnv", "agents_per_team": 2}, {}], ids=["late", "market"])
def test_a_group_is_one_prompt_answered_in_every_fork(
    settings: dict[str, Any], model: str, credited: list[Any]
) -> None:
    config = small(model, min_batch=1, advantages=GROUPS, **settings)
    train_shared(replace(config, ticks=9))
    assert len(credited) >= 2
    trained: set[TurnId] = set()
    for groups, turns in credited:
        members: dict[str, list[CreditedTurn]] = defaultdict(list)
        for turn in turns:
            members[groups[turn.settlement.turn.id]].append(turn)
        for group in members.values():
            assert len(group) == 3
            assert len({turn.settlement.turn.prompt_ids for turn in group}) == 1
            assert len({turn.settlement.turn.id.episode for turn in group}) == 3
            assert abs(sum(turn.advantage for turn in group)) < 1e-6
            rewards = [turn.settlement.reward.total or 0.0 for turn in group]
            mean = sum(rewards) / 3
            for turn, reward in zip(group, rewards, strict=True):
                assert turn.advantage == pytest.approx(reward - mean, abs=1e-6)
        ids = {turn.settlement.turn.id for turn in turns}
        assert not ids & trained
        trained |= ids
    replies = {
        turn.settlement.turn.reply_ids for _, turns in credited for turn in turns
    }  # a random model: forks answer differently
    assert len(replies) > len(trained) / 2


def test_forks_that_act_alike_get_the_same_rewards(model: str, credited: list[Any]) -> None:
    """Common random numbers: the likeliest replies are equal in all forks, so is all that follows from them."""
    config = small(model, min_batch=1, advantages=GROUPS, sampling={"temperature": 1e-6, "max_new_tokens": 8})
    train_shared(replace(config, ticks=8))
    advantages = [turn.advantage for _, turns in credited for turn in turns]
    assert advantages and not any(advantages)


def test_resume_in_the_middle_of_a_round_is_never_having_stopped(model: str) -> None:
    config = small(model, min_batch=1, advantages=GROUPS, checkpoint={"every": 1, "keep": 20})
    whole = train_shared(replace(config, ticks=9, run="whole"))
    for stop in (3, 4, 5):
        part = train_shared(replace(config, ticks=stop, run=f"part{stop}"))
        rest = train_shared(replace(config, ticks=9, run=f"part{stop}"), resume=Path(part.run))
        mine, theirs = final_tensors(Path(whole.run)), final_tensors(Path(rest.run))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_number_of_forks_cannot_change_in_a_resume(model: str) -> None:
    config = small(model, min_batch=1, advantages=GROUPS)
    part = train_shared(replace(config, ticks=2, run="a"))
    other = replace(config, ticks=4, run="a", advantages=AdvantageSettings(kind="group", scale="none", forks=2))
    with pytest.raises(ConfigError, match="cannot change in a resume"):
        train_shared(other, resume=Path(part.run))


def test_forks_without_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantages\.forks"):
        AdvantageSettings(forks=2)
    with pytest.raises(ConfigError, match="at least 2"):
        AdvantageSettings(kind="group", forks=1)
