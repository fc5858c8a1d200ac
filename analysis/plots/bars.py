"""Stacked bars: memory by kind, a step's time by what it is spent on, and where the sweep's time went."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.plots.series import label
from analysis.plots.style import COLORS, INK, Plot, context, figure, finish, legend
from analysis.rank import Ranked
from analysis.usage import PHASES, phases

SHOWN = 12  # bars; the best rows come first


def memory_by_kind(ranked: Ranked) -> Plot | None:
    """Peak memory of the best rows by kind (weights, gradients, …) as the runs recorded it, with the capacity."""
    rows = _best(ranked, "memory_by_kind")
    if rows.empty:
        return None
    kinds = list(dict.fromkeys(kind for parts in rows["memory_by_kind"] for kind in parts))
    parts = {kind: np.array([row.get(kind, 0.0) for row in rows["memory_by_kind"]]) for kind in kinds}
    with context():
        fig, ax = figure((5.8, 1.4 + 0.28 * len(rows)))
        rest = rows["peak_mem_gib"].to_numpy(float) - sum(parts.values())
        if (rest > 0.005 * rows["peak_mem_gib"]).any():
            parts["rest"] = np.maximum(np.nan_to_num(rest), 0)
        total = stack(ax, parts, _names(ranked, rows))
        capacity = rows["capacity_gib"].min()
        if capacity <= 8 * total.max():
            ax.axvline(capacity, color=INK, linestyle="--", linewidth=1.2, label=f"capacity {capacity:.4g} GiB")
        ax.set_xlabel("GiB")
        legend(fig, ax)
        heading = "Peak memory by kind"
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        caption = "Rank with the largest peak. Rest: activations and buffers; on a CPU also the program itself."
        return finish(fig, "memory_by_kind", heading, caption)


def step_parts(ranked: Ranked) -> Plot | None:
    """Communication against compute in a steady step, of the best rows; None where no run times its parts."""
    rows = _best(ranked, "step_parts")
    if rows.empty:
        return None
    kinds = list(dict.fromkeys(kind for parts in rows["step_parts"] for kind in parts))
    parts = {kind: np.array([row.get(kind, 0.0) for row in rows["step_parts"]]) for kind in kinds}
    rest = rows["step_s"].to_numpy(float) - sum(parts.values())
    if (rest > 0.01 * rows["step_s"]).any():
        parts["rest"] = np.maximum(rest, 0)
    with context():
        fig, ax = figure((5.8, 1.4 + 0.28 * len(rows)))
        stack(ax, parts, _names(ranked, rows))
        ax.set_xlabel("seconds a step")
        legend(fig, ax)
        heading = "Communication against compute"
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        caption = "Medians over the steady steps. Parts that overlap add up to more than the step."
        return finish(fig, "step_parts", heading, caption)


def time_spent(points: pd.DataFrame) -> Plot | None:
    """Where the sweep's device-hours went: phases of the points that finished, and of those that did not."""
    spent = phases(points)
    if spent.to_numpy().sum() <= 0:
        return None
    unit, scale = ("device-hours", 3600.0) if spent.to_numpy().sum() >= 1800 else ("device-seconds", 1.0)
    with context():
        fig, ax = figure((5.8, 1.6 + 0.42 * len(spent)))
        left = np.zeros(len(spent))
        for i, phase in enumerate(PHASES):
            if phase in spent and spent[phase].sum() > 0:
                width = spent[phase].to_numpy(float) / scale
                ax.barh(range(len(spent)), width, left=left, color=COLORS[i % len(COLORS)], label=phase, height=0.62)
                left += width
        for i, total in enumerate(left):
            ax.annotate(f"{total:.3g}", (total, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        ax.set_yticks(range(len(spent)), list(spent.index))
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, left.max() * 1.12)
        ax.set_xlabel(unit)
        legend(fig, ax)
        heading = "Where the time went"
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        return finish(fig, "time_spent", heading, "Devices times wall time, by how the points ended and what they did.")


def _best(ranked: Ranked, column: str) -> pd.DataFrame:
    rows = ranked.rows[(ranked.rows["group"] == 0) & ranked.rows["rank"].notna()]
    return rows[rows[column].map(lambda parts: isinstance(parts, dict) and len(parts) > 0)].head(SHOWN)


def _names(ranked: Ranked, rows: pd.DataFrame) -> list[str]:
    """Labels of the bars, without the knobs that they share."""
    differing = [k for k in ranked.knobs if rows[f"cfg:{k}"].astype(str).nunique() > 1]
    return [label(differing or ranked.knobs[:1], row) for _, row in rows.iterrows()]


def stack(ax: Axes, parts: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Horizontal stacked bars, the first on top; returns their lengths."""
    left = np.zeros(len(names))
    for i, (kind, width) in enumerate(parts.items()):
        ax.barh(range(len(names)), width, left=left, label=kind, color=COLORS[i % len(COLORS)], height=0.7)
        left = left + width
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return left
