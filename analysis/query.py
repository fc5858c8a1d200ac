"""What a user writes after --where, --sort, --columns and --by, checked against the columns that exist."""

import re

import pandas as pd

from analysis.errors import BadInput, nearest
from analysis.load import Data, number_or_text
from analysis.rank import REPEAT_KEYS, Ranked

HIDDEN = ("log_median", "log_error", "df", "digest", "key", "in_grid", "overrides")
SORTABLE = [
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "mfu_causal",
    "hfu",
    "step_s",
    "data_s",
    "peak_mem_gib",
    "round_peak_mem_gib",
    "loss",
    "power_w",
    "start_s",
    "build_s",
    "compile_s",
    "train_s",
]
_CONDITION = re.compile(r"\s*([\w./:-]+?)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")


def available(data_columns: list[str]) -> list[str]:
    """Names that may be asked for: result columns, then configuration keys."""
    results = [c for c in data_columns if not c.startswith("cfg:") and c not in HIDDEN]
    return results + [c.removeprefix("cfg:") for c in data_columns if c.startswith("cfg:")]


def known(name: str, names: list[str], what: str) -> str:
    """`name`, if it is one of `names`. Raises BadInput with the nearest of them otherwise."""
    if name not in names:
        valid = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
        raise BadInput(f"unknown {what} '{name}'{nearest(name, names) or ';'} valid: {valid}")
    return name


def columns(text: str, ranked: Ranked) -> list[str]:
    """`reduction,mfu,peak_mem_gib` as a list."""
    names = available(list(ranked.rows.columns))
    return [known(name.strip(), names, "column") for name in text.split(",") if name.strip()]


def sort_column(text: str, data: Data) -> str:
    """The result column that ranks."""
    return known(text.strip(), [c for c in SORTABLE if c in data.points], "column to sort by")


def where(data: Data, text: str) -> Data:
    """Points for which all conditions hold: `micro_batch>=8,reduction=zero2o,model~llama`.

    `=` and `!=` compare numbers as numbers and text as text, and take alternatives: `micro_batch=4|8`; `~` finds text.
    Raises BadInput for what can't be read.
    """
    keep = _matching(
        {**{str(c): data.points[c] for c in data.points if c not in HIDDEN}, **_extra(data)}, data.points.index, text
    )
    if not keep.any():
        raise BadInput(f"no point matches --where '{text}'")
    index = keep.to_numpy()
    return Data(
        data.points[index].reset_index(drop=True), data.config[index].reset_index(drop=True), data.sweeps, data.notes
    )


def filtered(frame: pd.DataFrame, text: str) -> pd.DataFrame:
    """Rows of any frame for which all conditions hold. Raises BadInput as `where` does."""
    keep = _matching({str(c): frame[c] for c in frame}, frame.index, text)
    if not keep.any():
        raise BadInput(f"no row matches --where '{text}'")
    return frame[keep].reset_index(drop=True)


def _extra(data: Data) -> dict[str, pd.Series]:
    """Configuration keys; a result column of the same name goes before."""
    return {str(c): data.config[c] for c in data.config if c not in data.points}


def _matching(columns: dict[str, pd.Series], index: pd.Index, text: str) -> pd.Series:
    keep = pd.Series(True, index=index)
    for part in filter(None, (p.strip() for p in re.split(r",|\band\b|&&?", text))):
        match = _CONDITION.fullmatch(part)
        if not match:
            raise BadInput(f"cannot read condition '{part}' in --where: write NAME=VALUE with =, !=, <, <=, >, >= or ~")
        name, operator, value = match.groups()
        known(name, list(columns), "column in --where")
        keep &= _holds(columns[name], operator, value.strip("'\""))
    return keep


def _holds(series: pd.Series, operator: str, value: str) -> pd.Series:
    text = series.map(lambda v: " ".join(v) if isinstance(v, tuple) else "" if pd.isna(v) else str(v))
    if operator == "~":
        return text.str.contains(value, regex=False, case=False)
    if operator in ("=", "==", "!="):
        equal = pd.Series(False, index=series.index)
        for one in value.split("|"):
            wanted = number_or_text(one)
            equal |= text.str.lower() == one.lower()
            if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
                equal |= pd.to_numeric(series, errors="coerce") == wanted
        return ~equal if operator == "!=" else equal
    try:
        limit = float(value)
    except ValueError:
        raise BadInput(f"'{value}' in --where is not a number, which {operator} needs") from None
    numeric = pd.to_numeric(series, errors="coerce")
    return {"<": numeric < limit, "<=": numeric <= limit, ">": numeric > limit, ">=": numeric >= limit}[operator]


def best_by(ranked: Ranked, text: str) -> Ranked:
    """The best finished row of each value of the named columns, in each provenance group."""
    names = [n for n in available(list(ranked.rows.columns)) if n not in REPEAT_KEYS]
    by = [known(name.strip(), names, "column in --by") for name in text.split(",") if name.strip()]
    keys = [name if name in ranked.rows else f"cfg:{name}" for name in by]
    finished = ranked.rows[ranked.rows["rank"].notna()]
    rows = finished.drop_duplicates(["group", *keys]).reset_index(drop=True)
    return Ranked(rows, [*by, *(k for k in ranked.knobs if k not in by)], ranked.fixed, ranked.differs)
