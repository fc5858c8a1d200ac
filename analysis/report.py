"""The report: report.html, report.md, summary.csv and plots/ in the sweep's folder, the same bytes for the same runs."""

import os
import tempfile
from pathlib import Path

from analysis import page
from analysis.load import load
from analysis.plots import draw
from analysis.rank import rank
from analysis.table import rows_table


def write_report(folder: Path | str) -> Path:
    """Writes the report into `folder` and returns the path of report.html.

    Works at any time, also while the sweep runs. Raises BadInput where `folder` is not a sweep.
    """
    folder = Path(folder)
    data = load(folder)
    ranked = rank(data)
    plots = draw(ranked, data.points)
    for plot in plots:
        replace(folder / "plots" / f"{plot.name}.svg", plot.svg)
        replace(folder / "plots" / f"{plot.name}.png", plot.png)
    summary = ranked.rows
    columns = [c for c in summary.columns if c not in ("digest", "key", "path", "in_grid")]
    replace(folder / "summary.csv", rows_table(summary, [c.removeprefix("cfg:") for c in columns], "csv").encode())
    content = page.content(folder, data, ranked, plots)
    replace(folder / "report.md", page.markdown(content).encode())
    replace(folder / "report.html", page.html(content).encode())
    return folder / "report.html"


def replace(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
