"""One look for all plots, colour-blind safe, and bytes that depend on nothing but the data."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color universal design"; black is kept for reference lines, yellow is too light on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6F4E9C", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, GRID, FAILED = "#222222", "#DDDDDD", "#B22222"
SIZE = (5.8, 3.8)  # inches; small, so that the text can still be read on a telephone

RC = {
    "font.family": "DejaVu Sans",  # matplotlib ships it, so that every machine draws the same
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "mfu-sweep",  # ids in the SVG would be random otherwise
    "svg.fonttype": "path",
    "path.simplify": False,
    "timezone": "UTC",
}


@dataclass(frozen=True)
class Plot:
    """A finished picture: `name` is the file's stem, `caption` says what is seen and how to read it."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def figure(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; call inside `matplotlib.rc_context(RC)`."""
    fig = Figure(figsize=size, layout="constrained")
    return fig, fig.add_subplot()


def finish(fig: Figure, name: str, title: str, caption: str) -> Plot:
    """SVG and PNG bytes, without dates and program versions."""
    svg, png = io.BytesIO(), io.BytesIO()
    fig.savefig(png, format="png", dpi=150, metadata={"Software": None})
    fig.set_layout_engine("none")  # laid out once: the second picture keeps the places, in half the time
    fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name, title, caption, svg.getvalue(), png.getvalue())


def legend(fig: Figure, ax: Axes) -> None:
    """Names of the lines below the axes, in as few rows as fit; nothing for a single one."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        fit = max(1, 72 // (max(map(len, labels)) + 8))
        rows = -(-len(labels) // fit)
        fig.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // rows))  # rows of equal length


def context() -> Any:
    """The style, for a `with` block around all drawing."""
    return matplotlib.rc_context(RC)  # type: ignore[arg-type]


def numeric(values: pd.Series) -> bool:
    """Whether a knob can be an axis with a scale."""
    if values.map(lambda v: isinstance(v, (bool, np.bool_))).any():
        return False
    return bool(pd.to_numeric(values, errors="coerce").notna().all())


def ordered_values(values: pd.Series) -> list[object]:
    """Distinct values, numbers by size, anything else by name."""
    distinct = values.drop_duplicates()
    return sorted(distinct, key=float if numeric(distinct) else str)


def stem(name: str) -> str:
    """A column's name as part of a file name."""
    return name.replace(".", "_").replace("/", "_")


def thousands(value: float, _: object = None) -> str:
    """Tick label of a large number."""
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:g}"


def positions(values: Sequence[object]) -> tuple[dict[object, float], list[object], str]:
    """Where each distinct value of a knob goes on an axis, the values in order, and the scale.

    `linear` or `log` for numbers (log2 where few span a factor of eight or more), `category` for text.
    """
    series = pd.Series(list(values), dtype=object)
    ordered = ordered_values(series)
    if not numeric(series):
        return {v: float(i) for i, v in enumerate(ordered)}, ordered, "category"
    few = len(ordered) <= 12
    low, high = float(str(ordered[0])), float(str(ordered[-1]))
    return {v: float(str(v)) for v in ordered}, ordered, "log" if few and low > 0 and high / low >= 8 else "linear"


def knob_axis(ax: Axes, label: str, ordered: Sequence[object], at: dict[object, float], scale: str) -> None:
    """Ticks at the values that were run, as far as they fit."""
    ax.set_xlabel(label)
    if scale == "log":
        ax.set_xscale("log", base=2)
    if scale == "category":
        ax.set_xlim(-0.5, len(ordered) - 0.5)
    elif len(ordered) > 12:
        return  # too many to name: matplotlib's own ticks
    shown = [ordered[i] for i in sorted(set(np.linspace(0, len(ordered) - 1, 24).astype(int)))]
    names = [f"{v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else str(v) for v in shown]
    crowded = sum(len(name) + 2 for name in names) > 58
    ax.set_xticks([at[v] for v in shown], names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
    ax.set_xticks([], minor=True)
