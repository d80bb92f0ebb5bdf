"""Personas are data: short phrases in ``personas.toml``, one for each agent, none doubled within a team.

A persona stands in its own agent's prompt and nowhere else: no name of it reaches another agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice, permutations
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from sparring.errors import ConfigError

Personas = Mapping[str, Sequence[str]]
"""By team: its personas, ``"Name, style."`` each."""


class _Phrase(NamedTuple):
    """A persona in two parts, so that two can be combined."""

    name: str
    style: str


@cache
def builtin_personas() -> Mapping[str, tuple[str, ...]]:
    """The personas in the package, by team.

    >>> sorted(builtin_personas())
    ['blue', 'gray', 'red']
    """
    text = (files("sparring.agents") / "personas.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=dict[str, tuple[str, ...]])


def load_personas(path: str | Path) -> Mapping[str, tuple[str, ...]]:
    """Personas from a TOML file of one's own: for each team a list of phrases.

    Raises:
        ConfigError: The file is missing, is no TOML, or is not lists of texts by team.
    """
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=dict[str, tuple[str, ...]])
    except OSError as error:
        raise ConfigError(f"personas: cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'personas: {path} must hold one list of texts a team, as in blue = ["Mara, calm and brief."]; {error}'
        ) from error


def assign(team: str, seats: int, *, rng: Random, personas: Personas | None = None) -> tuple[str, ...]:
    """One persona a seat, in a random order, none of them twice.

    A team larger than its list gets combined ones besides: the name of one with its own style and the styles of others.

    Args:
        team: Whose personas.
        seats: How many are needed.
        rng: Decides the order; key it by run and episode.
        personas: An environment's or a user's own. They go before the built-in ones of a team of the same name.

    Returns:
        ``seats`` different texts.

    Raises:
        ConfigError: No persona covers the team.

    >>> assign("blue", 2, rng=Random(0), personas={"blue": ["Mara, calm.", "Otis, quick."]})
    ('Mara, calm.', 'Otis, quick.')
    >>> assign("blue", 3, rng=Random(0), personas={"blue": ["Mara, calm.", "Otis, quick."]})[2]
    'Mara, calm, quick.'
    """
    listed = _of_team(team, personas)
    rng.shuffle(listed)
    return tuple(islice(_without_end(listed), seats))


def _of_team(team: str, personas: Personas | None) -> list[str]:
    builtin = builtin_personas()
    own = personas.get(team) if personas is not None else None
    if isinstance(own, str) or (own is not None and not all(isinstance(text, str) for text in own)):
        raise ConfigError(f'personas: team {team!r} needs a list of texts, as in {team} = ["Mara, calm and brief."]')
    found = own or builtin.get(team, ())
    listed = list(dict.fromkeys(text.strip() for text in found if text.strip()))
    if not listed:
        covered = sorted({*builtin, *(personas or {})} - {team})
        raise ConfigError(
            f"no persona covers team {team!r} (covered: {', '.join(covered)}): give the environment "
            f'personas = {{"{team}": ["Mara, calm and brief.", ...]}}, or name a team that is covered'
        )
    return listed


def _without_end(listed: Sequence[str]) -> Iterator[str]:
    """The personas, then every combination of two, of three and so on; at last numbered ones. Never one twice."""
    seen: set[str] = set()
    phrases = [_split(text) for text in listed]
    for size in range(1, len(listed) + 1):
        for chosen in permutations(range(len(listed)), size):
            # The order of added styles makes no new persona.
            if list(chosen[1:]) != sorted(chosen[1:]):
                continue
            text = listed[chosen[0]] if size == 1 else _combined([phrases[index] for index in chosen])
            if text not in seen:
                seen.add(text)
                yield text
    number = 2
    while True:
        for text in listed:
            numbered = f"{text} Number {number}."
            if numbered not in seen:
                seen.add(numbered)
                yield numbered
        number += 1


def _split(text: str) -> _Phrase:
    name, comma, style = text.rstrip(".").partition(", ")
    return _Phrase(name, style) if comma else _Phrase(text.rstrip("."), text.rstrip("."))


def _combined(phrases: Sequence[_Phrase]) -> str:
    first = phrases[0]
    styles = [first.style] if first.style != first.name else []
    return f"{', '.join([first.name, *styles, *(phrase.style for phrase in phrases[1:])])}."
