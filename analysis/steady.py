"""Where a run becomes steady: the first steps compile, tune and warm up, and they are not what is being measured.

The rule, on the seconds of each step, in order:

1. *first steps*: the reference is the median of the second half, and its spread a robust one (MAD). Leading steps are
   dropped as long as a step, or the median of the five that start with it, lies above the reference by more than
   `SPREADS` spreads (at least 2 %). A single slow step later on is an outlier, not warm-up, and stays.
2. *drift*: while a straight line through what is left changes by more than `DRIFT_Z` standard errors
   (autocorrelation counted) and by `MIN_DRIFT` from end to end, a twentieth of the run more is dropped. Once that has
   happened, steps that are still getting faster are dropped down to `SETTLED_Z`: the tail of a drift is below the noise, and
   yet biases the median.
3. At most half of the steps is dropped for 1 and 2. A run that still differs then has no steady state: its last half is
   used and the row carries the flag `drift`.

A run of fewer than `SHORT` steps loses its first step (first two from five steps on) and is flagged.
"""

import math
from dataclasses import dataclass

import numpy as np

from analysis.stats import median, median_and_scale

SHORT = 8
SPREADS = 4.0
DRIFT_Z = 2.5
SETTLED_Z = 0.5
MIN_DRIFT = 0.005  # half a percent over the run: less does not matter
MIN_TREND = 10  # steps; fewer show no trend


@dataclass(frozen=True)
class Steady:
    """`start` steps are dropped, for the reason `why`; `drifts` where no steady state was reached."""

    start: int
    why: str
    drifts: bool = False


def steady(seconds: np.ndarray) -> Steady:
    """The steady part of a run. `seconds`: positive step times in order, without NaN."""
    n = len(seconds)
    if n < SHORT:
        drop = min(2 if n >= 5 else 1, max(n - 1, 0))
        return Steady(drop, f"{drop} first steps of a short run" if drop else "nothing to drop")
    x = np.log(seconds)
    half = n // 2
    first = _first_steps(x, half)
    start = first
    while _drifting(x[start:], tail=start > first):
        start += max(1, n // 20)
        if start > half:
            return Steady(half, f"still drifting after {half} steps", drifts=True)
    reasons = []
    if first:
        reasons.append(f"{first} first steps (up to {seconds[:first].max() / median(seconds[half:]):.3g}x)")
    if start > first:
        reasons.append(f"{start - first} of drift")
    return Steady(start, " + ".join(reasons) or "none")


def _first_steps(x: np.ndarray, half: int) -> int:
    reference, spread = median_and_scale(x[half:])
    limit = reference + max(SPREADS * spread, 0.02)
    for i in range(half):
        if x[i] <= limit and median(x[i : i + 5]) <= limit:
            return i
    return half


def _drifting(x: np.ndarray, tail: bool) -> bool:
    """Whether a straight line through the (clipped) values rises or falls more than AR(1) noise would make it.

    `tail`: once drift has been found, falling by `SETTLED_Z` is enough.
    """
    n = len(x)
    if n < MIN_TREND:
        return False
    middle, spread = median_and_scale(x)
    spread = spread or float(x.std()) or 1.0
    clipped = np.clip(x - middle, -4 * spread, 4 * spread)
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ clipped / (time @ time))
    if abs(slope) * n < MIN_DRIFT:
        return False
    rest = clipped - clipped.mean() - slope * time
    power = float(rest @ rest)
    if power == 0:
        return True
    rho = float(rest[1:] @ rest[:-1]) / power
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.9)
    error = math.sqrt(power / (n - 2) / float(time @ time) * (1 + rho) / (1 - rho))
    return abs(slope) > DRIFT_Z * error or (tail and -slope > SETTLED_Z * error)
