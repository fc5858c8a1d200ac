"""The steps of the best points: a trace that shows what was dropped, and the histogram of what was kept."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.jsonl import read
from analysis.plots.series import label
from analysis.plots.style import COLORS, INK, Plot, context, finish
from analysis.rank import Ranked

SHOWN = 3


def trace(ranked: Ranked) -> Plot | None:
    """Step times of the best `SHOWN` points, one above the other; None where no file has them."""
    picked = []
    for _, row in ranked.rows[ranked.rows["rank"].notna()].head(SHOWN).iterrows():
        steps = read(Path(row["path"]) / "metrics.jsonl")
        seconds = steps.get("time/step")
        timed = np.isfinite(seconds)
        if timed.sum() > 3:
            picked.append((row, steps.get("step")[timed], seconds[timed]))
    if not picked:
        return None
    with context():
        fig = Figure(figsize=(5.8, 0.9 + 1.55 * len(picked)), layout="constrained")
        axes = fig.subplots(len(picked), 2, squeeze=False, gridspec_kw={"width_ratios": [3, 1]})
        for i, (row, step, seconds) in enumerate(picked):
            _one(axes[i], row, step, seconds, COLORS[i], ranked)
        axes[-1][0].set_xlabel("step")
        axes[-1][1].set_xlabel("steady steps")
        heading = "Step times of the best points"
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        caption = "Grey: steps dropped as warm-up. Line: the median of the rest. ▲: slower than the axis shows."
        return finish(fig, "step_times", heading, caption)


def _one(axes: np.ndarray, row: object, step: np.ndarray, seconds: np.ndarray, color: str, ranked: Ranked) -> None:
    dropped = int(row["dropped_steps"])  # type: ignore[index]
    kept = seconds[dropped:]
    middle = float(np.median(kept))
    low, high = np.percentile(kept, [2, 90])
    margin = max(1.5 * (high - low), 0.01 * middle)
    low, top = max(0.0, low - margin), high + margin
    left, right = axes
    if dropped:
        left.axvspan(step[0] - 0.5, step[dropped] - 0.5, color="#E4E7EA", zorder=0)
    inside = seconds <= top  # the axis shows the noise of steady steps; warm-up would flatten it
    left.plot(step[inside], seconds[inside], ".", color=color, markersize=4)
    if not inside.all():
        left.plot(step[~inside], np.full((~inside).sum(), top), "^", color=color, markersize=5, clip_on=False)
    left.axhline(middle, color=INK, linewidth=1)
    left.set_ylim(low, top)
    left.set_ylabel("seconds")
    left.set_title(label(ranked.knobs, row), fontsize=9, fontweight="normal")  # type: ignore[arg-type]
    right.hist(kept, bins=np.linspace(low, top, 25), orientation="horizontal", color=color)
    right.axhline(middle, color=INK, linewidth=1)
    right.set_ylim(low, top)
    right.tick_params(labelleft=False)
