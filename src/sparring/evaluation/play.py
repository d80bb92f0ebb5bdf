"""``sparring play``: a person takes a seat. Others are a model, a run or a bot; rewards are shown as they come."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TextIO

import torch

from sparring.agents.agent import action_json, parse_action
from sparring.config import PlayConfig
from sparring.envs.contract import Env
from sparring.envs.load import load_env
from sparring.errors import ConfigError, nearest
from sparring.loops.rollout import (
    BotPlayer,
    Decided,
    Player,
    PolicyPlayer,
    Table,
    advance,
    decide,
    open_table,
)
from sparring.rewards.load import RewardFunction, load_reward
from sparring.rundir import find_run
from sparring.runs import is_run, load_policy, run_config
from sparring.types import ParseFailure, PolicyVersion, Reward, SamplingSettings, Turn, TurnId

HELP = "An action as JSON, a bot's name to let it act for you once ({bots}), help, or quit."


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayReport:
    """How the person did."""

    env: str
    team: str
    ticks: int
    settled: int
    """Of the person's turns."""
    reward_total: float
    reward_parts: Mapping[str, float]
    finished: bool
    """The episode ended; else the person left."""

    def render(self) -> str:
        parts = ", ".join(f"{name} {value:+.3f}" for name, value in self.reward_parts.items() if value)
        end = "The episode is over." if self.finished else "You left."
        return f"{end} {self.settled} of your {self.ticks} turns settled, reward {self.reward_total:+.3f} ({parts or 'nothing'})."


def play(config: PlayConfig, *, stdin: TextIO | None = None, stdout: TextIO | None = None) -> PlayReport:
    """One episode with a person in the first seat of ``config.team``; ends with it, with ``quit``, or with the input.

    Args:
        config: Who plays where.
        stdin: Where the person's lines come from; one a decision.
        stdout: Where the person reads.

    Raises:
        ConfigError, ModelError, CheckpointError: Before anything is shown.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    lines, screen = stdin or sys.stdin, stdout or sys.stdout
    env = load_env(config.env, settings=config.env_settings)
    if config.team not in env.teams:
        raise ConfigError(
            f"team is {config.team!r}: {env.name} has {', '.join(env.teams)}{nearest(config.team, env.teams)}"
        )
    players = _others(config, env)
    reward = _reward(config, env)
    table = open_table(env, number=0, episode=0, seed=config.seed, agents_per_team=config.agents_per_team)
    me = next(seat.agent for seat in table.seats if seat.team == config.team)

    def say(text: str) -> None:
        print(text, file=screen, flush=True)

    say("\n".join([env.rules, env.team_rules[config.team], f"Your persona: {table.personas[me]}", _help(env)]))
    parts, settled_count, total = Counter[str](), 0, 0.0
    turns = 0
    while not table.done:
        observations = env.observe()
        action: object = None
        if me in observations:
            shown = env.render(observations[me])
            say(f"\n--- {shown.shared}\n{shown.private}")
            action = _ask(config, table, observations[me], lines, say)
            if action is None:
                break
            turns += 1
            turn = _turn(table, me, config.team, action)
            table.pending[turn.id] = turn
        (decided,) = decide([table], players, SamplingSettings(), seed=config.seed)
        actions = dict(decided.actions) | ({me: action} if me in observations else {})
        for settlement in reward.settle(advance(table, Decided(actions=actions, turns=()), players)):
            settled_count += 1
            total += settlement.reward.total or 0.0
            parts.update(settlement.reward.parts)
            decision = f"tick {settlement.turn.id.tick}, {action_json(settlement.turn.action)}"
            say(f"Settled: your turn of {decision}: {_score(settlement.reward)}")
    return PlayReport(
        env=env.name, team=config.team, ticks=turns, settled=settled_count, reward_total=total, reward_parts=dict(parts),
        finished=table.done,
    )  # fmt: skip


def _reward(config: PlayConfig, env: Env) -> RewardFunction:
    """What a person is shown: the market's outcome reward, or the environment's own, or none where it has none."""
    if config.env == "market":
        return load_reward("outcome")
    if hasattr(env, "reward") or hasattr(env.facts_type, "reward"):
        return load_reward("env", env=env)
    return RewardFunction(name="none", score=lambda turn, outcome: None, catches=False)


def _others(config: PlayConfig, env: Env) -> dict[str, Player]:
    """Who plays the other seats, by team."""
    word, colon, name = config.others.partition(":")
    if word == "bot" and colon:
        bots = getattr(env, "bots", None) or {}
        if name not in bots:
            raise ConfigError(f"others is {config.others!r}: {env.name} has no bot {name!r}{nearest(name, bots)}")
        return dict.fromkeys(env.teams, BotPlayer(name=name, bot=bots[name]))
    options: dict[str, Any] = {"training": False, "device": config.device}
    if is_run(config.others) and run_config(find_run(config.others)).adapters == "per_team":
        return {
            team: PolicyPlayer.of(load_policy(config.others, policy=team, **options), trained=False, remember=True)
            for team in env.teams
        }
    return dict.fromkeys(
        env.teams, PolicyPlayer.of(load_policy(config.others, **options), trained=False, remember=True)
    )


def _ask(config: PlayConfig, table: Table, observation: object, lines: TextIO, say: Any) -> object:
    """The person's action; None when they leave. What is no action is explained, and asked again."""
    env = table.env
    bots = getattr(env, "bots", None) or {}
    while True:
        say("> ")
        line = lines.readline()
        word = line.strip()
        if not line or word in ("quit", "exit"):
            return None
        if not word:
            continue
        if word == "help":
            say(load_env(config.env, rules="full", settings=config.env_settings).rules)
            say(_help(env))
        elif word in bots:
            action: object = bots[word](observation, Random(f"{config.seed}/person/{table.tick}"))
            say(action_json(action))
            return action
        else:
            action = parse_action(word, env.action_type, truncated=False)
            if not isinstance(action, ParseFailure):
                return action
            say(f"That is no action ({action.kind.value}): {action.detail}. {_help(env)}{nearest(word, bots)}")


def _help(env: Env) -> str:
    return HELP.format(bots=", ".join(getattr(env, "bots", None) or {}) or "there are none")


def _turn(table: Table, agent: str, team: str, action: object) -> Turn:
    return Turn(
        id=TurnId(episode=table.episode, agent=agent, tick=table.tick), team=team, policy="person",
        version=PolicyVersion(incarnation=0, step=0), sampling=SamplingSettings(), prompt_ids=(), reply_ids=(),
        log_probs=(), action=action,
    )  # fmt: skip


def _score(reward: Reward) -> str:
    if reward.total is None:
        return "no score"
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in reward.parts.items() if value)
    return f"reward {reward.total:+.3f}" + (f" ({parts})" if parts else "")
