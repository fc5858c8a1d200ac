"""Device-hours: what the sweep used, and how much of it gave no result."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.files import number, read_json

PHASES = ("start", "build", "compile", "warm-up steps", "steady steps", "rest", "earlier attempts")


def attempt_seconds(folder: Path) -> float:
    """Wall seconds of earlier attempts, kept under attempts/<n>/."""
    attempts = folder / "attempts"
    if not attempts.is_dir():
        return 0.0
    return sum(wall_seconds(read_json(path / "status.json")) for path in sorted(attempts.iterdir()))


def wall_seconds(status: dict[str, Any]) -> float:
    """Seconds from start to end: the run's own monotonic count where it has one, or else by the clock; 0 if unknown."""
    summary = status.get("summary")
    whole = number(summary.get("wall_s")) if isinstance(summary, dict) else float("nan")
    if whole >= 0:
        return whole
    listed = summary.get("seconds") if isinstance(summary, dict) else None
    measured = [number(v) for v in listed.values()] if isinstance(listed, dict) else []
    total = sum(v for v in measured if v > 0)
    start, end = _when(status.get("started")), _when(status.get("ended"))
    by_clock = end - start if start == start and end == end else 0.0
    # A clock that jumped can't make a run shorter than its own count, nor negative.
    return max(total, by_clock if 0 <= by_clock < 30 * 86400 else 0.0)


def _when(value: Any) -> float:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return float("nan")
    return number(value)


def phases(points: pd.DataFrame) -> pd.DataFrame:
    """Device-seconds, one row a status, one column a phase of PHASES."""
    devices = points["devices"].fillna(1.0)
    steps = points["steps_s"].fillna(0.0)
    warm = points["dropped_s"].fillna(0.0)
    begun = points[["start_s", "build_s", "compile_s"]].fillna(0.0)
    # Compilation happens inside the first steps: what was counted as compile time is not counted as warm-up again.
    warm = (warm - begun["compile_s"]).clip(lower=0)
    steady = steps - points["dropped_s"].fillna(0.0)
    known = begun.sum(axis=1) + warm + steady
    frame = pd.DataFrame(
        {
            "start": begun["start_s"],
            "build": begun["build_s"],
            "compile": begun["compile_s"],
            "warm-up steps": warm,
            "steady steps": steady,
            "rest": (points["wall_s"].fillna(0.0) - known).clip(lower=0),
            "earlier attempts": points["attempts_s"].fillna(0.0),
        }
    ).mul(devices, axis=0)
    order = points["status"].drop_duplicates()
    total = frame.groupby(points["status"], sort=False).sum().loc[order]
    return total[total.sum(axis=1) > 0]


def device_hours(points: pd.DataFrame) -> tuple[float, float]:
    """(used, wasted): all attempts of all points, and those attempts that gave no result."""
    devices = points["devices"].fillna(1.0)
    final, earlier = points["wall_s"].fillna(0.0) * devices, points["attempts_s"].fillna(0.0) * devices
    failed = ~points["status"].isin(["ok", "running"])
    return float((final + earlier).sum() / 3600), float((final[failed].sum() + earlier.sum()) / 3600)
