"""What makes a number doubtful: short words beside the row, each explained in the report."""

import math
from typing import Any

import numpy as np

from analysis.files import dig
from analysis.stats import Estimate, median

MEANING = {
    "replay-mismatch": "a second pass gave other weights; the arithmetic of this run is not to be trusted",
    "unqualified": "no record shows this attention kernel to be reproducible bit for bit on this device and torch",
    "forced-balance": "tokens went to the experts in turn, not where the router sent them: for the speed alone",
    "throttled": "the GPU lowered its clocks (power, heat) during steady steps",
    "clocks": "the SM clock moved by more than 5 % during steady steps",
    "foreign-process": "another process used the GPU during the run",
    "drift": "step times never settled; the last half of the run was used",
    "short": "fewer than ten steady steps",
    "noisy": "the 95 % interval is wider than 5 % to either side",
    "outliers": "more than one steady step in twenty took over 1.5 times the median",
    "data-bound": "waiting for data took more than 5 % of the step",
    "host": "the host was short of CPU or swapping during the run",
    "profiled": "a profiler recorded two late steps, which slows them; for the trace, not for the ranking",
    "measured-peak": "no vendor figure for this device: MFU is relative to a measured matmul peak",
    "fp8-peak": "MFU is relative to the peak for fp8, not that for bf16, in which attention and the LM head run all the same",
    "above-peak": "MFU is above 100 %: the peak that it is relative to is too low",
    "memory-tight": "peak memory is above 95 % of the capacity",
    "damaged-lines": "lines of metrics.jsonl were unreadable and left out",
}


def flags(
    row: dict[str, Any],
    kept: dict[str, np.ndarray],
    seconds: np.ndarray,
    drifts: bool,
    fit: Estimate,
    summary: dict[str, Any],
) -> tuple[str, ...]:
    """Names from `MEANING` that hold for one run, in that order. `kept`, `seconds`: metrics of the steady steps."""
    clock = kept.get("gpu/sm_clock_mhz")
    usual = row["step_s"] if row["step_s"] == row["step_s"] else median(seconds)
    throttle = kept.get("gpu/throttle")
    telemetry = dig(summary, "telemetry") or {}
    holds = {
        "replay-mismatch": row["replay_match"] is False,
        "unqualified": dig(summary, "attention_qualified") is False,
        "forced-balance": dig(summary, "experts", "forced") is True,
        "throttled": (throttle is not None and np.nansum(throttle) > 0) or bool(dig(telemetry, "throttle_reasons")),
        "clocks": clock is not None and _spread(clock) > 0.05,
        "foreign-process": bool(dig(telemetry, "foreign_processes")) or _any_positive(kept.get("gpu/foreign")),
        "drift": drifts,
        "short": len(seconds) < 10,
        "noisy": 0.05 < fit.half < math.inf,  # too few steps for an interval are `short`
        "outliers": float(np.mean(seconds > 1.5 * usual)) > 0.05,
        "data-bound": row["data_s"] > 0.05 * row["step_s"],
        "host": bool(dig(telemetry, "host_pressure")),
        "profiled": bool(dig(summary, "profiled_steps")),
        "measured-peak": dig(summary, "peak", "kind") == "measured",
        "fp8-peak": dig(summary, "peak", "dtype") == "fp8",
        "above-peak": row["mfu"] > 100,
        "memory-tight": row["peak_mem_gib"] > 0.95 * row["capacity_gib"],
        "damaged-lines": row["damaged_lines"] > 0,
    }
    return tuple(name for name in MEANING if holds[name])


def _spread(values: np.ndarray) -> float:
    """Range from the 5th to the 95th percentile over the median."""
    ordered = np.sort(values[np.isfinite(values)])
    n = len(ordered)
    if n < 3 or ordered[n // 2] <= 0:
        return 0.0
    return float((ordered[n - 1 - n // 20] - ordered[n // 20]) / ordered[n // 2])


def _any_positive(values: np.ndarray | None) -> bool:
    return values is not None and bool(np.nansum(values) > 0)
