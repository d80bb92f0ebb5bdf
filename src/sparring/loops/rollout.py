"""Playing environments with policies: from observations to pending turns, and from outcomes to settlements.

A ``Table`` is one environment being played, with its seats, personas and turns that wait for their outcome. Any number
of tables are played side by side, so that one batch of prompts serves them all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec

from sparring.agents.agent import build_prompt, parse_action, prompt_messages
from sparring.agents.personas import assign
from sparring.envs.contract import Bot, Env
from sparring.errors import EnvError
from sparring.inference.remote import RemoteChat
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import (
    KeyValueSettings,
    Outcome,
    ParseFailure,
    PolicyVersion,
    SamplingSettings,
    Seat,
    Turn,
    TurnId,
)


@dataclass(frozen=True, kw_only=True)
class PolicyPlayer:
    """A team is played by a model in this process: the policy that learns, or a frozen one."""

    policy: CausalLM
    sampler: InProcessSampler
    trained: bool

    @classmethod
    def of(
        cls, policy: CausalLM, *, trained: bool, remember: bool = False, kv: KeyValueSettings | None = None
    ) -> PolicyPlayer:
        sampler = InProcessSampler(policy, remember=remember, kv=kv)
        return cls(policy=policy, sampler=sampler, trained=trained)


@dataclass(frozen=True, kw_only=True)
class BotPlayer:
    """A team is played by a scripted bot of the environment."""

    name: str
    bot: Bot


@dataclass(frozen=True, kw_only=True)
class RemotePlayer:
    """A team is played by a model behind an OpenAI-compatible endpoint; it is never trained."""

    client: RemoteChat
    rules: str
    """The full rules: a foreign model was never trained on the brief ones."""


Player = PolicyPlayer | BotPlayer | RemotePlayer


@dataclass(kw_only=True)
class Table:
    """One environment being played.

    Attributes:
        env: the environment, somewhere in the middle of ``episode``.
        number: which of the tables; keys nothing.
        episode: number that the table's turns carry, unique in the run; forks of one world have different ones.
        world_episode: the environment's own number of the episode: all forks of a world have the same.
        seats: who sits where.
        personas: text by agent id.
        pending: turns of trained policies that have not settled.
        tick: ticks played in this episode.
        fork_tick: the tick at which the table's copies began to differ; only its turns are trained. None where there
            are no copies: every turn is.
        done: the episode is over.
    """

    env: Env
    number: int
    episode: int
    world_episode: int
    seats: tuple[Seat, ...]
    personas: Mapping[str, str]
    pending: dict[TurnId, Turn] = field(default_factory=dict)
    tick: int = 0
    fork_tick: int | None = None
    done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What every agent of one table decided in one tick."""

    actions: Mapping[str, object]
    turns: tuple[Turn, ...]
    """Turns of policies, trained or frozen; bots and remote models leave none."""


def seat_agents(teams: Sequence[str], agents_per_team: int, *, rng: Random) -> tuple[Seat, ...]:
    """Agent ids a00, a01, ... dealt to the teams at random, so that an id tells nothing."""
    dealt = [team for team in teams for _ in range(agents_per_team)]
    rng.shuffle(dealt)
    return tuple(Seat(agent=f"a{number:02d}", team=team) for number, team in enumerate(dealt))


def open_table(env: Env, *, number: int, episode: int, seed: int, agents_per_team: int) -> Table:
    """Begins an episode: seats, personas and the environment follow from (seed, episode)."""
    rng = Random(f"{seed}/{episode}/seats")
    seats = seat_agents(env.teams, agents_per_team, rng=rng)
    personas: dict[str, str] = {}
    for team in env.teams:
        mine = [seat.agent for seat in seats if seat.team == team]
        texts = assign(team, len(mine), rng=rng, personas=getattr(env, "personas", None))
        personas |= dict(zip(mine, texts, strict=True))
    env.reset(seats=seats, seed=seed, episode=episode)
    return Table(
        env=env, number=number, episode=episode, world_episode=episode, seats=seats, personas=personas
    )  # fmt: skip


def fork(table: Table, envs: Sequence[Env], *, first_episode: int) -> list[Table]:
    """Copies of a table as it stands, one in each of ``envs`` (the table's own may be among them).

    The world's chance is the same in all of them and the agents' replies differ, so what follows differs by what the
    agents did. Copy ``i`` numbers its turns as episode ``first_episode + i``.
    """
    state = table.env.snapshot()
    for env in envs:
        if env is not table.env:
            env.restore(state)
    return [
        replace(table, env=env, episode=first_episode + i, pending={}, fork_tick=table.tick)
        for i, env in enumerate(envs)
    ]


# -------------------------------------------------------------------------------------------------------- deciding


def decide(
    tables: Sequence[Table], players: Mapping[str, Player], settings: SamplingSettings, *, seed: int
) -> list[Decided]:
    """Every agent of every table decides once; all prompts of one policy are answered in one batch.

    A reply's random numbers are keyed by (seed, episode, seat, tick): it does not depend on the batch it was drawn in.
    """
    observations = [table.env.observe() for table in tables]
    actions: list[dict[str, object]] = [{} for _ in tables]
    turns: list[list[Turn]] = [[] for _ in tables]
    waiting: dict[int, tuple[PolicyPlayer, list[_Asked]]] = {}
    for index, (table, seen) in enumerate(zip(tables, observations, strict=True)):
        for place, seat in enumerate(table.seats):
            if seat.agent not in seen:
                continue
            player, observation = players[seat.team], seen[seat.agent]
            if isinstance(player, PolicyPlayer):
                ids = prompt_ids(player.policy, table, seat, observation, settings)
                key = (seed, table.episode, place, table.tick)
                asked = _Asked(index=index, seat=seat, request=SampleRequest(prompt_ids=ids, key=key))
                waiting.setdefault(id(player), (player, []))[1].append(asked)
            elif isinstance(player, BotPlayer):
                rng = Random(f"{seed}/{table.world_episode}/{seat.agent}/{table.tick}")
                actions[index][seat.agent] = player.bot(observation, rng)
            else:
                actions[index][seat.agent] = _ask_remote(player, table, seat, observation, settings, seed)
    for player, asked_of in waiting.values():
        replies = player.sampler.sample([asked.request for asked in asked_of], settings)
        for asked, reply in zip(asked_of, replies, strict=True):
            table = tables[asked.index]
            text = player.policy.chat.decode(reply.token_ids)
            action = parse_action(
                text,
                table.env.action_type,
                truncated=reply.truncated,
                thinking_opened=player.policy.chat.thinking_opened,
            )
            actions[asked.index][asked.seat.agent] = action
            turns[asked.index].append(Turn(
                id=TurnId(episode=table.episode, agent=asked.seat.agent, tick=table.tick), team=asked.seat.team,
                policy=player.policy.name, version=reply.version, sampling=settings,
                prompt_ids=asked.request.prompt_ids, reply_ids=reply.token_ids, log_probs=reply.log_probs, action=action,
            ))  # fmt: skip
    return [Decided(actions=a, turns=tuple(t)) for a, t in zip(actions, turns, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    index: int
    seat: Seat
    request: SampleRequest


def prompt_ids(
    policy: CausalLM, table: Table, seat: Seat, observation: object, settings: SamplingSettings
) -> tuple[int, ...]:
    """The prompt of one agent, tokenised once; shape (P,)."""
    env = table.env
    limit = policy.core.context_length
    return build_prompt(
        policy.chat,
        rules=env.rules,
        team_text=env.team_rules[seat.team],
        persona=table.personas[seat.agent],
        render=lambda newest: env.render(observation, newest=newest),
        max_prompt_tokens=(limit or 1_000_000) - settings.max_new_tokens,
    ).token_ids


def _ask_remote(
    player: RemotePlayer, table: Table, seat: Seat, observation: object, settings: SamplingSettings, seed: int
) -> object:
    env = table.env
    messages = prompt_messages(
        rules=player.rules, team_text=env.team_rules[seat.team], persona=table.personas[seat.agent],
        parts=env.render(observation),
    )  # fmt: skip
    text = player.client.reply(messages, settings, seed=seed)
    return parse_action(text, env.action_type, truncated=False)


# -------------------------------------------------------------------------------------------------------- settling


def advance(table: Table, decided: Decided, players: Mapping[str, Player]) -> list[tuple[Turn, Outcome]]:
    """Applies the actions of one tick. Returns the turns that settled, for a reward function; ``table.done`` tells the
    end.

    Raises EnvError when the environment settles a turn twice, or ends with turns that never settled.
    """
    for turn in decided.turns:
        player = players[turn.team]
        learns = isinstance(player, PolicyPlayer) and player.trained  # of the team: not all of a shared policy's may
        if learns and table.fork_tick in (None, turn.id.tick):
            table.pending[turn.id] = turn
    result = table.env.step(decided.actions)
    table.tick += 1
    settled: list[tuple[Turn, Outcome]] = []
    seen: set[TurnId] = set()
    for outcome in result.outcomes:
        if outcome.turn in seen or outcome.turn.episode != table.world_episode:
            raise EnvError(f"{table.env.name}: turn {outcome.turn} settled twice, or belongs to another episode")
        seen.add(outcome.turn)
        turn_id = replace(outcome.turn, episode=table.episode)
        settled_turn = table.pending.pop(turn_id, None)
        if settled_turn is not None:
            settled.append((settled_turn, replace(outcome, turn=turn_id)))
    table.done = result.done
    if result.done and table.pending:
        never = next(iter(table.pending))
        raise EnvError(f"{table.env.name}: the episode is over and turn {never} has not settled")
    return settled


# ---------------------------------------------------------------------------------------------------------- saving


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A pending turn in a checkpoint; its action is parsed again from the reply it was parsed from."""

    id: TurnId
    team: str
    policy: str
    version: PolicyVersion
    sampling: SamplingSettings
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    truncated: bool


class SavedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table in a checkpoint."""

    number: int
    episode: int
    world_episode: int
    tick: int
    fork_tick: int | None
    done: bool
    seats: tuple[Seat, ...]
    personas: dict[str, str]
    pending: list[SavedTurn]
    env: bytes


def save_turn(turn: Turn) -> SavedTurn:
    truncated = isinstance(turn.action, ParseFailure) and turn.action.kind == "truncated"
    fields = {name: getattr(turn, name) for name in SavedTurn.__struct_fields__ if name != "truncated"}
    return SavedTurn(truncated=truncated, **fields)


def load_turn(saved: SavedTurn, policy: CausalLM, action_type: Any) -> Turn:
    action = parse_action(
        policy.chat.decode(saved.reply_ids),
        action_type,
        truncated=saved.truncated,
        thinking_opened=policy.chat.thinking_opened,
    )
    fields = {name: getattr(saved, name) for name in SavedTurn.__struct_fields__ if name != "truncated"}
    return Turn(action=action, **fields)


def save_table(table: Table) -> SavedTable:
    return SavedTable(
        number=table.number, episode=table.episode, world_episode=table.world_episode, tick=table.tick,
        fork_tick=table.fork_tick, done=table.done, seats=table.seats, personas=dict(table.personas),
        pending=[save_turn(turn) for turn in table.pending.values()], env=table.env.snapshot(),
    )  # fmt: skip


def load_table(saved: SavedTable, env: Env, policies: Mapping[str, CausalLM]) -> Table:
    """A table as it was; ``policies`` by name, for their tokenizers."""
    env.restore(saved.env)
    pending = {turn.id: load_turn(turn, policies[turn.policy], env.action_type) for turn in saved.pending}
    return Table(
        env=env, number=saved.number, episode=saved.episode, world_episode=saved.world_episode, seats=saved.seats,
        personas=saved.personas, pending=pending, tick=saved.tick, fork_tick=saved.fork_tick, done=saved.done,
    )  # fmt: skip


class Stopwatch:
    """Seconds since it was made; the only clock of a loop."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._begin
