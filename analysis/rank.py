"""Points to ranked rows: repeats combined, provenance groups kept apart, ties called ties."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.determinism import price
from analysis.load import Data
from analysis.provenance import split
from analysis.stats import t975

REPEAT_KEYS = ("repeat",)
MEDIANS = [
    "tokens_per_s_per_gpu",
    "step_s",
    "data_s",
    "mfu",
    "mfu_causal",
    "hfu",
    "power_w",
    "sm_clock_mhz",
    "temperature_c",
    "start_s",
    "build_s",
    "compile_s",
    "train_s",
]


@dataclass
class Ranked:
    """`rows`: one row a configuration and provenance group, best first within its group, unfinished rows last."""

    rows: pd.DataFrame
    knobs: list[str]  # configuration keys that tell the rows apart, in the order of the command line
    fixed: dict[str, object]  # configuration keys that all rows share
    differs: list[str]  # provenance columns in which the groups differ; empty with one group


def rank(data: Data, by: str = "tokens_per_s") -> Ranked:
    """Ranked rows of the given points. `by` is a result column; larger is better except for seconds and memory."""
    points, config = data.points, data.config
    group, differs = split(points)
    knobs = varying(config, points["overrides"])
    merged = pd.concat([points.assign(group=group), config.add_prefix("cfg:")], axis=1)
    keys = configuration_key(config).where(config.notna().any(axis=1), points["identity"].astype(str))
    merged["key"] = keys
    frame = combine(merged)
    frame["determinism_price"] = price(frame)
    frame = order(frame, by)
    fixed = {str(c): config[c].dropna().iloc[0] for c in config if c not in knobs and config[c].nunique() == 1}
    return Ranked(frame, knobs, fixed, differs)


def configuration_key(config: pd.DataFrame) -> pd.Series:
    """What was trained, as text: equal for the repeats of a point, whatever the order of the keys."""
    columns = sorted(column for column in config.columns if column not in REPEAT_KEYS)
    records = config[columns].astype(object).where(config[columns].notna(), None).to_dict("records")
    return pd.Series([json.dumps(r, sort_keys=True, default=str) for r in records], index=config.index, dtype=object)


def varying(config: pd.DataFrame, overrides: pd.Series) -> list[str]:
    """Keys that tell points apart: those given on the command line first, then what these do not determine.

    `global_batch=32 micro_batch=4,8` also changes grad_accum; it follows from micro_batch and is not a knob.
    """
    named = dict.fromkeys(item.lstrip("+~").partition("=")[0] for items in overrides for item in items)
    groups = [c for c in config.columns if any(d.startswith(f"{c}.") for d in config.columns)]
    plain = [c for c in config.columns if "." not in c]
    candidates = [c for c in dict.fromkeys([*named, *groups, *plain, *config.columns]) if c in config.columns]
    text = config.astype(object).where(config.notna(), "").astype(str)
    knobs: list[str] = []
    cells = 1
    for name in candidates:
        # A point that was never started has only the settings of its command line: what is missing does not vary.
        if name in REPEAT_KEYS or config[name].dropna().astype(str).nunique() < 2:
            continue
        distinct = len(text[[*knobs, name]].drop_duplicates())
        if distinct > cells:
            knobs.append(name)
            cells = distinct
    return knobs


def between_runs(merged: pd.DataFrame) -> tuple[float, float]:
    """Variance of log tokens/s from run to run beyond what the steps explain, and its degrees of freedom.

    Pooled over all configurations that were run more than once: two repeats alone say little, six pairs say a lot.
    """
    squares = within = freedom = 0.0
    good = merged[(merged["status"] == "ok") & np.isfinite(merged["log_error"])]
    repeated = good[good.duplicated(["key", "group"], keep=False)]
    for _, part in repeated.groupby(["key", "group"], sort=True):
        squares += float(((part["log_median"] - part["log_median"].mean()) ** 2).sum())
        within += float((part["log_error"] ** 2).mean()) * (len(part) - 1)
        freedom += len(part) - 1
    if not freedom:
        return 0.0, 0.0
    return max(squares - within, 0.0) / freedom, freedom


def combine(merged: pd.DataFrame) -> pd.DataFrame:
    """One row of all repeats that share configuration, provenance and status; `half` is its 95 % half-width (log)."""
    between = between_runs(merged)
    text = [merged[c].map(str).to_numpy(object) for c in ("started", "sweep", "point")]
    merged = merged.iloc[np.lexsort(text[::-1])].reset_index(drop=True)
    number = merged.groupby(["key", "group", "status"], sort=False).ngroup()
    frame = merged[~number.duplicated()].reset_index(drop=True)
    frame["runs"] = number.value_counts(sort=False).sort_index().to_numpy()
    single = _estimate_single(frame, between)
    frame["log_median"], frame["error"], frame["df"] = single
    for i in np.flatnonzero(frame["runs"] > 1):
        for name, value in _repeats(merged[number == i], between).items():
            frame.at[i, name] = value  # type: ignore[assignment]
    quantile = frame["df"].map(t975, na_action="ignore")
    frame["half"] = (quantile * frame["error"]).where(np.isfinite(frame["error"]))
    frame["tokens_per_s"] = np.exp(frame["log_median"])
    for name in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "step_s"):
        frame[f"{name}_lo"] = frame[name] * np.exp(-frame["half"])
        frame[f"{name}_hi"] = frame[name] * np.exp(frame["half"])
    return frame.drop(columns=["log_error"])


def _estimate_single(frame: pd.DataFrame, between: tuple[float, float]) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Estimate of rows with one run: its own error, and the variation between runs that other rows showed."""
    run_part, run_df = between
    own = frame["log_error"] ** 2
    total = own + run_part
    spread = own**2 / frame["df"] + (run_part**2 / run_df if run_part else 0.0)
    df = (total**2 / spread).where(spread > 0, frame["df"]) if run_part else frame["df"]
    return frame["log_median"], np.sqrt(total), df


def _repeats(part: pd.DataFrame, between: tuple[float, float]) -> dict[str, object]:
    """What changes in a row when it stands for several runs."""
    row: dict[str, object] = {name: float(part[name].median()) for name in MEDIANS}
    row["peak_mem_gib"] = float(part["peak_mem_gib"].max())
    row["steady_steps"] = int(part["steady_steps"].sum())
    row["damaged_lines"] = int(part["damaged_lines"].sum())
    row["flags"] = tuple(dict.fromkeys(flag for flags in part["flags"] for flag in flags))
    row["reason"] = "; ".join(dict.fromkeys(r for r in part["reason"] if r))
    row["log_median"], row["error"], row["df"] = _estimate(part, between)
    return row


def _estimate(part: pd.DataFrame, between: tuple[float, float]) -> tuple[float, float, float]:
    """Mean of the runs' log medians, its standard error and degrees of freedom (Welch and Satterthwaite)."""
    values = part.loc[part["log_median"].notna(), ["log_median", "log_error", "df"]]
    count = len(values)
    if not count:
        return math.nan, math.nan, 1.0
    step_parts = (values["log_error"] / count) ** 2
    run_part = between[0] / count
    total = float(step_parts.sum()) + run_part
    if not math.isfinite(total) or total == 0:
        return float(values["log_median"].mean()), math.sqrt(total), 1.0
    spread = float((step_parts**2 / values["df"]).sum()) + (run_part**2 / between[1] if run_part else 0.0)
    return float(values["log_median"].mean()), math.sqrt(total), total**2 / spread if spread else 1e6


def noise(rows: pd.DataFrame) -> np.ndarray:
    """By how much of tokens/s (on the logarithm) each row may be off: its half-width; no end for a run with too few steps for
    one, which could be anywhere; nothing for a value that was given without steps, and is taken as it stands."""
    half = rows["half"].to_numpy(float)
    return np.where(np.isfinite(half), half, np.where(rows["steady_steps"] > 0, np.inf, 0.0))


def order(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Sorts rows, and ranks the finished ones within their provenance group.

    A rank is shared by the rows that follow its first row and can't be told apart from it; `tie` marks those that can't
    be told apart from the best of the group, wherever they stand.
    """
    frame = frame.copy()
    sign = 1.0 if by.endswith("_s") and not by.startswith("tokens") or by.endswith("_gib") else -1.0
    ranked = (frame["status"] == "ok") & frame[by].notna() & (frame["group"] >= 0)
    frame["rank"] = pd.array([pd.NA] * len(frame), dtype="Int64")
    frame["tie"] = False
    with_noise = by in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "hfu", "step_s")
    for _, part in frame[ranked].groupby("group"):
        score = -sign * np.log(part[by].to_numpy(float))
        off = noise(part) if with_noise else np.zeros(len(part))
        frame.loc[part.index, "rank"] = shared_ranks(score, off)
        best = int(np.argmax(score))
        apart = score[best] - score > np.hypot(off, off[best])
        frame.loc[part.index, "tie"] = ~apart & (np.arange(len(part)) != best)
        ratio = np.exp(score - score[best])
        frame.loc[part.index, "of_best"] = ratio
    frame["_ranked"] = ~ranked
    frame["_score"] = sign * frame[by].astype(float)
    frame["_group"] = frame["group"].where(ranked, len(frame))
    frame = frame.sort_values(["_ranked", "_group", "_score", "key", "sweep", "point"], kind="stable")
    return frame.drop(columns=["_ranked", "_score", "_group"]).reset_index(drop=True)


def shared_ranks(score: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """1, 1, 3, …: rows by falling score; a new rank begins with the first row that surely differs from the last one's."""
    ranks = np.zeros(len(score), int)
    leader = 0
    down = np.argsort(-score, kind="stable")
    for place, row in enumerate(down):
        first = down[leader]
        if score[first] - score[row] > math.hypot(noise[first], noise[row]):
            leader = place
        ranks[row] = leader + 1
    return ranks
