"""How evenly the experts of a mixture were used: by step, and in the end by layer."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from analysis.jsonl import read
from analysis.plots.series import label
from analysis.plots.style import COLORS, INK, Plot, context, finish
from analysis.rank import Ranked

SHOWN = 4


def imbalance(ranked: Ranked) -> Plot | None:
    """Largest over mean load of the best points' experts by step, and all loads of the best one; None without experts."""
    rows = ranked.rows[ranked.rows["rank"].notna() & ranked.rows["imbalance"].notna()].head(SHOWN)
    if rows.empty:
        return None
    with context():
        fig = Figure(figsize=(5.8, 4.6), layout="constrained")
        over, by_layer = fig.subplots(2, 1)
        for (_, row), color in zip(rows.iterrows(), COLORS):
            steps = read(Path(row["path"]) / "metrics.jsonl")
            over.plot(steps.get("step"), steps.get("moe/imbalance"), color=color, label=label(ranked.knobs, row))
        over.axhline(1, color=INK, linewidth=1, linestyle=":")
        over.set_xlabel("step")
        over.set_ylabel("largest / mean")
        if len(rows) > 1:
            over.legend()
        _loads(fig, by_layer, rows.iloc[0]["expert_load"])
        heading = "Load of the experts"
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        caption = (
            "Above: tokens of the most loaded expert over the mean, averaged over layers; 1 (dotted) is even. "
            "Below: each expert's tokens over the mean, all steps of the best point, experts sorted within a layer."
        )
        return finish(fig, "expert_load", heading, caption)


def _loads(fig: Figure, axes: Any, load: dict[str, list[float]]) -> None:
    """Layers down, experts across, each layer's from most to least loaded."""
    table = np.array([sorted(shares, reverse=True) for shares in load.values()])
    table = table * table.shape[1]
    spread = max(0.05, float(np.abs(table - 1).max()))
    image = axes.imshow(table, aspect="auto", cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread)
    axes.set_xlabel("experts, most loaded first")
    axes.set_ylabel("layer")
    axes.grid(False)
    bar = fig.colorbar(image, ax=axes, label="tokens / mean")
    bar.outline.set_visible(False)
