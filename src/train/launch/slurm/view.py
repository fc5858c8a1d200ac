"""What a person sees while jobs run: each running point's step and loss, from the shared folder alone."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from train.launch.tell import say
from train.sweep.progress import PLAIN_SECONDS, LiveLines, last_line

#: running points that are shown at once
SHOWN = 8


class View(LiveLines):
    """Live on a terminal, a few lines every half minute elsewhere. `steps`: of every point, by folder name."""

    refreshes = 2

    def __init__(self, sweep: Path, steps: Mapping[str, int]) -> None:
        self.sweep, self.steps = sweep, steps
        self.running: list[tuple[str, int, str]] = []  # folder, steps done, what is shown beside it
        self.census = ""
        self.told = time.monotonic()

    def update(self, running: list[str], queued: int, ended: int) -> None:
        """The points that run now, by folder name, and how many wait and have ended."""
        if self.live is None and time.monotonic() - self.told < PLAIN_SECONDS:
            return
        self.told = time.monotonic()
        self.running = [(name, *self.look(name)) for name in running[:SHOWN]]
        more = f" ({len(running) - SHOWN} not shown)" if len(running) > SHOWN else ""
        self.census = f"{len(running)} running{more}, {queued} queued, {ended} ended"
        if self.live is None:
            for name, _, text in self.running:
                say(f"  {name}  {text}")
            say(f"  {self.census}")

    def look(self, name: str) -> tuple[int, str]:
        """(steps done, text) of a running point, as of the last line of its metrics."""
        found = last_line(self.sweep / name / "metrics.jsonl")
        if "loss" not in found:
            return 0, "starting"
        done = int(found["step"]) + 1
        speed = found["perf/throughput"]
        return done, f"step {done}/{self.steps[name]}  loss {found['loss']:.4f}  {speed:,.0f} tokens/s"

    def render(self) -> RenderableType:
        """The running points, each with its bar, and the census."""
        table = Table.grid(padding=(0, 1))
        for name, done, text in self.running:
            table.add_row(Text(name), ProgressBar(self.steps[name], done, width=24), Text(text))
        return Group(Text(""), table, Text(self.census))
