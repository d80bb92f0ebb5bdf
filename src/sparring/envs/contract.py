"""What an environment is. Anything with these members can be trained: built in, or ``package.module:Class``.

An environment knows agents and teams, never models: it gives typed observations, takes typed actions (or a
ParseFailure, when a reply could not be read), and says when a turn has *settled*, with facts. Rewards are computed
from facts elsewhere. Time goes by ticks; all actions of a tick are simultaneous.

Optional members, looked up by name: ``bots`` (scripted players), ``personas`` (a persona text list for each team, for
teams that the built-in personas do not cover), ``suite`` (its evaluation suite), ``reward`` (its own default reward).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sparring.types import PromptParts, Seat, StepOutcome

if TYPE_CHECKING:
    from sparring.envs.check import CheckReport

Bot = Callable[[object, Random], object]
"""A scripted player: (observation, its own random generator) -> action. It sees what a model would see, no more."""


@runtime_checkable
class Env(Protocol):
    """The contract. ``check_env`` tests it.

    Attributes:
        name: short name, for reports.
        teams: the team names.
        rules: text that every agent is told first, in every prompt; the same for all.
        team_rules: what a team is told besides, by team.
        action_type: a type, or a union of tagged ``msgspec.Struct`` types, into which a JSON reply is decoded strictly.
        facts_type: the record of facts that settles a turn.
    """

    name: str
    teams: tuple[str, ...]
    rules: str
    team_rules: Mapping[str, str]
    action_type: object
    facts_type: type

    def reset(self, *, seats: Sequence[Seat], seed: int, episode: int) -> None:
        """Begin an episode. The same (seats, seed, episode) begins the same one."""
        ...

    def observe(self) -> Mapping[str, object]:
        """The observation record of every agent that must act in this tick, by agent id. Empty when done.
        Calling it twice gives the same and changes nothing."""
        ...

    def render(self, observation: object, *, newest: int | None = None) -> PromptParts:
        """An observation as text. ``newest`` keeps only that many of the newest messages, where there are messages;
        None keeps all."""
        ...

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        """Apply one action (or ParseFailure) of every agent that ``observe`` named; raises EnvError on a missing or
        unknown agent. A refused action is an outcome, never an exception."""
        ...

    def snapshot(self) -> bytes:
        """The whole state. No pickle."""
        ...

    def restore(self, data: bytes) -> None:
        """Back to a snapshot: what follows is the same as it would have been."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One headline figure of a suite: a product of means over situations, so that it can be bootstrapped.

    >>> Figure(of=(lambda row: row.lost,), unit="credits", higher_is_better=False).unit
    'credits'
    """

    of: tuple[Callable[[Any], float | None], ...]
    """Each takes a result to a number, or to None where the result does not count; their means are multiplied."""
    unit: str
    higher_is_better: bool


class Suite(Protocol):
    """A fixed panel of situations, the same for every player that is compared.

    Attributes:
        figures: headline figures by name (``snake_case``).

    Optional: ``duels(count=, seed=)``, a list of :class:`Duel`, with ``duel_figure``, the figure of their results, and
    ``headline`` and ``duel_headline``, the figure that names the worst opponent: of the panel's results, and of the
    panel's followed by those of the duels against one opponent.
    """

    figures: Mapping[str, Figure]

    def situations(self, *, count: int, seed: int) -> Sequence[Situation]:
        """At least ``count`` situations; raises ConfigError if the suite cannot make as many."""
        ...


class Situation(Protocol):
    """One decision at a fixed opportunity. Situations of one ``key`` (twins) are resampled together."""

    key: str
    team: str

    def begin(self) -> tuple[Env, str]:
        """A fresh environment that waits for the focal agent, and the focal agent's id."""
        ...

    def finish(self, env: Any, agent: str, action: object) -> Any:
        """Apply the focal agent's action, play on to settlement with common random numbers, and return a record of
        what came of it, for ``Suite.figures``."""
        ...


class Duel(Protocol):
    """A fixed opportunity for one policy to attack another; the results are those of the one attacked."""

    key: str
    team: str
    """Of the agent attacked."""
    attacker_team: str

    def begin(self) -> tuple[Env, str]:
        """A fresh environment that waits for the attacker, and the attacker's id."""
        ...

    def attack(self, env: Any, action: object) -> str:
        """Apply the attacker's action; the environment then waits for the agent whose id is returned."""
        ...

    def finish(self, env: Any, agent: str, action: object) -> Any:
        """As ``Situation.finish``."""
        ...


def check_env(env: Any, *, seed: int = 0, agents_per_team: int = 2) -> CheckReport:
    """Test an environment against the contract; see ``envs.check``.

    Raises:
        EnvError: It breaks the contract; the message names the member and the fix.
    """
    from sparring.envs.check import check_env as check

    return check(env, seed=seed, agents_per_team=agents_per_team)
