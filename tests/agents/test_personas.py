"""Personas: enough of them, short, telling nothing of teams, never doubled."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.agents.personas import assign, builtin_personas, load_personas
from sparring.errors import ConfigError

TEAMS = ("red", "blue", "gray")


@pytest.mark.parametrize("team", TEAMS)
def test_each_team_has_twenty_short_personas(team: str) -> None:
    listed = builtin_personas()[team]
    assert len(listed) >= 20
    assert len(set(listed)) == len(listed)
    for persona in listed:
        assert 3 <= len(persona.split()) <= 7, persona
        assert re.fullmatch(r"[A-Z][a-z]+, [a-z ]+\.", persona), persona


def test_a_name_tells_nothing_of_a_team() -> None:
    names = {team: {persona.split(",")[0] for persona in builtin_personas()[team]} for team in TEAMS}
    assert names["red"] == names["blue"] == names["gray"]


def test_no_persona_names_a_team_or_a_role() -> None:
    words = {word.strip(".,").lower() for team in TEAMS for text in builtin_personas()[team] for word in text.split()}
    assert not words & {"red", "blue", "gray", "grey", "attacker", "defender", "scam", "scammer", "thief", "guard"}


@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("seats", [0, 1, 10, 24, 25, 200, 700])
def test_none_is_doubled_however_large_the_team(team: str, seats: int) -> None:
    dealt = assign(team, seats, rng=Random(1))
    assert len(dealt) == seats == len(set(dealt))


def test_listed_personas_go_first_then_combined_ones() -> None:
    listed = builtin_personas()["blue"]
    dealt = assign("blue", 30, rng=Random(2))
    assert set(dealt[:24]) == set(listed)
    for combined in dealt[24:]:
        name, first, second = combined.rstrip(".").split(", ")
        assert f"{name}, {first}." in listed
        assert any(other.endswith(f", {second}.") for other in listed)


def test_the_rng_alone_decides() -> None:
    assert assign("red", 8, rng=Random(5)) == assign("red", 8, rng=Random(5))
    assert assign("red", 8, rng=Random(5)) != assign("red", 8, rng=Random(6))


def test_an_environments_own_personas_come_before_the_built_in_ones() -> None:
    own = {"red": ["Vim, terse and odd."], "setter": ["Ada, asks hard things."]}
    assert assign("red", 1, rng=Random(0), personas=own) == ("Vim, terse and odd.",)
    assert assign("setter", 1, rng=Random(0), personas=own) == ("Ada, asks hard things.",)
    assert assign("blue", 1, rng=Random(0), personas=own)[0] in builtin_personas()["blue"]


@given(
    listed=st.lists(st.text(st.characters(codec="ascii", categories=("L", "P")), min_size=1), min_size=1, max_size=4),
    seats=st.integers(0, 60),
)
@settings(max_examples=50, deadline=None)
def test_any_list_covers_any_number_of_seats(listed: list[str], seats: int) -> None:
    dealt = assign("own", seats, rng=Random(0), personas={"own": listed})
    assert len(set(dealt)) == seats == len(dealt)


@pytest.mark.parametrize("personas", [None, {}, {"green": []}, {"green": ["  "]}])
def test_a_team_that_no_persona_covers_is_named_with_the_fix(personas: dict[str, list[str]] | None) -> None:
    with pytest.raises(ConfigError, match=r"no persona covers team 'green' \(covered: blue, gray, red\).*personas = "):
        assign("green", 1, rng=Random(0), personas=personas)


def test_a_text_in_place_of_a_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="team 'green' needs a list"):
        assign("green", 1, rng=Random(0), personas={"green": "Mara, calm."})


def test_personas_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('green = ["Mara, calm."]\n')
    assert load_personas(path) == {"green": ("Mara, calm.",)}
    for broken in ('green = "Mara"', "green = [1]", "green ="):
        path.write_text(broken)
        with pytest.raises(ConfigError, match="must hold one list of texts a team"):
            load_personas(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_personas(tmp_path / "none.toml")
