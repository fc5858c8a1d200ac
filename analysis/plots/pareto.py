"""Throughput against memory: which points nobody would choose, and which ones are a choice."""

import numpy as np

from analysis.plots.series import label
from analysis.plots.style import COLORS, INK, MARKERS, Plot, context, figure, finish, legend, thousands
from analysis.rank import Ranked
from analysis.text import cell, title

NAMED = 6  # points of the front that get their name written beside them


def pareto(ranked: Ranked) -> Plot | None:
    """tokens/s against peak memory with the front drawn; None with fewer than two points that have both."""
    rows = ranked.rows[(ranked.rows["group"] == 0) & ranked.rows["rank"].notna()]
    column = "tokens_per_s_per_gpu" if "nproc" in ranked.knobs else "tokens_per_s"
    rows = rows[rows["peak_mem_gib"].notna()].sort_values(["peak_mem_gib", column], ascending=[True, False])
    if len(rows) < 2:
        return None
    rate, memory = rows[column].to_numpy(float), rows["peak_mem_gib"].to_numpy(float)
    front = rate > np.concatenate([[-np.inf], np.maximum.accumulate(rate)[:-1]])
    few = [k for k in ranked.knobs if rows[f"cfg:{k}"].astype(str).nunique() <= len(COLORS)]
    by = "reduction" if "reduction" in few else few[0] if few else None
    with context():
        fig, ax = figure((5.8, 4.2))
        ax.step(memory[front], rate[front], where="post", color="#999999", linewidth=1.4, zorder=1)
        kinds = rows[f"cfg:{by}"].map(cell) if by else rows["status"].map(lambda _: "")
        for i, kind in enumerate(sorted(set(kinds))):
            mine = (kinds == kind).to_numpy()
            color = COLORS[i % len(COLORS)]
            kind_name = (label([by], rows[mine].iloc[0]) if by else "") or None
            marker = MARKERS[i % len(MARKERS)]
            ax.scatter(memory[mine], rate[mine], color=color, marker=marker, s=34, label=kind_name, zorder=3, alpha=0.9)
        rest = [k for k in ranked.knobs if k != by]
        if front.sum() <= NAMED and len(rest) == 1:  # longer names would cover one another
            named = {label(rest, rows.iloc[at]): at for at in np.flatnonzero(front)}  # one point of those named alike
            for name, at in named.items():
                last = at == np.flatnonzero(front)[-1] and front.sum() > 1
                ax.annotate(
                    name,
                    (memory[at], rate[at]),
                    xytext=(-5 if last else 5, 5),
                    textcoords="offset points",
                    fontsize=8,
                    ha="right" if last else "left",
                )
        ax.margins(x=0.12, y=0.12)
        capacity = rows["capacity_gib"].dropna()
        if len(capacity) and capacity.min() <= 1.6 * memory.max():
            ax.axvline(float(capacity.min()), color=INK, linestyle="--", linewidth=1.2)
            ax.annotate(
                f"capacity {capacity.min():.4g} GiB",
                (float(capacity.min()), 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                fontsize=8,
            )
        ax.yaxis.set_major_formatter(thousands)
        ax.set_xlabel("peak memory, GiB")
        ax.set_ylabel(title(column))
        legend(fig, ax)
        heading = "Throughput against memory"
        ax.set_title(heading)
        caption = "Line: the front; a point below it is slower than one that needs no more memory."
        if by:
            caption += f" Colour: {title(by)}."
        return finish(fig, "pareto", heading, caption)
