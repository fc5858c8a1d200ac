"""A result against a knob: tokens/s, MFU or peak memory, a line a series, with 95 % intervals and failed points."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.plots.series import Line, lines
from analysis.plots.style import (
    COLORS,
    INK,
    MARKERS,
    Plot,
    context,
    figure,
    finish,
    knob_axis,
    legend,
    numeric,
    positions,
    stem,
    thousands,
)
from analysis.rank import Ranked
from analysis.text import title


def against(ranked: Ranked, x: str, y: str) -> Plot | None:
    """`y` (tokens_per_s, mfu, …) against knob `x`; None with fewer than two values of x or no result."""
    drawn, note = lines(ranked, x)
    values = [v for line in drawn for v in (*line.rows[f"cfg:{x}"], *line.failed[f"cfg:{x}"])]
    if len(set(map(str, values))) < 2 or not any(line.rows[y].notna().any() for line in drawn):
        return None
    at, ordered, scale = positions(values)
    with context():
        fig, ax = figure()
        for i, line in enumerate(drawn):
            _draw(ax, line, (i, len(drawn)), _shifted(at, i, len(drawn), scale), x, y)
        knob_axis(ax, title(x), ordered, at, scale)
        _failed_marks(ax, drawn, at, x)
        ax.set_ylabel(title(y))
        if y == "tokens_per_s":
            ax.yaxis.set_major_formatter(thousands)
        legend(fig, ax)
        heading = f"{title(y).removesuffix(' %')} by {title(x)}"
        ax.set_title(heading)
        caption = "Median of the steady steps with its 95 % interval."
        if _cut_intervals(ax, drawn, y):
            caption += " Intervals that leave the axis are wider than it can show."
        if note:
            caption += f" Each point is the {note}."
        if any(len(line.failed) for line in drawn):
            caption += " × along the bottom: no result (out of memory or another failure)."
        return finish(fig, f"{stem(y)}_by_{stem(x)}", heading, caption)


def _cut_intervals(ax: Axes, drawn: list[Line], y: str) -> bool:
    """Ends the axis at twice the largest value where an interval would go beyond: it must not flatten all points."""
    largest = max(line.rows[y].max() for line in drawn)
    ends = max((line.rows[y] * np.exp(line.rows["half"].fillna(0.0))).max() for line in drawn)
    if not ends > 2 * largest > 0:
        return False
    ax.set_ylim(0, 2 * largest)
    return True


def memory(ranked: Ranked, x: str) -> Plot | None:
    """Peak memory inside the steps (largest rank) against knob `x`, with the device's capacity as a line."""
    drawn, note = lines(ranked, x)
    drawn = [line for line in drawn if line.rows["peak_mem_gib"].notna().any()]
    values = [v for line in drawn for v in (*line.rows[f"cfg:{x}"], *line.failed[f"cfg:{x}"])]
    if not drawn or len(set(map(str, values))) < 2:
        return None
    at, ordered, scale = positions(values)
    with context():
        fig, ax = figure()
        for i, line in enumerate(drawn):
            _draw(ax, line, (i, len(drawn)), _shifted(at, i, len(drawn), scale), x, "peak_mem_gib", interval=False)
        knob_axis(ax, title(x), ordered, at, scale)
        top = max(line.rows["peak_mem_gib"].max() for line in drawn)
        capacity_line(ax, ranked.rows["capacity_gib"], top)
        _failed_marks(ax, drawn, at, x)
        ax.set_ylabel("peak memory, GiB")
        legend(fig, ax)
        heading = f"Peak memory by {title(x)}"
        ax.set_title(heading)
        kinds = set(ranked.rows["memory_kind"].dropna())
        caption = "Largest rank, inside the training steps" + (
            " (resident set of the process)." if kinds == {"rss"} else "."
        )
        caption += f" Each point is the {note} by tokens/s." if note else ""
        return finish(fig, f"peak_memory_by_{stem(x)}", heading, caption)


def capacity_line(ax: Axes, capacities: pd.Series, top: float) -> None:
    """The capacity as a dashed line; at the top edge, and said so, where its own place would flatten the data."""
    found = sorted(capacities.dropna().unique())
    if not found:
        return
    capacity = float(found[0])
    if capacity <= 8 * top:
        ax.axhline(capacity, color=INK, linestyle="--", linewidth=1.2)
        ax.annotate(
            f"capacity {capacity:.4g} GiB",
            (0.01, capacity),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
            va="bottom",
        )
        ax.set_ylim(0, max(capacity, top) * 1.12)
    else:
        ax.axhline(top * 1.17, color=INK, linestyle="--", linewidth=1.2)
        ax.annotate(
            f"capacity {capacity:.4g} GiB, far above this scale",
            (0.01, top * 1.17),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            fontsize=9,
            va="top",
        )
        ax.set_ylim(0, top * 1.2)


def _shifted(at: dict[object, float], i: int, count: int, scale: str) -> dict[object, float]:
    """Each line a little beside the others, so that equal ones and their intervals are seen."""
    aside = (i + 0.5) / count - 0.5  # -0.5 … 0.5
    if scale == "category":
        return {value: place + 0.5 * aside for value, place in at.items()}
    low, high = min(at.values()), max(at.values())
    width = min(0.004 * count, 0.02)  # of the axis
    if scale == "log":
        return {value: place * (high / low) ** (width * aside) for value, place in at.items()}
    return {value: place + (high - low) * width * aside for value, place in at.items()}


def _draw(
    ax: Axes, line: Line, place: tuple[int, int], at: dict[object, float], x: str, y: str, interval: bool = True
) -> None:
    rows = line.rows[line.rows[y].notna()]
    xs = [at[v] for v in rows[f"cfg:{x}"]]
    ys = rows[y].to_numpy(float)
    i, count = place
    color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
    joined = numeric(line.rows[f"cfg:{x}"])  # between names there is nothing to join
    under = min(count - 1 - i, 2)  # lines below others are wider: where two coincide, both are seen
    size = (5.0 if len(xs) <= 15 else 3.0) + under
    style = "-" if joined else "none"
    ax.plot(xs, ys, ls=style, color=color, marker=marker, label=line.label or None, lw=1.6 + 0.8 * under, ms=size)
    half = rows["half"].to_numpy(float)
    if interval and np.isfinite(half).any():
        half = np.nan_to_num(half)
        low, high = ys * np.exp(-half), ys * np.exp(half)
        if len(xs) > 15 and joined:
            ax.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            ax.errorbar(xs, ys, yerr=[ys - low, high - ys], fmt="none", ecolor=color, elinewidth=1.3, capsize=3)


def _failed_marks(ax: Axes, drawn: list[Line], at: dict[object, float], x: str) -> None:
    """One × for every value of x at which a line has no result, beside each other along the bottom."""
    for i, line in enumerate(drawn):
        for value in line.failed[f"cfg:{x}"]:
            ax.annotate(
                "×",
                (at[value], 0),
                xycoords=("data", "axes fraction"),
                xytext=(7 * (i - (len(drawn) - 1) / 2), 6),
                textcoords="offset points",
                ha="center",
                color=COLORS[i % len(COLORS)],
                fontsize=12,
                fontweight="bold",
            )
