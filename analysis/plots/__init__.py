"""All plots of a sweep, drawn from ranked rows; each says by itself whether it has anything to show."""

import pandas as pd

from analysis.plots.bars import memory_by_kind, step_parts, time_spent
from analysis.plots.experts import imbalance
from analysis.plots.heat import heatmap
from analysis.plots.knob import against, memory
from analysis.plots.pareto import pareto
from analysis.plots.scaling import scaling
from analysis.plots.schedule import schedule
from analysis.plots.steps import trace
from analysis.plots.style import Plot
from analysis.rank import Ranked

MORE_KNOBS = 3  # knobs besides the main one that get a plot of their own


def draw(ranked: Ranked, points: pd.DataFrame) -> list[Plot]:
    """The plots that this sweep has data for, in the order of the report."""
    if ranked.rows["rank"].isna().all():
        return [plot for plot in [time_spent(points)] if plot]
    plots: list[Plot | None] = []
    knob = main_knob(ranked)
    if knob:
        plots += [against(ranked, knob, "mfu"), against(ranked, knob, "tokens_per_s"), memory(ranked, knob)]
        others = [k for k in ranked.knobs if k != knob]
        if others:
            plots.append(heatmap(ranked, knob, others[0], "tokens_per_s"))
        plots += [against(ranked, other, "tokens_per_s") for other in others[:MORE_KNOBS] if other != "nproc"]
    plots += [
        memory_by_kind(ranked),
        pareto(ranked),
        scaling(ranked),
        step_parts(ranked),
        schedule(ranked),
        trace(ranked),
        imbalance(ranked),
        time_spent(points),
    ]
    return [plot for plot in plots if plot]


def main_knob(ranked: Ranked) -> str | None:
    """The knob along the x axis: micro_batch where it varies, else the one with most values."""
    if "micro_batch" in ranked.knobs:
        return "micro_batch"
    return max(ranked.knobs, key=lambda k: ranked.rows[f"cfg:{k}"].nunique(), default=None)
