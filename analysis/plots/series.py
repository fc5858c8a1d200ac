"""Which rows make up a line: one value of the series knob, the rest of the knobs fixed, or else the best of them."""

from dataclasses import dataclass

import pandas as pd

from analysis.rank import Ranked
from analysis.text import cell, title

MAX_LINES = 8
VAGUE = ("none", "default", "auto", "true", "false", "full")  # values that mean nothing without their knob


@dataclass(frozen=True)
class Line:
    """Rows of one line, one a value of x, in order of x; `failed` are rows without a result, with their status."""

    label: str
    rows: pd.DataFrame
    failed: pd.DataFrame


def lines(ranked: Ranked, x: str, prefer: str = "reduction") -> tuple[list[Line], str]:
    """Lines over knob `x`, and a note on what was left out ("best over seq_len") or an empty string.

    A line a combination of the other knobs, as long as there are at most MAX_LINES of them; beyond that a line a value
    of one knob (`prefer`, if it varies), each point the best over the others.
    """
    rows = ranked.rows[ranked.rows[f"cfg:{x}"].notna()] if f"cfg:{x}" in ranked.rows else ranked.rows.iloc[:0]
    rows = rows[rows["group"].isin([0, -1])]
    others = [knob for knob in ranked.knobs if knob != x and f"cfg:{knob}" in rows]
    combinations = len(rows[[f"cfg:{k}" for k in others]].astype(str).drop_duplicates()) if others else 1
    note, by = "", others
    if combinations > MAX_LINES:
        counts = {k: rows[f"cfg:{k}"].astype(str).nunique() for k in others}
        fitting = [k for k in ([prefer] if prefer in others else []) + others if counts[k] <= MAX_LINES]
        by = fitting[:1]
        note = "best over " + ", ".join(title(k) for k in others if k not in by)
    if not by:
        return [_line("", rows, x)], note
    parts = [part for _, part in rows.groupby([rows[f"cfg:{k}"].astype(str) for k in by], sort=True, dropna=False)]
    parts.sort(key=lambda part: [_order(part.iloc[0][f"cfg:{k}"]) for k in by])
    found = [_line(label(by, part.iloc[0]), part, x) for part in parts]
    return [line for line in found if len(line.rows) or len(line.failed)], note


def _order(value: object) -> tuple[float, str]:
    """Numbers by size, before text by name."""
    is_number = pd.api.types.is_number(value) and not isinstance(value, bool)
    return (float(str(value)), "") if is_number else (float("inf"), str(value))


def label(knobs: list[str], row: pd.Series) -> str:
    """The row's settings in few words: a word stands by itself (zero2o), a number needs its knob's name."""
    words = []
    for knob in knobs:
        value, text = row[f"cfg:{knob}"], cell(row[f"cfg:{knob}"])
        alone = isinstance(value, str) and text.lower() not in VAGUE and not text[:1].isdigit()
        words.append(text if alone else f"{title(knob)} {text or 'unset'}")
    return ", ".join(words) or str(row["point"])


def _line(label: str, rows: pd.DataFrame, x: str) -> Line:
    finished = rows[rows["rank"].notna()].drop_duplicates(f"cfg:{x}")  # rows come best first
    failed = rows[rows["rank"].isna() & ~rows[f"cfg:{x}"].isin(finished[f"cfg:{x}"])].drop_duplicates(f"cfg:{x}")
    return Line(label, finished.sort_values(f"cfg:{x}", key=_sortable), failed)


def _sortable(column: pd.Series) -> pd.Series:
    as_numbers = pd.to_numeric(column, errors="coerce")
    return as_numbers if as_numbers.notna().all() else column.astype(str)
