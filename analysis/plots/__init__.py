"""All plots of a sweep, drawn from ranked rows; each says by itself whether it has anything to show."""

from analysis.plots.knob import against, memory
from analysis.plots.style import Plot
from analysis.rank import Ranked


def draw(ranked: Ranked) -> list[Plot]:
    """The plots that this sweep has data for, in the order of the report."""
    knob = main_knob(ranked)
    plots = []
    if knob:
        plots += [against(ranked, knob, "mfu"), against(ranked, knob, "tokens_per_s"), memory(ranked, knob)]
    return [plot for plot in plots if plot]


def main_knob(ranked: Ranked) -> str | None:
    """The knob along the x axis: micro_batch where it varies, else the one with most values."""
    if "micro_batch" in ranked.knobs:
        return "micro_batch"
    return max(ranked.knobs, key=lambda k: ranked.rows[f"cfg:{k}"].nunique(), default=None)
