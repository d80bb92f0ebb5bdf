"""Does honest business pay more than every way to farm the market? (rule 9 of the market)

Each farmer takes the seats of one team and plays the same episodes as the honest bot does there: same seed, same seats,
same random numbers for everybody else (blue and gray are honest, red attacks). Compared is the mean reward of the team's
turns over an episode, by the default reward ``outcome``; intervals are 95 %, bootstrapped over paired episodes.

Usage: python benchmarks/farmers.py [--episodes 100] [--agents-per-team 2] [--seed 0]
The last line is one JSON object: ``ratio`` is the smallest lower bound of all differences (above 0: honest wins).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from random import Random
from typing import Any

import numpy as np

from sparring.envs.contract import Bot
from sparring.envs.market.bots import BOTS, FARMERS
from sparring.envs.market.records import TurnFacts
from sparring.envs.market.world import TEAMS, MarketEnv
from sparring.rewards.market import outcome
from sparring.types import Seat

OTHERS = {"red": "attacker", "blue": "honest", "gray": "honest"}
"""Who sits in the seats of the other teams."""
RESAMPLES = 2_000


def team_reward(team: str, bot: Bot, *, episode: int, seed: int, agents_per_team: int) -> float:
    """Reward that one seat of the team earns in an episode, on average, with ``bot`` in all of its seats."""
    teams = [name for name in TEAMS for _ in range(agents_per_team)]
    Random(f"{seed}/{episode}/seats").shuffle(teams)
    seats = [Seat(agent=f"a{number:02d}", team=name) for number, name in enumerate(teams)]
    env = MarketEnv()
    env.reset(seats=seats, seed=seed, episode=episode)
    players = {seat.agent: bot if seat.team == team else BOTS[OTHERS[seat.team]] for seat in seats}
    rewards: list[float] = []
    done = False
    while not done:
        step = env.step({
            agent: players[agent](seen, Random(f"{seed}/{episode}/{agent}/{seen.tick}"))
            for agent, seen in env.observe().items()
        })  # fmt: skip
        done = step.done
        facts = [settled.facts for settled in step.outcomes]
        rewards += [outcome(f).total or 0.0 for f in facts if isinstance(f, TurnFacts) and f.team == team]
    return math.fsum(rewards) / agents_per_team


def compare(
    *,
    episodes: int,
    seed: int,
    agents_per_team: int,
    farmers: Mapping[str, Bot] = FARMERS,
    teams: Sequence[str] = TEAMS,
) -> list[dict[str, Any]]:
    """One row a team and farmer: what both earn in an episode, the difference, and its interval."""

    def play(team: str, bot: Bot) -> np.ndarray:
        return np.array([
            team_reward(team, bot, episode=episode, seed=seed, agents_per_team=agents_per_team)
            for episode in range(episodes)
        ])  # fmt: skip

    rows = []
    for team in teams:
        honest = play(team, BOTS["honest"])
        for name, bot in farmers.items():
            farmed = play(team, bot)
            low, high = interval(honest - farmed, seed=seed)
            rows.append({
                "team": team, "farmer": name, "honest": float(honest.mean()), "farmed": float(farmed.mean()),
                "difference": float((honest - farmed).mean()), "low": low, "high": high,
            })  # fmt: skip
    return rows


def interval(differences: np.ndarray, *, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of paired differences, shape (episodes,)."""
    picks = np.random.default_rng(seed).integers(0, len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description="The honest bot against every farmer, in the seats of each team.")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--agents-per-team", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = compare(episodes=options.episodes, seed=options.seed, agents_per_team=options.agents_per_team)
    print(f"{'team':5} {'farmer':14} {'honest':>8} {'farmer':>8} {'honest - farmer, 95 %':>28}")
    for row in rows:
        bounds = f"[{row['low']:+.3f}, {row['high']:+.3f}]"
        print(
            f"{row['team']:5} {row['farmer']:14} {row['honest']:8.3f} {row['farmed']:8.3f} {row['difference']:+9.3f} {bounds}"
        )
    worst = min(rows, key=lambda row: row["low"])
    print(json.dumps({
        "name": "farmers", "n": options.episodes, "agents_per_team": options.agents_per_team,
        "ratio": round(worst["low"], 6), "ours": round(worst["honest"], 6), "theirs": round(worst["farmed"], 6),
        "closest": f"{worst['team']}/{worst['farmer']}", "honest_beats_all": all(row["low"] > 0 for row in rows),
        "differences": {
            f"{row['team']}_{row['farmer']}": [round(row[key], 4) for key in ("difference", "low", "high")] for row in rows
        },
        "versions": {"sparring": version("sparring"), "python": platform.python_version(), "numpy": np.__version__},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
