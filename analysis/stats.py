"""A median with a 95 % interval that respects autocorrelation, and what follows from it: repeats, ratios, ties."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MEDIAN_FACTOR = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, normal data
CLIP = 3.0  # robust spreads beyond which a value counts as an outlier
SETTLING = 8.0  # a trend that dies out is looked for with a time constant of this part of the run
SETTLING_Z = 1.28  # noise alone goes beyond it in one run of ten
MIN_SETTLING = 10  # steps; fewer show no trend
MAX_RHO = 0.95  # beyond it a run of this length says next to nothing about the spread


@dataclass(frozen=True)
class Estimate:
    """Median of positive data, on the logarithm; `half` is the half-width of its 95 % interval there."""

    log_median: float
    standard_error: float
    df: float  # degrees of freedom of the standard error
    n: int
    rho: float  # lag-one autocorrelation

    @property
    def half(self) -> float:
        return t975(self.df) * self.standard_error

    @property
    def interval(self) -> tuple[float, float, float]:
        """Median, low, high, in the data's own unit."""
        middle, half = self.log_median, self.half
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def median(x: np.ndarray) -> float:
    """Median of finite values; several times faster than numpy's for the short arrays of a run."""
    ordered = x.copy()
    ordered.sort()
    n = len(ordered)
    return float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def median_and_scale(x: np.ndarray) -> tuple[float, float]:
    """The median, and normal data's standard deviation from the median absolute deviation: outliers don't count."""
    middle = median(x)
    return middle, 1.4826 * median(np.abs(x - middle))


def estimate(x: np.ndarray, logged: bool = False) -> Estimate:
    """Median of one run's steady steps and its standard error, for AR(1) noise with outliers; one value or more.

    The error of a normal sample's median is sqrt(pi/2)·s/sqrt(m), with s the standard deviation and m the number of
    independent values that n correlated ones are worth. s and the lag-one correlation come from values clipped to
    three robust spreads, so that outliers count little; both are corrected for their small-sample bias (Kendall 1954
    for the correlation). What `settling` can't exclude is added to the error. Fewer than three values give no error
    (infinite). `x`: larger is faster, as tokens/s are.
    """
    y = np.asarray(x, float) if logged else np.log(np.asarray(x, float))
    n = len(y)
    middle, scale = median_and_scale(y)
    if n < 3:
        return Estimate(middle, math.inf, 1.0, n, 0.0)
    scale = scale or float(y.std())  # more than half of the values equal: no robust spread
    z = np.clip(y - middle, -CLIP * scale, CLIP * scale)
    z -= z.mean()
    power = float(z @ z)
    if power == 0:
        return Estimate(middle, 0.0, n - 1.0, n, 0.0)
    rho = float(z[1:] @ z[:-1]) / power
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), MAX_RHO)
    inflation = variance_inflation(rho, n)
    independent = min(max(n / inflation, 2.0), n)
    variance = power / (n - 1) / max((n - inflation) / (n - 1), 0.2)
    error = MEDIAN_FACTOR * math.sqrt(variance / independent)
    return Estimate(middle, math.hypot(error, settling(z)), max(independent - 1, 1.0), n, rho)


def settling(z: np.ndarray) -> float:
    """By how much the mean of `z` may be low because the run was still getting faster; 0 where nothing points to it.

    Drift that dies out and is too small to be told from noise is not dropped (`steady`), and biases the median. An
    exponential with a time constant of an eighth of the run is fitted, its error taken for AR(1) noise of the residuals'
    correlation; beyond `SETTLING_Z` standard errors its share in the mean counts. `z`: centred logarithms in order.
    """
    n = len(z)
    if n < MIN_SETTLING:
        return 0.0
    shape, mean, products = _decay(n)
    power = float(products[0])
    slope = float(shape @ z) / power
    if slope >= 0:
        return 0.0
    rest = z - slope * shape
    left = float(rest @ rest)
    if left == 0:
        return -slope * mean
    rho = float(rest[1:] @ rest[:-1]) / left
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), MAX_RHO)
    inflated = power + 2 * float(products[1:] @ rho ** np.arange(1, n))
    error = math.sqrt(left / (n - 2) * inflated) / power
    return -slope * mean if -slope > SETTLING_Z * error else 0.0


@lru_cache(maxsize=256)
def _decay(n: int) -> tuple[np.ndarray, float, np.ndarray]:
    """exp(-8·t/n) less its mean, the mean, and the sums of products with itself at lags 0 … n-1."""
    curve = np.exp(-np.arange(n) * SETTLING / n)
    mean = float(curve.mean())
    curve -= mean
    return curve, mean, np.correlate(curve, curve, "full")[n - 1 :]


def variance_inflation(rho: float, n: int) -> float:
    """1 + 2·sum of (1 - k/n)·rho^k over k = 1 … n-1: the variance of a mean of AR(1) noise over that of white noise."""
    return 1 + 2 * (rho / (1 - rho) - rho * (1 - rho**n) / (n * (1 - rho) ** 2))


def t975(df: float) -> float:
    """97.5 % quantile of Student's t (Hill 1970, CACM algorithm 396), to 4 digits from one degree of freedom up."""
    if df >= 1e6:
        return 1.959964
    if df < 1.0001:
        return 12.7062
    if df < 2.0001:  # between one and two, where the expansion is poor: interpolated on 1/df
        weight = (1 / df - 0.5) / 0.5
        return 4.302653 * (12.7062 / 4.302653) ** weight
    a = 1 / (df - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * df
    y = (d * 0.05) ** (2 / df)
    if y > 0.05 + a:
        x = -1.959964
        y = x * x
        if df < 5:
            c += 0.3 * (df - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = a * y * y
        y = 0.5 * y * y + y if y <= 0.002 else math.expm1(y)
    else:
        y = ((1 / (((df + 6) / (df * y) - 0.089 * d - 0.822) * (df + 2) * 3) + 0.5 / (df + 4)) * y - 1) * (df + 1) / (
            df + 2
        ) + 1 / y
    return math.sqrt(df * y)
