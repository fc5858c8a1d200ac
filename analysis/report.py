"""The report: report.html, report.md, summary.csv and .parquet, plots/ in the sweep's folder.

The same runs give the same bytes, whatever the order of their files and the time of day.
"""

import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import page, published, query
from analysis.errors import BadInput
from analysis.load import Data, load
from analysis.plots import against, draw
from analysis.rank import Ranked, rank
from analysis.table import rows_table

NOT_EXPORTED = ("digest", "key", "path", "in_grid", "overrides")


def write_report(folder: Path | str | Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report of one or more sweeps and returns the path of report.html.

    Goes into `out`, or else into the folder of the one sweep. Works at any time, also while the sweep runs. Raises
    BadInput where a folder is not a sweep.
    """
    folders = [Path(folder)] if isinstance(folder, (str, Path)) else list(folder)
    data = load(folders)
    if out is None and (len(folders) > 1 or not folders[0].is_dir()):
        raise BadInput("the report of several sweeps or of a file needs --out FOLDER")
    target = out or folders[0]
    ranked = rank(data)
    plots = draw(ranked, data.points)
    names = {
        f"{plot.name}.{ending}": content for plot in plots for ending, content in (("svg", plot.svg), ("png", plot.png))
    }
    for name, picture in names.items():
        replace(target / "plots" / name, picture)
    for old in (target / "plots").glob("*.*"):  # drawn for an earlier state of the sweep
        if old.suffix in (".svg", ".png") and old.name not in names:
            old.unlink()
    write_summary(target, ranked)
    content = page.content(target.resolve().name, data, ranked, plots, published.nearby(ranked))
    replace(target / "report.md", page.markdown(content).encode())
    replace(target / "report.html", page.html(content).encode())
    return target / "report.html"


def write_summary(target: Path, ranked: Ranked) -> None:
    """summary.csv and summary.parquet: every row, every column, full precision."""
    rows = ranked.rows.drop(columns=[c for c in NOT_EXPORTED if c in ranked.rows])
    columns = [c.removeprefix("cfg:") for c in rows.columns]
    replace(target / "summary.csv", rows_table(rows, columns, "csv").encode())
    flat = rows.rename(columns=lambda c: c.removeprefix("cfg:"))
    flat = flat.loc[:, ~flat.columns.duplicated()]
    buffer = io.BytesIO()
    flat.apply(_plain).to_parquet(buffer, index=False)
    replace(target / "summary.parquet", buffer.getvalue())


def _plain(column: pd.Series) -> pd.Series:
    """A column that parquet can hold: mixed and nested values become text."""
    if column.dtype != object:
        return column
    return column.map(
        lambda v: None if v is None or v != v else " ".join(map(str, v)) if isinstance(v, tuple) else str(v)
    )


def write_plot(folders: Sequence[Path], x: str, y: str, where: str | None, out: Path) -> Path:
    """One plot of result `y` against knob `x`. Raises BadInput for unknown names or where there is nothing to draw."""
    if out.suffix not in (".svg", ".png"):
        raise BadInput(f"--out must end in .svg or .png, not '{out.name}'")
    data: Data = load(folders)
    if where:
        data = query.where(data, where)
    ranked = rank(data)
    query.known(x, [str(c) for c in data.config], "knob")
    query.sort_column(y, data)
    plot = against(ranked, x, y)
    if plot is None:
        raise BadInput(f"nothing to draw: {x} has fewer than two values, or no point has a result for {y}")
    replace(out, plot.svg if out.suffix == ".svg" else plot.png)
    return out


def replace(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
