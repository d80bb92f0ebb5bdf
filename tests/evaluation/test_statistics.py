"""Intervals against numbers that are known without any computing."""

from __future__ import annotations

import math

import pytest

from sparring.envs.contract import Figure
from sparring.evaluation.statistics import Bootstrap, Estimate, flat, interval

MEAN = Figure(of=(lambda row: row,), unit="x", higher_is_better=True)


def keys(count: int, kind: str = "blue") -> list[str]:
    return [f"{kind}-{number}" for number in range(count)]


def test_a_difference_is_paired_by_situation() -> None:
    """Each situation is 5 lower: no resample shows anything else, however much situations differ among themselves."""
    start = [float(number * number) for number in range(50)]
    bootstrap = Bootstrap(keys(50), seed=1)
    found = bootstrap.difference(MEAN, [value - 5 for value in start], start)
    assert (found.value, found.low, found.high) == pytest.approx((-5, -5, -5)) and found.n == 50 and found.excludes_zero
    assert bootstrap.estimate(MEAN, start).high - bootstrap.estimate(MEAN, start).low > 100


def test_a_reduction_is_a_ratio_of_means() -> None:
    bootstrap = Bootstrap(keys(10), seed=0)
    start = [float(number + 1) for number in range(10)]
    found = bootstrap.reduction(MEAN, [0.6 * value for value in start], start)
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.4, 0.4))
    nothing = bootstrap.reduction(MEAN, start, [0.0] * 10)
    assert math.isnan(nothing.value)


def test_the_interval_of_a_share_is_that_of_the_textbook() -> None:
    """400 coins, half of them heads: 0.5 +- 1.96 * 0.5 / 20 = 0.451 to 0.549."""
    found = Bootstrap(keys(400), seed=3).estimate(MEAN, [float(number % 2) for number in range(400)])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.451, 0.549), abs=0.006)
    assert found.excludes_zero and not Estimate(value=0.1, low=-0.1, high=0.3, n=4).excludes_zero


def test_twins_are_drawn_together() -> None:
    """+1 and -1 under one key cancel in every resample; under two keys they do not."""
    rows = [1.0, -1.0] * 20
    twins = [f"blue-{number // 2}" for number in range(40)]
    assert (lambda e: (e.low, e.high))(Bootstrap(twins, seed=0).estimate(MEAN, rows)) == (0.0, 0.0)
    assert Bootstrap(keys(40), seed=0).estimate(MEAN, rows).high > 0.2


def test_kinds_keep_their_numbers_in_every_resample() -> None:
    """10 of kind red, all 1, and 30 of kind blue, all 0: 0.25 in every resample."""
    found = Bootstrap([*keys(10, "red"), *keys(30)], seed=0).estimate(MEAN, [1.0] * 10 + [0.0] * 30)
    assert (found.low, found.high) == (0.25, 0.25)


def test_rows_that_do_not_count_and_products() -> None:
    rows = [(1.0, None), (0.0, None), (None, 0.4), (None, 0.4)]
    figure = Figure(of=(lambda row: row[0], lambda row: row[1]), unit="share x share", higher_is_better=True)
    bootstrap = Bootstrap(["a-0", "a-1", "b-0", "b-1"], seed=0)
    found = bootstrap.estimate(figure, rows)
    assert (found.value, found.n) == (pytest.approx(0.5 * 0.4), 2)
    assert (found.low, found.high) == pytest.approx((0.0, 0.4))
    nobody = bootstrap.estimate(Figure(of=(lambda row: None,), unit="", higher_is_better=True), rows)
    assert math.isnan(nobody.value) and math.isnan(nobody.low) and nobody.n == 0


def test_players_share_resamples_and_a_seed_is_one_set() -> None:
    rows = [float(number) for number in range(30)]
    one, same, other = (Bootstrap(keys(30), seed=seed).draws(MEAN, rows)[1] for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any()


def test_undefined_resamples_are_left_out() -> None:
    import numpy as np

    found = interval(1.0, np.array([1.0, np.nan, 3.0, np.inf]), 4)
    assert (found.low, found.high) == pytest.approx((1.05, 2.95))
    assert flat({"x": found}) == {"x": 1.0, "x_low": found.low, "x_high": found.high, "x_n": 4}
