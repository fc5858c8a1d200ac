"""What a person sees while jobs run: each running point's step and loss, from the shared folder alone."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Optional, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from train.launch.tell import Unbreakable, say
from train.sweep.progress import PLAIN_SECONDS, last_line, live_terminal

#: running points that are shown at once
SHOWN = 8


class View:
    """Live on a terminal, a few lines every half minute elsewhere. `steps`: of every point, by folder name."""

    def __init__(self, sweep: Path, steps: Mapping[str, int]) -> None:
        self.sweep, self.steps = sweep, steps
        self.live: Optional[Live] = None
        self.running: list[tuple[str, int, str]] = []  # folder, steps done, what is shown beside it
        self.census = ""
        self.told = time.monotonic()

    def __enter__(self) -> Self:
        if live_terminal():
            self.live = Live(
                console=Console(file=Unbreakable()), get_renderable=self.render, refresh_per_second=2, transient=True
            )
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

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
