"""Intervals by the bootstrap, resampling whole situations, and the same ones for every player that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.envs.contract import Figure

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its interval.

    >>> Estimate(value=0.5, low=0.4, high=0.6, n=100).excludes_zero
    True
    """

    value: float
    low: float
    """Lower end of the 95 % percentile interval."""
    high: float
    n: int
    """Situations behind it (the smallest number, where a figure multiplies several means)."""

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


class Bootstrap:
    """One set of resamples of the situations of a panel, shared by all players and figures.

    Situations with the same key (twins) are drawn together. Percentile intervals (Efron 1979), 95 %.
    """

    def __init__(self, keys: Sequence[str], *, seed: int, resamples: int = RESAMPLES) -> None:
        self.keys = sorted(set(keys))
        self._index = {key: i for i, key in enumerate(self.keys)}
        self._row_keys = np.array([self._index[key] for key in keys])
        # Situations of one kind (the part of the key before the number) are resampled among themselves.
        kinds = np.array([key.rpartition("-")[0] for key in self.keys])
        rng = np.random.Generator(np.random.Philox(seed))
        weights = np.zeros((resamples, len(self.keys)))
        for kind in sorted(set(kinds.tolist())):
            members = np.flatnonzero(kinds == kind)
            weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=resamples)
        self._weights = weights

    def draws(self, figure: Figure, rows: Sequence[Any]) -> tuple[float, NDArray[np.float64], int]:
        """A player's figure, its value in every resample, and n. ``rows`` are in the order of the keys."""
        value, drawn, least = 1.0, np.ones(len(self._weights)), len(rows)
        for measure in figure.of:
            total, count = self._sums(measure, rows)
            value *= total.sum() / count.sum() if count.sum() else float("nan")
            with np.errstate(invalid="ignore", divide="ignore"):
                drawn = drawn * ((self._weights @ total) / (self._weights @ count))
            least = min(least, int(count.sum()))
        return float(value), drawn, least

    def _sums(
        self, measure: Callable[[Any], float | None], rows: Sequence[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        total, count = np.zeros(len(self.keys)), np.zeros(len(self.keys))
        for index, row in zip(self._row_keys.tolist(), rows, strict=True):
            measured = measure(row)
            if measured is not None:
                total[index] += measured
                count[index] += 1
        return total, count

    def estimate(self, figure: Figure, rows: Sequence[Any]) -> Estimate:
        """A player's figure."""
        value, drawn, n = self.draws(figure, rows)
        return interval(value, drawn, n)

    def difference(self, figure: Figure, rows: Sequence[Any], other: Sequence[Any]) -> Estimate:
        """This player's figure minus the other's, paired by situation."""
        value, drawn, n = self.draws(figure, rows)
        value2, drawn2, n2 = self.draws(figure, other)
        return interval(value - value2, drawn - drawn2, min(n, n2))

    def reduction(self, figure: Figure, rows: Sequence[Any], other: Sequence[Any]) -> Estimate:
        """1 - this player's figure / the other's: 0.4 is 40 % below."""
        value, drawn, n = self.draws(figure, rows)
        value2, drawn2, n2 = self.draws(figure, other)
        with np.errstate(invalid="ignore", divide="ignore"):
            return interval(1 - value / value2 if value2 else float("nan"), 1 - drawn / drawn2, min(n, n2))


def interval(value: float, drawn: NDArray[np.float64], n: int) -> Estimate:
    """A percentile interval; resamples in which the figure is undefined are left out."""
    finite = drawn[np.isfinite(drawn)]
    if not len(finite):
        return Estimate(value=value, low=float("nan"), high=float("nan"), n=n)
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=value, low=float(low), high=float(high), n=n)


def flat(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """``{"x": e}`` as ``{"x": value, "x_low": low, "x_high": high, "x_n": n}``."""
    row: dict[str, float] = {}
    for name, estimate in estimates.items():
        row |= {
            name: estimate.value,
            f"{name}_low": estimate.low,
            f"{name}_high": estimate.high,
            f"{name}_n": estimate.n,
        }
    return row
