"""Which rows make up a line: one value of the series knob, the rest of the knobs fixed, or else the best of them."""

from dataclasses import dataclass

import pandas as pd

from analysis.rank import Ranked
from analysis.text import cell, title

MAX_LINES = 8


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
    parts = rows.groupby([rows[f"cfg:{k}"].astype(str) for k in by], sort=True, dropna=False)
    found = [_line(_label(by, part), part, x) for _, part in parts]
    return [line for line in found if len(line.rows) or len(line.failed)], note


def _label(by: list[str], part: pd.DataFrame) -> str:
    first = part.iloc[0]
    texts = [cell(first[f"cfg:{k}"]) for k in by]
    # A word says what it is by itself (zero2o, layer); a number or a truth value needs its knob's name.
    return ", ".join(
        text if isinstance(first[f"cfg:{k}"], str) and not text.isdigit() and text not in ("none", "default") else f"{title(k)} {text}"
        for k, text in zip(by, texts, strict=True)
    )


def _line(label: str, rows: pd.DataFrame, x: str) -> Line:
    finished = rows[rows["rank"].notna()].drop_duplicates(f"cfg:{x}")  # rows come best first
    failed = rows[rows["rank"].isna() & ~rows[f"cfg:{x}"].isin(finished[f"cfg:{x}"])].drop_duplicates(f"cfg:{x}")
    return Line(label, finished.sort_values(f"cfg:{x}", key=_sortable), failed)


def _sortable(column: pd.Series) -> pd.Series:
    as_numbers = pd.to_numeric(column, errors="coerce")
    return as_numbers if as_numbers.notna().all() else column.astype(str)
