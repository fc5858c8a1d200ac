"""Any mixture of sweep folders, other systems' metrics and CSV files into two frames: results and configuration.

`Data.points` has one row a point of the grid, finished or not, with the columns of `RESULTS`; `Data.config` has the
same index and one column a configuration key (`micro_batch`, `reduction`, `model.layers`). Steps are summarised file by
file and not kept, so ten thousand runs fit in little memory; `analysis.jsonl.read` gives one run's steps again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import foreign, jsonl, provenance
from analysis.alive import gone
from analysis.errors import BadInput
from analysis.files import dig, number, read_config, read_json, read_same_json
from analysis.scan import PointFolder, SweepFolder, find_sweeps
from analysis.summary import summarise
from analysis.usage import attempt_seconds, wall_seconds

STATUSES = ("ok", "running", "pending", "oom", "infeasible", "invalid", "timeout", "crashed", "lost", "interrupted")
# Part of the folder, not of what was trained (the trainer's identity leaves the same keys out).
NOT_KNOBS = [
    "name",
    "out",
    "output",
    "outputs",
    "launch",
    "budget",
    "timeout",
    "retries",
    "prune",
    "plan",
    "code",
    "sweeps",
    "recipe",
    "repeats",
    "max_failures",
    "cancel",
    "fabric",
]


@dataclass
class Data:
    """What was read. `notes` are sentences for the reader: duplicates, damaged lines, unreadable files."""

    points: pd.DataFrame
    config: pd.DataFrame
    sweeps: list[SweepFolder] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load(paths: Path | str | Iterable[Path | str]) -> Data:
    """Reads sweeps, folders of sweeps, single points, prime-rl metrics.jsonl and CSV files.

    Raises BadInput for a path that does not exist or is none of these.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    sweeps: list[SweepFolder] = []
    others: list[foreign.Run] = []
    for path in map(Path, listed):
        if foreign.is_foreign(path):
            others += foreign.read(path)
        else:
            sweeps += [s for s in find_sweeps(path) if s.path.resolve() not in {t.path.resolve() for t in sweeps}]
    pairs = [(sweep.name, point) for sweep in sweeps for point in sweep.points]
    metrics = jsonl.read_many(f"{point.path}/metrics.jsonl" for _, point in pairs)
    results, configs = [], []
    for (sweep_name, point), steps in zip(pairs, metrics, strict=True):
        config = {k: v for k, v in read_config(f"{point.path}/config.yaml").items() if not _is_left_out(k)}
        results.append(_result(sweep_name, point, steps, config))
        configs.append(config or _from_overrides(point.overrides))
    for run in others:
        results.append(run.result)
        configs.append(run.config)
    if not results:
        raise BadInput(f"no points in {', '.join(map(str, listed))}")
    fullest = max(configs, key=lambda config: (len(config), list(config)))  # a point that never started knows few keys
    keys = [*fullest, *sorted({key for config in configs for key in config} - fullest.keys())]
    data = Data(pd.DataFrame(results), pd.DataFrame(configs, index=range(len(configs)), columns=keys), sweeps)
    return _without_copies(data)


@lru_cache(maxsize=4096)
def _is_left_out(key: str) -> bool:
    return key.partition(".")[0] in NOT_KNOBS


def _from_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """What the grid says about a point that never got a readable configuration."""
    config: dict[str, Any] = {}
    for item in overrides:
        key, _, value = item.lstrip("+~").partition("=")
        if not _is_left_out(key):
            parsed = number_or_text(value)
            config[key] = parsed
    return config


def number_or_text(text: str) -> Any:
    """`4` → 4, `0.5` → 0.5, `true` → True, anything else as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _result(sweep: str, point: PointFolder, steps: jsonl.Metrics, config: dict[str, Any]) -> dict[str, Any]:
    status = read_json(f"{point.path}/status.json")
    summary = dig(status, "summary")
    summary = summary if isinstance(summary, dict) else {}
    row: dict[str, Any] = {
        "sweep": sweep,
        "point": point.path.name,
        "path": str(point.path),
        "identity": status.get("identity") or point.identity or point.path.name,
        "in_grid": point.in_grid,
        "overrides": point.overrides,
        **_state(point, status),
        "devices": number(config.get("nproc")),
        "wall_s": wall_seconds(status),
        "attempts_s": attempt_seconds(point.path),
        **provenance.columns(read_same_json(f"{point.path}/manifest.json"), summary, config, status),
        **summarise(steps, summary, config),
    }
    return row


def _state(point: PointFolder, status: dict[str, Any]) -> dict[str, Any]:
    state, reason = status.get("status"), status.get("reason") or ""
    if not isinstance(state, str):
        exists = (point.path / "status.json").exists()
        state, reason = "pending", "no readable status.json" if exists else "not started"
    elif why := gone(status):
        state, reason = "lost", why
    return {
        "status": state,
        "reason": " ".join(str(reason).split()),
        "attempt": number(status.get("attempt")),
        "started": status.get("started"),
        "ended": status.get("ended"),
    }


def _without_copies(data: Data) -> Data:
    """A copied point folder is the same measurement, not a repeat: two real runs never share every step time."""
    points = data.points
    measured = points["digest"].ne("")
    copies = measured & points.duplicated(["identity", "digest"])
    if copies.any():
        names = ", ".join(f"{r.sweep}/{r.point}" for r in points[copies].head(3).itertuples())
        data.notes.append(f"{copies.sum()} copied point(s) left out, each the same run as another: {names}")
        data.points = points[~copies].reset_index(drop=True)
        data.config = data.config[~copies.to_numpy()].reset_index(drop=True)
    damaged = data.points["damaged_lines"].sum()
    if damaged:
        files = int((data.points["damaged_lines"] > 0).sum())
        data.notes.append(f"{int(damaged)} damaged metrics line(s) dropped, in {files} file(s)")
    return data
