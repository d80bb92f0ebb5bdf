"""What a quick suite found, by situation, and how two results compare: no torch, so that pointers and servers can read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparring.envs.contract import Figure
from sparring.evaluation.statistics import Bootstrap, Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteFigure:
    """One figure of a quick suite, by situation, so that two results can be compared in pairs.

    >>> SuiteFigure(measures=((1.0, 0.0, None),), higher_is_better=True, unit="share").value
    0.5
    """

    measures: tuple[tuple[float | None, ...], ...]
    """The figure is the product of the means of these; each has an entry for every situation of the panel, None where
    the situation does not count."""
    higher_is_better: bool
    unit: str

    @property
    def value(self) -> float:
        """Not a number where nothing counted."""
        product = 1.0
        for measure in self.measures:
            counted = [number for number in measure if number is not None]
            product *= sum(counted) / len(counted) if counted else math.nan
        return product


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult:
    """How one checkpoint did on the quick suite (``evaluation.quick``).

    >>> SuiteResult(checkpoint="ab", panel="cd", keys=("probe-0",), figures={}, seconds=0.1).panel
    'cd'
    """

    checkpoint: str
    """BLAKE3 of the checkpoint's ``manifest.json``: the result is of these weights and of no others."""
    panel: str
    """Names the panel: results of different panels are never compared."""
    keys: tuple[str, ...]
    """Of the situations, in order. Twins share a key; the part before the last ``-`` is the kind (see ``Bootstrap``)."""
    figures: Mapping[str, SuiteFigure]
    seconds: float
    """That it took."""


def compare(candidate: SuiteResult, other: SuiteResult) -> dict[str, Estimate]:
    """Candidate minus other, by figure, paired by situation; both of one panel."""
    bootstrap = Bootstrap(candidate.keys, seed=0)
    found = {}
    for name, figure in candidate.figures.items():
        mine, theirs = figure.measures, other.figures[name].measures
        rows = [tuple(measure[place] for measure in mine) for place in range(len(candidate.keys))]
        others = [tuple(measure[place] for measure in theirs) for place in range(len(candidate.keys))]
        of = tuple(_part(number) for number in range(len(mine)))
        shape = Figure(of=of, unit=figure.unit, higher_is_better=figure.higher_is_better)
        found[name] = bootstrap.difference(shape, rows, others)
    return found


def _part(number: int) -> Callable[[Any], float | None]:
    return lambda row: row[number]


def not_worse(change: Estimate, *, higher_is_better: bool) -> bool:
    """False, too, where the interval is not a number."""
    return change.high >= 0.0 if higher_is_better else change.low <= 0.0


def shown(name: str, change: Estimate) -> str:
    return f"{name} {change.value:+.4g} ({change.low:+.4g} to {change.high:+.4g})"
