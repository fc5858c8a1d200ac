"""The answer to the sweep's question: the best configuration, by how much, how sure, and the command that reruns it."""

import math
import shlex
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.rank import Ranked, noise
from analysis.text import cell

MAX_ANSWERS = 6
SHOWN_TIES = 4
NOT_RERUN = (
    "out",
    "name",
    "repeat",
    "repeats",
    "plan",
    "retries",
    "prune",
    "max_failures",
)  # would resume the sweep instead


@dataclass(frozen=True)
class Answer:
    """One best point; `scope` says among which rows where there is more than one answer."""

    scope: str
    setting: str  # reduction=zero2o micro_batch=12
    result: str  # 50,057 tokens/s (±0.4 %), 18.2 % MFU, peak 40 of 139.8 GiB
    margin: str
    command: str
    warnings: tuple[str, ...]


def answers(ranked: Ranked) -> list[Answer]:
    """Best row of each provenance group and model; tokens/s of different models are not compared."""
    finished = ranked.rows[ranked.rows["rank"].notna()]
    if finished.empty:
        return []
    models = finished.get("cfg:model", pd.Series("", index=finished.index)).fillna("").astype(str)
    several = models.nunique() > 1
    found = []
    for (_, model), part in finished.groupby([finished["group"], models], sort=True):
        scope = []
        if ranked.differs:
            scope += [f"{name} {part.iloc[0][name]}" for name in ranked.differs]
        if several:
            scope.append(f"model {model}")
        found.append(_answer(ranked, part, ", ".join(scope)))
    return found[:MAX_ANSWERS]


def setting(ranked: Ranked, row: pd.Series) -> str:
    """The row's knobs as they are written on the command line; its folder where nothing varies."""
    pairs = [f"{k}={cell(row[f'cfg:{k}'])}" for k in ranked.knobs if cell(row.get(f"cfg:{k}")) != ""]
    return " ".join(pairs) or str(row["point"])


def command(row: pd.Series) -> str:
    """The command line that runs this point again, or an empty string where the grid was not recorded."""
    kept = [item for item in row["overrides"] if item.lstrip("+~").partition("=")[0] not in NOT_RERUN]
    return " ".join(["python", "-m", "train", *map(shell_word, kept)]) if row["overrides"] else ""


def shell_word(item: str) -> str:
    """One argument for a POSIX shell; in double quotes where these do, since Hydra's own quotes are single."""
    if shlex.quote(item) == item:
        return item
    return shlex.quote(item) if set(item) & set('"$`\\!') else f'"{item}"'


def _answer(ranked: Ranked, part: pd.DataFrame, scope: str) -> Answer:
    best = part.iloc[0]
    result = f"{cell(float(best['tokens_per_s']), 'tokens_per_s')} tokens/s"
    if math.isfinite(best["half"]):
        result += f" (±{cell(float(best['half']), 'half')})"
    if math.isfinite(best["mfu"]):
        result += f", {cell(float(best['mfu']), 'mfu')} % MFU"
    if math.isfinite(best["peak_mem_gib"]):
        of = f" of {best['capacity_gib']:.4g}" if math.isfinite(best["capacity_gib"]) else ""
        result += f", peak {best['peak_mem_gib']:.4g}{of} GiB"
    warnings = tuple(flag for flag in best["flags"])
    return Answer(scope, setting(ranked, best), result, _margin(ranked, part), command(best), warnings)


def _margin(ranked: Ranked, part: pd.DataFrame) -> str:
    """Lead over the next row that is surely slower, and the rows that can't be told apart."""
    best, rest = part.iloc[0], part.iloc[1:]
    if rest.empty:
        return "The only finished point."
    gap = best["log_median"] - rest["log_median"]
    off = pd.Series(np.hypot(noise(rest), noise(part)[0]), rest.index)
    ties, slower = rest[gap <= off], rest[gap > off]
    sentences = []
    if len(ties):
        names = "; ".join(setting(ranked, row) for _, row in ties.head(SHOWN_TIES).iterrows())
        more = f" and {len(ties) - SHOWN_TIES} more" if len(ties) > SHOWN_TIES else ""
        sentences.append(f"A tie: it can't be told apart from {names}{more} (95 % intervals).")
    if len(slower):
        row = slower.iloc[0]
        low, middle, high = (100 * math.expm1(gap[row.name] + s * off[row.name]) for s in (-1, 0, 1))
        what = "the next" if not len(ties) else "the first that is surely slower"
        interval = f" (95 % interval {low:.1f} to {high:.1f} %)" if off[row.name] else ""
        sentences.append(f"{middle:.1f} % faster than {what}, {setting(ranked, row)}{interval}.")
    if not np.isfinite(part["half"]).any():
        sentences.append("No interval: single values or too few steps.")
    elif (part["runs"] == 1).all():
        sentences.append("One run a point: the intervals hold step-to-step noise; repeats=N adds run-to-run noise.")
    return " ".join(sentences)
