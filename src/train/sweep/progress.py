"""What a person sees while a sweep runs: a live view on a terminal, plain lines elsewhere (also with NO_COLOR).

Fed by the supervisor's `on_progress` (20 times a second) and the tail of the point's metrics.jsonl.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from train.launch.classify import FAILED
from train.launch.supervisor import Progress
from train.launch.tell import Unbreakable, say

#: seconds between two looks at metrics.jsonl
LOOK_SECONDS = 0.25
#: seconds between two lines about a running point where there is no terminal
PLAIN_SECONDS = 30.0


def live_terminal() -> bool:
    """Whether output may move the cursor: a capable terminal, and the user did not ask for plain output."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdout.isatty() and not plain


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A line that shows on a terminal, and only there, while something takes seconds."""
    if not live_terminal():
        yield
        return
    with Console(file=Unbreakable()).status(text):
        yield


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty while there is none."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 4096))
            lines = f.read().split(b"\n")
        found = json.loads(lines[-2])
    except (OSError, ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class LiveLines(ABC):
    """Something that is drawn again and again below lines that stay; without a terminal, the lines alone. A context manager."""

    live: Optional[Live] = None
    refreshes: float = 4  # a second

    @abstractmethod
    def render(self) -> RenderableType:
        """What is drawn."""

    def __enter__(self) -> Self:
        if live_terminal():
            self.live = Live(
                console=Console(file=Unbreakable()), get_renderable=self.render, refresh_per_second=self.refreshes,
                transient=True,
            )  # fmt: skip
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


@dataclass
class View(LiveLines):
    """One sweep's progress. `statuses` lists the current status of every point of the command."""

    statuses: Callable[[], list[str]] = list
    folder: Optional[Path] = None  # of the point that runs
    began: float = 0.0  # monotonic, of the point
    looked: float = 0.0
    told: float = 0.0
    took: list[float] = field(default_factory=list)  # seconds of the points that are done
    left: int = 0  # points not started, without the running one
    now: Optional[Progress] = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def update(self, progress: Progress) -> None:
        """The running point's state, from the supervisor's loop."""
        now = time.monotonic()
        if progress.folder != self.folder:
            if self.folder is not None:
                self.took.append(now - self.began)
            self.folder, self.began, self.told, self.metrics = progress.folder, now, now, {}
            self.left = sum(s in FAILED for s in self.statuses()) - 1  # the running one is not left
        self.now = progress
        if now - self.looked >= LOOK_SECONDS:
            self.looked = now
            self.metrics = last_line(progress.folder / "metrics.jsonl")
        if self.live is None and now - self.told >= PLAIN_SECONDS:
            self.told = now
            self.say("  " + self.sentence())

    def seconds_left(self) -> Optional[float]:
        """Estimate from the pace of the running point and the mean of the finished ones; None before there is either."""
        if self.now is None:
            return None
        elapsed = time.monotonic() - self.began
        step_s = self.metrics.get("time/step")
        point = None if step_s is None else max(0.0, (self.now.steps - self.now.step - 1) * step_s)
        typical = sum(self.took) / len(self.took) if self.took else None if point is None else elapsed + point
        if typical is None:
            return None
        return (max(0.0, typical - elapsed) if point is None else point) + self.left * typical

    def sentence(self) -> str:
        """The state in one line: point, step, loss, tokens/s, points left, time left."""
        assert self.now is not None and self.folder is not None
        parts = [self.folder.name, *self.numbers(), f"{self.left} more point{'s' * (self.left != 1)}"]
        left = self.seconds_left()
        return "  ".join(parts + ([f"{duration(left)} left"] if left is not None else []))

    def numbers(self) -> list[str]:
        """Step, loss and speed as text; the phase while there is no step."""
        assert self.now is not None
        if "loss" not in self.metrics:
            return [{"start": "starting", "build": "building"}.get(self.now.phase, self.now.phase)]
        return [
            f"step {int(self.metrics['step']) + 1}/{self.now.steps}",
            f"loss {self.metrics['loss']:.4f}",
            f"{self.metrics['perf/throughput']:,.0f} tokens/s",
        ]

    def render(self) -> RenderableType:
        """What the live view shows: the running point, and the sweep."""
        if self.now is None or self.folder is None:
            return Text("")
        done, total = len(self.took), len(self.took) + 1 + self.left
        step = int(self.metrics.get("step", -1)) + 1
        bars = Table.grid(padding=(0, 1))
        bars.add_row(self.folder.name, ProgressBar(self.now.steps, step, width=24), "  ".join(self.numbers()))
        left = self.seconds_left()
        ends = f"{done}/{total} points" + (f"  {duration(left)} left" if left is not None else "")
        bars.add_row("", ProgressBar(total, done, width=24), ends)
        return Group(Text(""), bars)
