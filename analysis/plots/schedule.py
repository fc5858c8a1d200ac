"""A pipeline's last step as it ran: ranks against time, a box for what a rank computed for a micro-batch."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.files import number, read_json
from analysis.plots.series import label
from analysis.plots.style import COLORS, Plot, context, figure, finish, legend
from analysis.rank import Ranked

#: kind → its name and colour; later stages of a rank are paler
KINDS = {
    "F": ("forward", COLORS[0]),
    "B": ("backward", COLORS[1]),
    "I": ("backward: inputs", COLORS[5]),
    "W": ("backward: weights", COLORS[2]),
}
LABELLED = 0.012  # share of the axis below which a box is too narrow for a number


def schedule(ranked: Ranked) -> Plot | None:
    """Of the best point that kept its schedule (profile=true); None where none did."""
    for _, row in ranked.rows[ranked.rows["rank"].notna()].iterrows():
        kept = read_json(Path(row["path"]) / "schedule.json")
        if kept.get("ranks") and number(kept.get("seconds")) > 0:
            return draw(kept, label(ranked.knobs, row))
    return None


def draw(kept: dict[str, Any], name: str) -> Plot:
    """`kept`: a schedule.json; `name`: of the point."""
    ranks = kept["ranks"]
    unit, scale = ("ms", 1e3) if kept["seconds"] < 10 else ("s", 1.0)
    width = kept["seconds"] * scale
    with context():
        fig, ax = figure((7.4, 1.5 + 0.42 * len(ranks)))
        for row, each in enumerate(ranks):
            _boxes(ax, row, each["actions"], scale, width)
        for kind, (words, color) in KINDS.items():
            if any(action[2] == kind for each in ranks for action in each["actions"]):
                ax.bar([0], [0], color=color, label=words)
        ax.set_xlim(0, width)
        ax.set_ylim(len(ranks) - 0.45, -0.55)
        ax.set_yticks(range(len(ranks)), [f"rank {each['rank']}" for each in ranks])
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(f"{unit} since the step began")
        legend(fig, ax)
        heading = f"The pipeline as executed: {kept['schedule']}" + (f", {name}" if name else "")
        fig.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=11)
        stages = " Paler: a rank's later stages." if kept.get("virtual", 1) > 1 else ""
        caption = (
            f"Last step. Numbers: micro-batches.{stages} Idle {100 * kept['idle']:.1f} % of the time, "
            f"{100 * kept['idle_theory']:.1f} % if only compute took time and all stages were equal."
        )
        return finish(fig, "schedule", heading, caption)


def _boxes(ax: Axes, row: int, actions: list[Any], scale: float, width: float) -> None:
    stages = sorted({action[0] for action in actions})
    for stage, micro_batch, kind, begin, end in actions:
        alpha = 1 - 0.5 * stages.index(stage) / max(1, len(stages) - 1)
        left, length = begin * scale, (end - begin) * scale
        ax.add_patch(
            Rectangle(
                (left, row - 0.38), length, 0.76, facecolor=KINDS[kind][1], alpha=alpha, edgecolor="white", lw=0.5
            )
        )
        if length > LABELLED * width:
            ax.text(left + length / 2, row, str(micro_batch), ha="center", va="center", fontsize=7, color="white")
