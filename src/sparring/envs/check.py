"""``check_env``: does an environment keep the contract? It is played by its bots, by random actions, by replies that
were no action, and by things that are no action at all; whatever breaks is named with its fix. No environment is exempt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from sparring.errors import EnvError
from sparring.types import Outcome, ParseFailure, ParseFailureKind, PromptParts, Seat, StepOutcome, TurnId

T = TypeVar("T")
Player = Callable[[str, object, Random], object]
"""(agent, observation, random generator) -> action."""

MOST_TICKS = 10_000
"""An episode that lasts longer is taken not to end."""
FAILURE = ParseFailure(kind=ParseFailureKind.NO_JSON, detail="no '{' in the reply")
MEMBERS: Mapping[str, str] = {
    "name": "a short text", "teams": "a tuple of team names", "rules": "a text for every agent",
    "team_rules": "a mapping from team to text", "action_type": "a type that JSON is decoded into",
    "facts_type": "the class of the facts that settle a turn", "reset": "reset(*, seats, seed, episode)",
    "observe": "observe()", "render": "render(observation, *, newest=None)", "step": "step(actions)",
    "snapshot": "snapshot()", "restore": "restore(data)",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What was tested.

    >>> CheckReport(env="market", episodes=9, ticks=40, turns=240, players=("bots",), notes=()).turns
    240
    """

    env: str
    episodes: int
    ticks: int
    turns: int
    """Decisions, each of which settled exactly once."""
    players: tuple[str, ...]
    """Who played: ``bots``, ``random``, ``parse_failures``, ``junk``."""
    notes: tuple[str, ...]
    """What could not be tested, and why."""

    def render(self) -> str:
        head = (
            f"{self.env} keeps the contract: {self.turns} turns in {self.episodes} episodes ({', '.join(self.players)})"
        )
        return "\n".join([head, *(f"note: {note}" for note in self.notes)])


def check_env(env: Any, *, seed: int = 0, agents_per_team: int = 2) -> CheckReport:
    """Test an environment against ``contract.Env``.

    Args:
        env: The environment; it is reset many times.
        seed: Of the episodes and of the players.
        agents_per_team: Seats in each team.

    Returns:
        What was tested.

    Raises:
        EnvError: It breaks the contract; the message names the member and the fix.
    """
    _check_members(env)
    _check_optional_members(env)
    decoder = _decoder(env.action_type)
    check = _Check(env=env, seed=seed, seats=_seats(env.teams, agents_per_team, seed))
    notes = []
    players: dict[str, Player] = {}
    bots = getattr(env, "bots", None)
    if bots:
        players["bots"] = _bots(bots, decoder)
    else:
        notes.append("it has no bots, so nobody played it well")
    try:
        players["random"] = _random_json(env.action_type, decoder)
    except TypeError as error:
        notes.append(f"no random actions: action_type has no JSON schema ({error})")
    players["parse_failures"] = lambda agent, seen, rng: FAILURE
    players["junk"] = lambda agent, seen, rng: rng.choice((None, 3.5, "wait", {"action": "wait"}, [], object()))
    check.reset_is_deterministic()
    for number, (name, player) in enumerate(players.items()):
        check.plays(name, player, episode=number)
    check.wrong_agents_are_refused()
    return CheckReport(
        env=env.name, episodes=check.episodes, ticks=check.ticks, turns=check.turns, players=tuple(players),
        notes=tuple(notes),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- members


def _broken(message: str, error: BaseException | None = None) -> NoReturn:
    raise EnvError(message) from error


def _check_members(env: Any) -> None:
    for name, what in MEMBERS.items():
        if not hasattr(env, name):
            _broken(f"{name} is missing: give the environment {what}")
        if what.endswith(")") and not callable(getattr(env, name)):
            _broken(f"{name} cannot be called: make it a method, {what}")
    for name in ("name", "rules"):
        if not isinstance(getattr(env, name), str):
            _broken(f"{name} must be {MEMBERS[name]}, not {type(getattr(env, name)).__name__}")
    teams = env.teams
    if not isinstance(teams, tuple) or not teams or not all(isinstance(team, str) and team for team in teams):
        _broken(f"teams must be a tuple of at least one team name, not {teams!r}")
    if len(set(teams)) != len(teams):
        _broken(f"teams names a team twice: {teams!r}")
    if not isinstance(env.team_rules, Mapping):
        _broken("team_rules must be a mapping from team to text")
    for team in teams:
        if not isinstance(env.team_rules.get(team), str):
            _broken(f"team_rules has no text for team {team!r}: add one (it may be empty)")
    if not isinstance(env.facts_type, type):
        _broken(f"facts_type must be a class, not {env.facts_type!r}")


def _check_optional_members(env: Any) -> None:
    bots = getattr(env, "bots", None)
    if bots is not None and not (isinstance(bots, Mapping) and all(callable(bot) for bot in bots.values())):
        _broken("bots must be a mapping from name to a function (observation, random generator) -> action")
    personas = getattr(env, "personas", None)
    if personas is not None:
        for team in env.teams:
            texts = personas.get(team) if isinstance(personas, Mapping) else None
            if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
                _broken(f"personas has no list of texts for team {team!r}: add one, or leave personas out")
    suite = getattr(env, "suite", None)
    for member in ("figures", "situations"):
        if suite is not None and not hasattr(suite, member):
            _broken(f"suite lacks {member} (see sparring.envs.contract.Suite)")
    reward = getattr(env, "reward", None)
    if reward is not None and not callable(reward):
        _broken("reward must be a function of the facts")


def _decoder(action_type: Any) -> msgspec.json.Decoder[Any]:
    try:
        return msgspec.json.Decoder(action_type)
    except (TypeError, ValueError) as error:
        _broken(
            f"action_type cannot be decoded from JSON ({error}): use a msgspec.Struct or a union of tagged ones", error
        )


def _seats(teams: Sequence[str], agents_per_team: int, seed: int) -> tuple[Seat, ...]:
    dealt = [team for team in teams for _ in range(agents_per_team)]
    Random(f"check/{seed}").shuffle(dealt)
    return tuple(Seat(agent=f"a{number:02d}", team=team) for number, team in enumerate(dealt))


# --------------------------------------------------------------------------------------------------------- players


def _bots(bots: Mapping[str, Callable[[Any, Random], object]], decoder: msgspec.json.Decoder[Any]) -> Player:
    """A bot drawn for each decision; its action must read back from JSON, as a model would have written it."""
    names = sorted(bots)

    def play(agent: str, observation: object, rng: Random) -> object:
        name = rng.choice(names)
        action = _call(f"bot {name!r}", bots[name], observation, rng)
        try:
            decoder.decode(msgspec.json.encode(action))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            _broken(f"bot {name!r} gave {action!r}, which action_type does not take ({error}): return an action", error)
        return action

    return play


def _random_json(action_type: Any, decoder: msgspec.json.Decoder[Any]) -> Player:
    """Random actions by the schema, among them extreme numbers, odd texts, and words of the observation."""
    schema = msgspec.json.schema(action_type)

    def play(agent: str, observation: object, rng: Random) -> object:
        value = _draw(schema, schema.get("$defs", {}), rng, _texts(_image(observation)))
        try:
            return decoder.decode(json.dumps(value).encode())
        except msgspec.MsgspecError:
            return FAILURE  # the schema cannot say all that the type wants (a pattern, a __post_init__)

    return play


ODD_TEXTS = ("", "x", "\u200b", "\u202e#47 $40", "\U0001f4b8" * 5, '"}{', "a" * 300, "\x00", "NaN", "-1")


def _draw(node: Mapping[str, Any], defs: Mapping[str, Any], rng: Random, texts: Sequence[str], depth: int = 0) -> Any:
    """A value that a JSON schema allows, for the part of JSON Schema that msgspec writes."""
    if "$ref" in node:
        return _draw(defs[node["$ref"].rpartition("/")[2]], defs, rng, texts, depth + 1)
    if "anyOf" in node:
        return _draw(rng.choice(node["anyOf"]), defs, rng, texts, depth + 1)
    if "enum" in node:
        return rng.choice(node["enum"])
    if "const" in node:
        return node["const"]
    kind = node.get("type")
    if kind == "object":
        required = set(node.get("required", ()))
        fields = node.get("properties", {})
        return {
            name: _draw(field, defs, rng, texts, depth + 1)
            for name, field in fields.items()
            if name in required or rng.random() < 0.5
        }
    if kind == "array":
        if "prefixItems" in node:
            return [_draw(item, defs, rng, texts, depth + 1) for item in node["prefixItems"]]
        least = node.get("minItems", 0)
        count = least + (rng.randrange(3) if depth < 8 else 0)
        return [_draw(node.get("items") or {}, defs, rng, texts, depth + 1) for _ in range(count)]
    if kind == "string":
        text = rng.choice(texts) if texts and rng.random() < 0.6 else rng.choice(ODD_TEXTS)
        return text.ljust(node.get("minLength", 0), "x")[: node.get("maxLength")]
    if kind in ("integer", "number"):
        least = node.get("minimum", node.get("exclusiveMinimum", -(10**6)))
        most = node.get("maximum", node.get("exclusiveMaximum", 10**6))
        if kind == "integer":
            most = max(least, most)
            return rng.choice((least, most, rng.randint(int(least), int(most)), min(int(most), int(least) + 1)))
        return rng.choice((least, most, rng.uniform(least, most), min(most, least + 10), min(most, least + 1e-9)))
    return {"boolean": rng.random() < 0.5, "null": None}.get(cast(str, kind), "x")


def _texts(value: Any) -> list[str]:
    """All texts in an observation."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for part in parts for text in _texts(part)]


# ----------------------------------------------------------------------------------------------------------- playing


@dataclass(kw_only=True)
class _Check:
    """Plays the environment and holds it to the contract."""

    env: Any
    seed: int
    seats: tuple[Seat, ...]
    episodes: int = 0
    ticks: int = 0
    turns: int = 0

    def reset(self, episode: int) -> None:
        _call("reset()", self.env.reset, seats=self.seats, seed=self.seed, episode=episode)
        self.episodes += 1

    def reset_is_deterministic(self) -> None:
        """The same (seats, seed, episode) begins the same episode, also after another one."""
        begun = []
        for episode in (0, 1, 0):
            self.reset(episode)
            begun.append((_image(self.observe()), self.snapshot()))
        if begun[0] != begun[2]:
            _broken("reset() with the same seats, seed and episode began another episode: draw all that is random from "
                    "random.Random((seed, episode) as text), and keep nothing of the episode before")  # fmt: skip

    def plays(self, name: str, player: Player, *, episode: int) -> None:
        """Whole episodes of one kind of player: the same twice, the same whatever the order in which actions are
        handed over, and the same after a restore."""
        first = self.play(player, episode=episode)
        for order, why in (
            (1, "the same actions brought something else the second time: use no global random numbers, no clock and no "
                "set order"),
            (-1, "the order of the mapping that step() takes changed what came of it: actions are simultaneous, so sort "
                 "the agents, or shuffle them by a seed"),
        ):  # fmt: skip
            self.same(first, self.play(player, episode=episode, order=order), f"with {name} {why}")
        self.restores(player, episode=episode, of=len(first), name=name)

    def play(self, player: Player, *, episode: int, order: int = 1, until: int = MOST_TICKS) -> list[Any]:
        """Plays on from a reset to the end (or ``until``); returns an image of each tick."""
        self.reset(episode)
        return self.play_on(player, episode=episode, pending=set(), ended={}, order=order, until=until)

    def play_on(
        self, player: Player, *, episode: int, pending: set[TurnId], ended: dict[str, str], order: int = 1, begin: int = 0,
        until: int = MOST_TICKS,
    ) -> list[Any]:  # fmt: skip
        images: list[Any] = []
        for tick in range(begin, until):
            seen = self.looks(tick)
            actions = {
                agent: player(agent, seen[agent], Random(f"{self.seed}/{episode}/{agent}/{tick}"))
                for agent in sorted(seen)[::order]
            }
            for agent in actions:
                if agent in ended:
                    _broken(f"observe() names {agent!r}, which step() called {ended[agent]} before")
                pending.add(TurnId(episode=episode, agent=agent, tick=tick))
            outcome = _call(f"step() with actions {_brief(actions)}", self.env.step, dict(actions))
            self.takes(outcome, pending, ended, episode=episode, tick=tick)
            images.append((_image(seen), _image(sorted(outcome.outcomes, key=lambda o: o.turn)), outcome.done))
            self.ticks, self.turns = self.ticks + 1, self.turns + len(actions)
            if outcome.done:
                self.has_ended(pending, ended)
                return images
        if until == MOST_TICKS:
            _broken(f"the episode does not end: step() said done=False {MOST_TICKS} times")
        return images

    def observe(self) -> Mapping[str, object]:
        seen = _call("observe()", self.env.observe)
        if not isinstance(seen, Mapping):
            _broken(f"observe() must return a mapping from agent id to observation, not {type(seen).__name__}")
        strangers = sorted(str(agent) for agent in set(seen) - {seat.agent for seat in self.seats})
        if strangers:
            _broken(f"observe() names {strangers[0]!r}, which has no seat: name agents as reset() was given them")
        return seen

    def snapshot(self) -> bytes:
        data = _call("snapshot()", self.env.snapshot)
        if not isinstance(data, bytes):
            _broken(
                f"snapshot() must return bytes, not {type(data).__name__}: encode with msgspec, or json and .encode()"
            )
        if (len(data) > 2 and data[0] == 0x80 and data[1] < 6 and data.endswith(b".")) or data.startswith(OLD_PICKLES):
            _broken(
                "snapshot() returns a pickle, which runs code when it is read: encode the state with msgspec or json"
            )
        return data

    def looks(self, tick: int) -> Mapping[str, object]:
        """Observes and renders; neither may change anything."""
        before = self.snapshot()
        if self.snapshot() != before:
            _broken("snapshot() twice gave different bytes: write nothing but the state, sets sorted")
        seen = self.observe()
        if not seen:
            _broken(f"observe() is empty in tick {tick}, though step() has not said done: empty means that all is over")
        self.renders(seen)
        again = _image(self.observe())
        if self.snapshot() != before:
            _broken("observe() or render() changed the state: they may only look")
        if again != _image(seen):
            _broken("observe() twice gave different observations: return records that compare by value (a msgspec.Struct "
                    "or a dataclass), and draw nothing random there")  # fmt: skip
        return seen

    def renders(self, seen: Mapping[str, object]) -> None:
        shared = set()
        for observation in seen.values():
            parts = {}
            for newest in (None, 0, 1, 1 << 16):
                part = _call(f"render(observation, newest={newest})", self.env.render, observation, newest=newest)
                if not isinstance(part, PromptParts):
                    _broken(f"render() must return sparring.types.PromptParts, not {type(part).__name__}")
                if not isinstance(part.shared, str) or not isinstance(part.private, str):
                    _broken("render() must give texts: PromptParts(shared=..., private=...) of str")
                parts[newest] = part
            if parts[None] != parts[1 << 16]:
                _broken("render(observation, newest=65536) differs from newest=None: a large number keeps all messages")
            if len(parts[0].private) > len(parts[None].private):
                _broken("render(observation, newest=0) is longer than newest=None: fewer messages are never more text")
            shared.add(parts[None].shared)
        if len(shared) > 1:
            _broken("render() gave agents of one tick different shared parts: what only some see belongs into private")

    def takes(self, outcome: object, pending: set[TurnId], ended: dict[str, str], *, episode: int, tick: int) -> None:
        """One step's outcome: known turns, each once, with facts of the right type."""
        if not isinstance(outcome, StepOutcome):
            _broken(f"step() must return sparring.types.StepOutcome, not {type(outcome).__name__}")
        for settled in outcome.outcomes:
            if not isinstance(settled, Outcome) or not isinstance(settled.turn, TurnId):
                _broken("StepOutcome.outcomes must hold sparring.types.Outcome, each of a TurnId")
            turn = settled.turn
            if turn not in pending:
                _broken(f"step() settled turn {turn}, which is not open: a turn is TurnId(episode={episode}, agent=..., "
                        f"tick=<steps since reset, from 0>), and settles exactly once")  # fmt: skip
            pending.remove(turn)
            if not isinstance(settled.facts, self.env.facts_type):
                _broken(f"turn {turn} settled with facts of type {type(settled.facts).__name__}, facts_type is "
                        f"{self.env.facts_type.__name__}")  # fmt: skip
            if type(settled.settled_at) is not int or settled.settled_at < turn.tick:
                _broken(
                    f"turn {turn} settled at {settled.settled_at!r}: settled_at is a tick, not before the turn's own"
                )
        for name in ("terminated", "truncated"):
            for agent in getattr(outcome, name):
                if agent not in {seat.agent for seat in self.seats}:
                    _broken(f"StepOutcome.{name} names {agent!r}, which has no seat")
                if ended.get(agent, name) != name:
                    _broken(f"agent {agent!r} is both terminated and truncated: it is one of the two")
                ended[agent] = name

    def has_ended(self, pending: set[TurnId], ended: Mapping[str, str]) -> None:
        if pending:
            _broken(f"step() said done, but {len(pending)} turns never settled (the first is {min(pending)}): settle all "
                    "that are open in the last step")  # fmt: skip
        missing = sorted({seat.agent for seat in self.seats} - set(ended))
        if missing:
            _broken(f"step() said done, but {missing[0]!r} is neither terminated nor truncated: name each agent once in "
                    "StepOutcome.terminated (ended by the rules) or truncated (cut by a limit)")  # fmt: skip
        if self.observe():
            _broken("observe() names agents after step() said done: it must be empty then")

    def restores(self, player: Player, *, episode: int, of: int, name: str) -> None:
        """What follows a restore is what followed the snapshot, from the beginning, the middle and near the end."""
        for tick in sorted({0, of // 2, max(0, of - 1)}):
            self.reset(episode)
            pending: set[TurnId] = set()
            ended: dict[str, str] = {}
            self.play_on(player, episode=episode, pending=pending, ended=ended, until=tick)
            data = self.snapshot()
            rest = self.play_on(player, episode=episode, pending=set(pending), ended=dict(ended), begin=tick)
            for between in ("the episode's end", "another episode's beginning"):
                if between.startswith("another"):
                    self.reset(episode + 1)
                _call("restore()", self.env.restore, data)
                if self.snapshot() != data:
                    _broken("snapshot() right after restore(data) is not data: put the whole state into the snapshot")
                again = self.play_on(player, episode=episode, pending=set(pending), ended=dict(ended), begin=tick)
                self.same(rest, again, f"after restore() at tick {tick} (from {between}, with {name}) the episode went on "
                          "in another way: put all that step() uses into the snapshot, random generators too")  # fmt: skip

    def wrong_agents_are_refused(self) -> None:
        """A missing or an unknown agent is an error of the caller, and changes nothing."""
        self.reset(0)
        seen = self.observe()
        all_of = dict.fromkeys(seen, FAILURE)
        first = min(seen)
        for what, actions in (
            ("without any action", {}),
            ("without the action of one agent", {agent: move for agent, move in all_of.items() if agent != first}),
            ("with an action of an unknown agent", all_of | {"nobody-sits-here": FAILURE}),
        ):
            before = self.snapshot()
            try:
                self.env.step(actions)
            except EnvError:
                pass
            except Exception as error:
                _broken(
                    f"step() {what} raised {type(error).__name__}: raise sparring.errors.EnvError, and say who", error
                )
            else:
                _broken(
                    f"step() {what} went through: raise sparring.errors.EnvError unless set(actions) == set(observe())"
                )
            if self.snapshot() != before:
                _broken(f"step() {what} raised EnvError but changed the state: check the agents first")

    def same(self, first: list[Any], second: list[Any], why: str) -> None:
        if first == second:
            return
        pairs = zip(first, second, strict=False)
        tick = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
        _broken(f"{why} (first difference {tick} ticks on)")


OLD_PICKLES = (b"(dp0", b"(lp0", b"ccopy_reg\n", b"(dp1", b"(lp1")


def _call(what: str, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Whatever an environment raises, as an EnvError that says where."""
    try:
        return function(*arguments, **keywords)
    except EnvError as error:
        _broken(f"{what} raised EnvError: {error}", error)
    except Exception as error:
        _broken(f"{what} raised {type(error).__name__}: {error}", error)


def _image(value: object) -> Any:
    """A value as plain data that compares by value; what has no value of its own compares by its ``repr``."""
    return msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _brief(actions: Mapping[str, object]) -> str:
    text = repr(dict(actions))
    return text if len(text) <= 200 else text[:197] + "..."
