"""Steady state, medians, intervals and ties against sweeps whose truth is known."""

import math

import numpy as np
import pytest
from synth import Point, step_times

from analysis.stats import estimate, settling, t975, variance_inflation
from analysis.steady import steady


def sweep(seed: int, count: int = 1000, **planted):
    """Points of 20 to 60 steps with random autocorrelation, and whatever else is planted."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        chosen = {"steps": int(rng.integers(20, 61)), "phi": rng.uniform(0, 0.7), "seed": int(rng.integers(2**31))}
        yield Point(**(chosen | planted))


def covered(point: Point) -> bool:
    """Whether the interval of tokens/s, after the steady-state rule, holds the truth."""
    seconds = step_times(point)
    rate = point.micro_batch * 2048 * point.nproc / seconds[steady(seconds).start :]
    fit = estimate(rate)
    return abs(fit.log_median - math.log(point.rate)) <= fit.half


def coverage(seed: int, **planted) -> float:
    return float(np.mean([covered(point) for point in sweep(seed, **planted)]))


@pytest.mark.parametrize(
    ("planted", "seed"),
    [
        ({}, 1),
        ({"outliers": 0.03}, 2),
        ({"drift": (0.1, 3)}, 3),
        ({"outliers": 0.03, "drift": (0.05, 3)}, 4),
        ({"drift": (0.05, 5)}, 5),
    ],
    ids=["warm-up and autocorrelation", "outliers", "drift", "everything", "drift that hides in the noise"],
)
def test_intervals_cover_the_truth_in_93_to_97_percent(planted, seed):
    assert 0.93 <= coverage(seed, **planted) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize(
    "planted",
    [
        {"phi": 0.0}, {"phi": 0.3}, {"phi": 0.5}, {"phi": 0.7},
        {"steps": 20}, {"steps": 40}, {"steps": 60}, {"steps": 200},
        {"noise": 0.001}, {"noise": 0.05}, {"noise": 0.2}, {"warmup": ()},
        {"outliers": 0.05}, {"outliers": 0.1}, {"drift": (0.3, 4)},
        {"drift": (0.2, 5)}, {"drift": (0.1, 5)}, {"drift": (0.03, 5)}, {"drift": (0.02, 5)},
    ],
    ids=str,
)  # fmt: skip
def test_coverage_holds_in_every_corner(planted, seed):
    """A single corner of 1,000 may miss 93 to 97 by chance of the draw (0.7 % is one standard error)."""
    assert 0.92 <= coverage(seed, **planted) <= 0.98


def test_a_plain_interval_would_not_cover():
    """The same sweeps with autocorrelation left out: the test above can fail."""
    missed = 0
    for point in sweep(5, count=400, phi=0.6):
        seconds = step_times(point)
        x = np.log(seconds[steady(seconds).start :])
        half = 1.96 * math.sqrt(math.pi / 2) * x.std(ddof=1) / math.sqrt(len(x))
        missed += abs(np.median(x) - math.log(point.micro_batch * 2048 * point.nproc / point.rate)) > half
    assert missed / 400 > 0.15


@pytest.mark.parametrize("steps", [20, 40, 60, 500])
@pytest.mark.parametrize("warmup", [(), (3.0,), (30.0, 2.0, 1.5), (8.0,) + (1.3,) * 6])
def test_planted_warm_up_is_dropped_and_little_else(steps, warmup):
    found = [steady(step_times(Point(steps=steps, warmup=warmup, seed=seed, noise=0.01))).start for seed in range(40)]
    assert min(found) >= len(warmup)
    assert np.median(found) == len(warmup)
    assert np.mean(found) <= len(warmup) + 0.05 * steps


def test_the_rule_says_how_many_and_why():
    found = steady(step_times(Point(steps=40, warmup=(20.0, 3.0), seed=1)))
    assert found.start == 2
    assert found.why.startswith("2 first steps (up to ") and "x)" in found.why
    assert steady(step_times(Point(steps=40, warmup=(), seed=1))).why == "none"


def test_an_outlier_in_the_middle_is_not_warm_up():
    seconds = step_times(Point(steps=60, warmup=(5.0,), seed=3))
    seconds[20] *= 40
    assert steady(seconds).start == 1


def test_decaying_drift_is_dropped():
    seconds = step_times(Point(steps=200, warmup=(5.0,), drift=(0.3, 8), noise=0.005, seed=4))
    found = steady(seconds)
    assert 15 <= found.start <= 60 and not found.drifts
    assert abs(np.median(seconds[found.start :]) / (4 * 2048 * 2 / 50_000) - 1) < 0.005


def test_drift_that_hides_in_the_noise_widens_the_interval():
    """One that settles is told from one that does not: the same values in reverse, getting slower, have no such tail."""
    noise = np.random.default_rng(6).normal(size=40) * 0.01
    flat, falling = estimate(np.exp(noise)), estimate(np.exp(noise - 0.02 * np.exp(-np.arange(40) / 5)))
    z = noise - noise.mean()
    tail = z - 0.02 * (np.exp(-np.arange(40) / 5) - 0.124)
    assert settling(z) == 0 and settling(z[::-1]) == 0
    assert 0.001 < settling(tail) < 0.006 and settling(tail[::-1]) == 0
    assert falling.half > 1.2 * flat.half
    assert settling(z[:9]) == 0, "nine steps show no trend"


def test_a_run_that_never_settles_says_so():
    rising = step_times(Point(steps=60, noise=0.003, seed=5)) * np.linspace(1, 1.3, 60)
    found = steady(rising)
    assert found.drifts and found.start == 30 and "drifting" in found.why


@pytest.mark.parametrize(("steps", "dropped"), [(1, 0), (2, 1), (4, 1), (5, 2), (7, 2)])
def test_short_runs(steps, dropped):
    assert steady(np.full(steps, 0.5)).start == dropped


def test_equal_times_have_no_width():
    fit = estimate(np.full(30, 2.0))
    assert fit.half == 0 and fit.log_median == math.log(2.0)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0]])
def test_one_or_two_steps_have_no_interval(values):
    assert estimate(np.array(values)).half == math.inf


@pytest.mark.parametrize(  # Student's t, 97.5 %, from printed tables
    ("df", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_quantiles(df, value):
    assert t975(df) == pytest.approx(value, abs=6e-4)


def test_quantile_is_smooth_between_one_and_three():
    values = [t975(df) for df in np.arange(1, 3.01, 0.05)]
    assert all(a > b for a, b in zip(values, values[1:], strict=False))


@pytest.mark.parametrize(("rho", "n"), [(0.0, 10), (0.3, 5), (0.7, 40), (0.95, 15)])
def test_variance_inflation_is_the_sum_it_stands_for(rho, n):
    direct = 1 + 2 * sum((1 - k / n) * rho**k for k in range(1, n))
    assert variance_inflation(rho, n) == pytest.approx(direct)
