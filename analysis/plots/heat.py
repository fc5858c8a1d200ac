"""Two knobs as a heatmap: the best result in each cell; cells without one are hatched and say why."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from analysis.plots.style import FAILED, INK, Plot, context, figure, finish, knob_axis, ordered_values, stem, thousands
from analysis.rank import Ranked
from analysis.text import cell, title

MAX_CELLS = 24  # along one side
TEXT_CELLS = 90  # more cells than this are told by colour alone
WORST = ("oom", "infeasible", "invalid", "timeout", "crashed", "lost", "interrupted", "running", "pending")


def heatmap(ranked: Ranked, x: str, y: str, value: str) -> Plot | None:
    """Column `value` over knobs `x` and `y`, each cell the best over the other knobs; None if it is not a grid."""
    rows = ranked.rows[ranked.rows["group"].isin([0, -1]) & ranked.rows[[f"cfg:{x}", f"cfg:{y}"]].notna().all(axis=1)]
    xs, ys = ordered_values(rows[f"cfg:{x}"]), ordered_values(rows[f"cfg:{y}"])
    if not (2 <= len(xs) <= MAX_CELLS and 2 <= len(ys) <= MAX_CELLS) or rows[value].notna().sum() < 2:
        return None
    numbers = np.full((len(ys), len(xs)), np.nan)
    status: dict[tuple[int, int], str] = {}
    for (a, b), part in rows.groupby([f"cfg:{x}", f"cfg:{y}"], sort=False):
        i, j = ys.index(b), xs.index(a)
        finished = part[part["rank"].notna()]
        if len(finished):
            numbers[i, j] = finished.iloc[0][value]
        else:
            status[i, j] = _status(part)
    with context():
        fig, ax = figure((5.8, min(2.2 + 0.45 * len(ys), 9)))
        image = ax.imshow(numbers, cmap="cividis", aspect="auto", origin="lower")
        _write_cells(ax, numbers, status)
        at = {v: float(i) for i, v in enumerate(xs)}
        knob_axis(ax, title(x), xs, at, "category")
        names = [cell(v) for v in ys]
        ax.set_yticks(range(len(ys)), names)
        ax.set_ylabel(title(y))
        ax.grid(False)
        bar = fig.colorbar(image, ax=ax, label=title(value))
        bar.outline.set_visible(False)
        if np.nanmax(numbers) >= 1000:
            bar.ax.yaxis.set_major_formatter(thousands)
        heading = f"{title(value)}: {title(x)} × {title(y)}"
        ax.set_title(heading)
        caption = "Best point of each cell" + (" over the other knobs" if len(ranked.knobs) > 2 else "") + "."
        caption += " Hatched: no result, with its status." if status else ""
        return finish(fig, f"heatmap_{stem(value)}_{stem(x)}_{stem(y)}", heading, caption)


def _status(part: pd.DataFrame) -> str:
    found = set(part["status"])
    return next((name for name in WORST if name in found), "no result")


def _write_cells(ax: Any, numbers: np.ndarray, status: dict[tuple[int, int], str]) -> None:
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    write = numbers.size <= TEXT_CELLS
    for i, j in np.ndindex(*numbers.shape):
        value = numbers[i, j]
        if np.isfinite(value) and write:
            dark = (value - low) < 0.55 * (high - low) if high > low else True
            text = f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            ax.text(j, i, text, ha="center", va="center", fontsize=9, color="white" if dark else INK)
        elif (i, j) in status:
            box = Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="#F6F1EE", edgecolor=FAILED, hatch="////", linewidth=0)
            ax.add_patch(box)
            if write:
                ax.text(
                    j,
                    i,
                    status[i, j],
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
                )
