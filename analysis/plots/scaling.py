"""Throughput over the number of devices, and its efficiency against ideal scaling from the fewest."""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.plots.series import lines
from analysis.plots.style import COLORS, INK, MARKERS, Plot, context, finish, knob_axis, legend, positions, thousands
from analysis.rank import Ranked


def scaling(ranked: Ranked, x: str = "nproc") -> Plot | None:
    """tokens/s and efficiency over devices, a line a series; None where the number of devices doesn't vary."""
    if x not in ranked.knobs:
        return None
    drawn, note = lines(ranked, x)
    drawn = [line for line in drawn if line.rows["tokens_per_s"].notna().sum() > 1]
    if not drawn:
        return None
    at, ordered, _ = positions([v for line in drawn for v in line.rows[f"cfg:{x}"]])
    with context():
        fig = Figure(figsize=(5.8, 3.6), layout="constrained")
        left, right = fig.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
        for i, line in enumerate(drawn):
            devices = line.rows[f"cfg:{x}"].astype(float).to_numpy()
            rate = line.rows["tokens_per_s"].to_numpy(float)
            ideal = rate[0] / devices[0] * devices
            look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "ms": 5.0}
            left.plot(devices, ideal, color=look["color"], linestyle=":", linewidth=1.2)
            left.plot(devices, rate, label=line.label or "measured", **look)
            right.plot(devices, 100 * rate / ideal, **look)
        left.plot([], [], color=INK, linestyle=":", linewidth=1.2, label="ideal")
        right.axhline(100, color=INK, linestyle=":", linewidth=1.2)
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        left.yaxis.set_minor_locator(NullLocator())
        left.yaxis.set_major_formatter(thousands)
        for ax in (left, right):
            knob_axis(ax, "devices", ordered, at, "log")
        left.set_ylabel("tokens/s")
        right.set_ylabel("efficiency, %")
        low = min(
            100 * (line.rows["tokens_per_s_per_gpu"] / line.rows["tokens_per_s_per_gpu"].iloc[0]).min()
            for line in drawn
        )
        right.set_ylim(max(0, min(low - 5, 80)), 105)
        legend(fig, left)
        heading = "Scaling over devices"
        left.set_title(heading)
        caption = "Dotted: ideal, from the fewest devices of each line. Right: measured over ideal."
        return finish(fig, "scaling", heading, caption + (f" Each point is the {note}." if note else ""))
