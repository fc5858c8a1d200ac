"""`python -m analysis ls`: the sweeps of a folder with their census, newest last."""

from pathlib import Path
from typing import Any

from analysis.errors import BadInput
from analysis.files import dig, read_json
from analysis.load import STATUSES
from analysis.scan import children, find_sweeps
from analysis.text import table


def render(root: Path) -> str:
    """One line a sweep, from status.json alone, so that thousands of points are listed quickly."""
    if not root.exists():
        raise BadInput(f"no such folder: {root}")
    if not root.is_dir():
        raise BadInput(f"not a folder: {root}")
    try:
        sweeps = find_sweeps(root)
    except BadInput:
        if children(root):
            raise
        return f"no sweeps in {root}\n"
    rows = []
    for sweep in sorted(sweeps, key=lambda s: (str(s.meta.get("created") or ""), s.name)):
        counts: dict[str, int] = {}
        for point in sweep.points:
            state: Any = dig(read_json(point.path / "status.json"), "status")
            name = state if isinstance(state, str) else "pending"
            counts[name] = counts.get(name, 0) + 1
        ordered = sorted(counts, key=lambda s: (STATUSES.index(s) if s in STATUSES else len(STATUSES), s))
        created = str(sweep.meta.get("created") or "")[:16].replace("T", " ")
        report = "yes" if (sweep.path / "report.html").is_file() else ""
        rows.append(
            [sweep.name, created, str(len(sweep.points)), ", ".join(f"{counts[s]} {s}" for s in ordered), report]
        )
    return table(["sweep", "created (UTC)", "points", "census", "report"], rows)
