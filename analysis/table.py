"""The ranked table of a sweep, as `python -m analysis table DIR` prints it."""

from pathlib import Path

import pandas as pd

from analysis import query
from analysis.census import census
from analysis.flags import MEANING
from analysis.load import Data, load
from analysis.pivot import pivot as pivot_table
from analysis.provenance import GATE, UNKNOWN
from analysis.rank import Ranked, rank
from analysis.text import cell, table, title

DEFAULT = (
    "tokens_per_s",
    "half",
    "of_best",
    "mfu",
    "step_s",
    "peak_mem_gib",
    "determinism_price",
    "imbalance",
    "steady_steps",
    "runs",
    "flags",
)  # what most people want, here and in the report
LIST_LIMIT = 12  # reasons and names listed in text before "and N more"


def render(
    paths: Path | str | list[Path],
    *,
    by: str | None = None,
    sort: str = "tokens_per_s",
    where: str | None = None,
    columns: str | None = None,
    pivot: str | None = None,
    form: str = "text",
) -> str:
    """Ranked rows, then what was not ranked and why, then the census.

    `by`: best row of each value of these columns; `sort`: result column that ranks; `where`: filter, as in
    `micro_batch>=8,reduction=zero2o`; `columns`: what to show; `pivot`: two knobs as rows and
    columns; `form`: text, md, csv or latex.
    Raises BadInput for a wrong folder, column or expression.
    """
    data = load(paths)
    ranked = prepare(data, by=by, sort=sort, where=where)
    if pivot:
        return pivot_table(ranked, pivot, sort, form)
    shown = query.columns(columns, ranked) if columns else default_columns(ranked)
    if form in ("csv", "latex"):
        return rows_table(ranked.rows, shown, form)
    parts = [group_tables(ranked, shown, form), failures(ranked, form)]
    parts += ["\n".join(notes(data, ranked)), census(data.points).line()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def prepare(data: Data, *, by: str | None = None, sort: str = "tokens_per_s", where: str | None = None) -> Ranked:
    """Ranked rows of the points that `where` keeps, or the best of each group of `by`."""
    if where:
        data = query.where(data, where)
    ranked = rank(data, query.sort_column(sort, data))
    return query.best_by(ranked, by) if by else ranked


def default_columns(ranked: Ranked) -> list[str]:
    """Rank, knobs, the status where one is not ok, and the results that there are."""
    rows = ranked.rows
    status = ["status"] if (rows["status"] != "ok").any() else []
    return ["rank", *ranked.knobs, *status, *results(rows)]


def results(rows: pd.DataFrame) -> list[str]:
    """Those of `DEFAULT` that any row has; `runs` only where a point was repeated."""
    several = bool((rows["runs"] > 1).any())
    return [c for c in DEFAULT if c in rows and any(values(rows, c)) and (c != "runs" or several)]


def values(rows: pd.DataFrame, column: str) -> list[str]:
    """One column as text; a configuration key gives way to a result column of the same name."""
    if column == "rank":
        return [f"{cell(r)}{'=' if t else ''}" for r, t in zip(rows["rank"], _in_tie(rows), strict=True)]
    name = column if column in rows else f"cfg:{column}"
    return [cell(value, column) for value in rows[name]]


def _in_tie(rows: pd.DataFrame) -> pd.Series:
    """Rows with the rank of another row of their provenance group."""
    return rows["rank"].notna() & rows.duplicated(["group", "rank"], keep=False)


def rows_table(rows: pd.DataFrame, columns: list[str], form: str) -> str:
    """The rows as one table. CSV keeps full precision and the columns' own names."""
    if form == "csv":
        out = pd.DataFrame({c: rows[c if c in rows else f"cfg:{c}"] for c in columns})
        out = out.apply(lambda s: s.map(lambda v: " ".join(v) if isinstance(v, tuple) else v))
        return out.to_csv(index=False, lineterminator="\n", float_format="%.10g")
    body = list(zip(*(values(rows, column) for column in columns), strict=True))
    return table([title(column) for column in columns], body, form)


def group_tables(ranked: Ranked, columns: list[str], form: str) -> str:
    """Finished rows: one table a provenance group, headed by what differs from the other groups."""
    finished = ranked.rows[ranked.rows["rank"].notna()]
    if finished.empty:
        return "no finished point yet\n"
    parts = []
    columns = [c for c in columns if c != "status" or finished["status"].ne("ok").any()]
    finished = finished.assign(flags=own_flags(finished))
    shown = [c for c in columns if c != "flags" or any(finished["flags"])]
    for _, part in finished.groupby("group"):
        if ranked.differs:
            first = part.iloc[0]
            parts.append("; ".join(f"{name}: {first[name]}" for name in ranked.differs) + "\n")
        parts.append(rows_table(part, shown, form))
    if ranked.differs:
        parts.append(f"Not ranked together: {', '.join(ranked.differs)} differ between the tables above.\n")
    return "\n".join(parts)


def own_flags(rows: pd.DataFrame) -> pd.Series:
    """Flags of each row, less those that all finished rows have, which are said once below the table."""
    common = common_flags(rows[rows["rank"].notna()])
    own = [tuple(flag for flag in flags if flag not in common) for flags in rows["flags"]]
    return pd.Series(own, index=rows.index, dtype=object)


def common_flags(rows: pd.DataFrame) -> list[str]:
    """Flags that all of several finished rows share."""
    listed = [set(flags) for flags in rows["flags"]]
    return [name for name in MEANING if len(listed) > 1 and all(name in flags for flags in listed)]


def failures(ranked: Ranked, form: str) -> str:
    """Rows without a rank: configuration, status and reason."""
    rest = ranked.rows[ranked.rows["rank"].isna()]
    if rest.empty:
        return ""
    header = [title(knob) for knob in ranked.knobs] + ["status", "reason"]
    shown = rest if form != "text" else rest.head(LIST_LIMIT)
    body = list(zip(*(values(shown, column) for column in [*ranked.knobs, "status", "reason"]), strict=True))
    more = f"and {len(rest) - len(shown)} more\n" if len(rest) > len(shown) else ""
    return table(header, body, form) + more


def notes(data: Data, ranked: Ranked) -> list[str]:
    """Sentences below the table: what all rows share, ties, what was left out."""
    rows = ranked.rows
    finished = rows[rows["rank"].notna()]
    lines = []
    first = int((finished["tie"] & (finished["rank"] == 1)).sum())
    below = int(finished["tie"].sum()) - first
    if first:
        lines.append(
            f"{first} row{'s' * (first > 1)} can't be told apart from the best of the group (95 % intervals): a tie."
        )
    if below:
        lines.append(
            f"{below} row{'s' * (below > 1)} ranked below a surely slower one can't be told apart from the best either:"
            f" {'their own intervals are' if below > 1 else 'its own interval is'} wide."
        )
    for point, root, difference in zip(rows["point"], rows["leaf_root"], rows["replay_difference"], strict=True):
        if isinstance(root, str):
            outcome = f"differs: {difference}" if isinstance(difference, str) else f"all passes equal, leaf root {root}"
            lines.append(f"Replay of {point}: {outcome}.")
    lines += [f"All rows: {name} ({MEANING[name]})." for name in common_flags(finished)]
    if len(finished) and all((finished[name] == UNKNOWN).all() for name in GATE):
        lines.append("No provenance was recorded: that the rows ran on the same code and hardware is taken on trust.")
    return lines + [f"{note}." for note in data.notes]
