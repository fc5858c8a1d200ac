"""Other systems' runs beside ours: prime-rl's metrics.jsonl (the same keys), and CSV files.

A CSV is one row a step (it has a `step` column; `run` tells runs apart) or one row a run. Its columns are taken by our
names or by the usual ones in `ALIASES`; every other column is a setting, like a configuration key.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from analysis import jsonl
from analysis.errors import BadInput
from analysis.provenance import GATE, UNKNOWN
from analysis.stats import estimate
from analysis.summary import summarise

ALIASES = {
    "tokens_per_s": ("perf/throughput", "throughput", "tps", "tokens/s", "tokens_per_sec"),
    "tokens_per_s_per_gpu": ("perf/tokens_per_s_per_gpu", "tps_per_gpu", "tokens/s/gpu"),
    "mfu": ("perf/mfu", "mfu_pct", "mfu_pct_published"),
    "step_s": ("time/step", "step_time", "step_s"),
    "peak_mem_gib": ("perf/peak_memory", "mem_gib", "memory_gib", "peak_memory", "in_step_peak_gib"),
    "status": (),
    "reason": (),
    "nproc": ("gpus", "ngpus", "n_gpus", "world", "world_size"),
    "micro_batch": ("mb", "local_bs", "micro_batch_size"),
    "seq_len": ("seq", "seqlen"),
}
STEP_KEYS = {
    "tokens_per_s": "perf/throughput",
    "tokens_per_s_per_gpu": "perf/tokens_per_s_per_gpu",
    "mfu": "perf/mfu",
    "step_s": "time/step",
    "peak_mem_gib": "perf/peak_memory",
}


@dataclass(frozen=True)
class Run:
    """One imported run: the columns of `Data.points` and those of `Data.config`."""

    result: dict[str, Any]
    config: dict[str, Any]


def is_foreign(path: Path) -> bool:
    """A .csv or .jsonl file, or a folder with metrics.jsonl and nothing else of a point of ours."""
    if path.is_file():
        return path.suffix.lower() in (".csv", ".jsonl")
    ours = ("sweep.json", "status.json", "config.yaml", "manifest.json")
    return _metrics_file(path).is_file() and not any((path / name).exists() for name in ours)


def _metrics_file(folder: Path) -> Path:
    """prime-rl's file monitor writes monitors/file/metrics.jsonl below the run's output folder."""
    monitor = folder / "monitors" / "file" / "metrics.jsonl"
    return monitor if monitor.is_file() else folder / "metrics.jsonl"


def read(path: Path) -> list[Run]:
    """The runs in the file. Raises BadInput for a file without a usable column."""
    if path.suffix.lower() == ".csv":
        return _csv(path)
    file = _metrics_file(path) if path.is_dir() else path
    steps = jsonl.read(file)
    if not steps.steps:
        raise BadInput(f"no readable metrics line in {file}")
    return [_run(path, path.resolve().name, steps, {})]


def _csv(path: Path) -> list[Run]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            frame = read_csv(file)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {' '.join(str(error).split())}") from None
    names = {alias.lower(): ours for ours, aliases in ALIASES.items() for alias in (ours, *aliases)}
    frame = frame.rename(columns={column: names.get(str(column).strip().lower(), str(column)) for column in frame})
    frame = frame.loc[:, ~frame.columns.duplicated()]
    if not set(STEP_KEYS) & set(frame.columns):
        raise BadInput(f"{path} has none of the columns {', '.join(STEP_KEYS)} (or a usual name of one)")
    if "step" in frame.columns and frame["step"].duplicated().sum() < len(frame) and _is_whole(frame["step"]):
        return _csv_of_steps(path, frame)
    return [_csv_row(path, i, row) for i, row in enumerate(frame.to_dict("records"))]


def read_csv(file: TextIO) -> pd.DataFrame:
    """A CSV that may begin with lines of comment (#); later ones are data, since `# GPUs` is a usual column."""
    lines = file.readlines()
    while lines and lines[0].startswith("#"):
        lines.pop(0)
    return pd.read_csv(io.StringIO("".join(lines)), skipinitialspace=True)


def _is_whole(steps: pd.Series) -> bool:
    values = pd.to_numeric(steps, errors="coerce")
    return bool(values.notna().all() and (values == values.round()).all())


def _csv_of_steps(path: Path, frame: pd.DataFrame) -> list[Run]:
    runs = []
    for name, part in frame.groupby("run", sort=True) if "run" in frame.columns else [(path.stem, frame)]:
        part = part.sort_values("step").drop_duplicates("step", keep="last")
        columns = {"step": part["step"].to_numpy(float)}
        for ours, key in STEP_KEYS.items():
            if ours in part.columns:
                columns[key] = pd.to_numeric(part[ours], errors="coerce").to_numpy(float)
        taken = {"step", *STEP_KEYS}  # the run's own name stays: it tells runs with equal settings apart
        settings = {str(c): part[c].iloc[0] for c in part if c not in taken and part[c].nunique() == 1}
        runs.append(_run(path, str(name), jsonl.Metrics(columns, 0), settings))
    return runs


def _csv_row(path: Path, index: int, row: Mapping[Any, Any]) -> Run:
    """A run that is known by its result alone: no interval."""
    config = {str(name): value for name, value in row.items() if name not in (*STEP_KEYS, "status", "reason")}
    run = _run(path, f"{path.stem}#{index + 1}", jsonl.Metrics({}, 0), config)
    result = dict(run.result)
    for name in STEP_KEYS:
        result[name] = _float(row.get(name))
    nproc = _float(config.get("nproc"))
    if pd.isna(result["tokens_per_s"]):
        result["tokens_per_s"] = result["tokens_per_s_per_gpu"] * nproc
    elif pd.isna(result["tokens_per_s_per_gpu"]):
        result["tokens_per_s_per_gpu"] = result["tokens_per_s"] / nproc
    if result["tokens_per_s"] > 0:
        fit = estimate(np.array([result["tokens_per_s"]]))
        result |= {"log_median": fit.log_median, "log_error": fit.standard_error, "df": fit.df}
    result["status"] = str(row["status"]) if isinstance(row.get("status"), str) else "ok"
    result["reason"] = str(row["reason"]) if isinstance(row.get("reason"), str) else ""
    return Run(result, config)


def _float(value: Any) -> float:
    """A number out of a cell, which may be text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def _run(path: Path, name: str, steps: jsonl.Metrics, config: dict[str, Any]) -> Run:
    result = {
        "sweep": path.resolve().name,
        "point": name,
        "path": str(path),
        "identity": f"{path.resolve()}#{name}",
        "in_grid": True,
        "overrides": (),
        "status": "ok",
        "reason": "",
        **dict.fromkeys(("attempt", "wall_s", "attempts_s"), np.nan),
        **dict.fromkeys(("started", "ended")),
        "devices": _float(config.get("nproc")),
        **dict.fromkeys(GATE, UNKNOWN),
        "conventions": f"as imported from {path.name}",
        **summarise(steps, {}, config),
    }
    return Run(result, config)
