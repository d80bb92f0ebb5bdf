"""The model that ships in the package starts where the README says: valid actions, exact copies, red that can take."""

from __future__ import annotations

import os

import pytest

from sparring.envs.market import records as r
from sparring.envs.market.bots import seed_in
from sparring.envs.market.records import MarketObservation
from sparring.envs.market.situations import MarketSuite
from sparring.envs.market.world import MarketEnv
from sparring.evaluation.panel import play_policy
from sparring.loops.rollout import PolicyPlayer, advance, decide, open_table
from sparring.models import TINY_DIRECTORY, load
from sparring.policies.causal_lm import CausalLM
from sparring.types import SamplingSettings

SETTINGS = SamplingSettings(max_new_tokens=64)


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return load(os.environ.get("SPARRING_TINY", "tiny"), training=False)


def _copies(action: object, seen: MarketObservation) -> list[bool]:
    """For every id or seed that an action names: is it, to the letter, one that the prompt shows?"""
    handles = (
        {g.owner for g in seen.gossip} | {g.counterparty for g in seen.gossip} | {e.counterparty for e in seen.book}
    )
    handles |= (
        {m.sender for m in seen.inbox} | {d.counterparty for d in seen.deals} | {handle for handle, _ in seen.comments}
    )
    found: list[bool] = []
    target = getattr(action, "target", None)
    if target is not None:
        found.append(target in handles)
    if isinstance(action, r.ReplyChat) and (said := seed_in(action.content)):
        found.append(said == seen.secret)
    if isinstance(action, r.Withdraw):
        known = {seen.secret, *(seed for m in seen.inbox if (seed := seed_in(m.content)))}
        found.append(action.secret in known)
    return found


def test_the_start_is_honest(tiny: CausalLM) -> None:
    player = PolicyPlayer.of(tiny, trained=False)
    players = dict.fromkeys(MarketEnv.teams, player)
    tables = [open_table(MarketEnv(), number=i, episode=i, seed=77, agents_per_team=4) for i in range(3)]
    replies = valid = accepted = 0
    copies: list[bool] = []

    for _ in range(8):
        seen = [table.env.observe() for table in tables]
        decided = decide(tables, players, SETTINGS, seed=7)
        for table, shown, one in zip(tables, seen, decided, strict=True):
            for turn in one.turns:
                replies += 1
                valid += turn.valid
                copies += _copies(turn.action, shown[turn.id.agent])  # type: ignore[arg-type]
            advance(table, one, players)
            accepted += sum(person.notice is None for person in table.env.world.people.values() if person.seated)  # type: ignore[attr-defined]
    figures = f"valid {valid / replies:.3f} accepted {accepted / replies:.3f} copies {sum(copies)}/{len(copies)}"
    print(figures)
    assert valid / replies >= 0.90
    assert accepted / replies >= 0.90
    assert len(copies) >= 50
    assert sum(copies) / len(copies) >= 0.95


def test_red_takes_something_from_people_it_has_never_met(tiny: CausalLM) -> None:
    situations = [s for s in MarketSuite().situations(count=160, seed=3) if s.team == "red"]
    rows = play_policy(tiny, situations, SETTINGS, seed=3)
    assert sum(row.taken for row in rows) > 0


def test_it_is_small_and_half_precision() -> None:
    size = sum(file.stat().st_size for file in TINY_DIRECTORY.iterdir())
    assert size <= 10_000_000
