"""Where a run becomes steady: the first steps compile, tune and warm up, and they are not what is being measured.

The rule, on the seconds of each step, in order:

1. *first steps*: the reference is the median of the second half, and its spread a robust one (MAD). Leading steps are
   dropped as long as a step, or the median of the five that start with it, lies above the reference by more than
   `SPREADS` spreads (at least 2 %). A single slow step later on is an outlier, not warm-up, and stays.
2. *drift*: while the first quarter of what is left differs from its last half by more than `DRIFT_Z` standard errors
   (autocorrelation counted, see analysis.stats) and by 0.5 %, a twentieth more is dropped.
3. At most half of the steps is dropped for 1 and 2. A run that still differs then has no steady state: its last half is
   used and the row carries the flag `drift`.

A run of fewer than `SHORT` steps loses its first step (first two from five steps on) and is flagged.
"""

from dataclasses import dataclass

import numpy as np

from analysis.stats import estimate, robust_scale

SHORT = 8
SPREADS = 4.0
DRIFT_Z = 3.0


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
    while _drifting(x[start:]):
        start += max(1, n // 20)
        if start > half:
            return Steady(half, f"still drifting after {half} steps", drifts=True)
    reasons = []
    if first:
        reasons.append(f"{first} first steps (up to {seconds[:first].max() / np.median(seconds[half:]):.3g}x)")
    if start > first:
        reasons.append(f"{start - first} of drift")
    return Steady(start, " + ".join(reasons) or "none")


def _first_steps(x: np.ndarray, half: int) -> int:
    reference = np.median(x[half:])
    limit = reference + max(SPREADS * robust_scale(x[half:]), 0.02)
    for i in range(half):
        if x[i] <= limit and np.median(x[i : i + 5]) <= limit:
            return i
    return half


def _drifting(x: np.ndarray) -> bool:
    """First quarter against last half."""
    if len(x) < 12:
        return False
    early, late = estimate(x[: len(x) // 4], logged=True), estimate(x[len(x) // 2 :], logged=True)
    difference = abs(early.log_median - late.log_median)
    return difference > 0.005 and difference > DRIFT_Z * np.hypot(early.standard_error, late.standard_error)
