"""`python -m analysis watch DIR`: a running or finished sweep, live, from its files alone, on any node that sees them."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from analysis.alive import gone
from analysis.files import number, read_config, read_json
from analysis.jsonl import parse_lines
from analysis.load import STATUSES
from analysis.scan import PointFolder, SweepFolder, read_sweep
from analysis.text import cell
from analysis.usage import wall_seconds

TAIL_BYTES = 65536  # holds the last lines of any metrics file
PATIENCE = 30.0  # seconds without a running point before a sweep with pending points counts as stopped
RECENT = 6  # finished points shown
AGAIN = ("interrupted", "lost")  # a scheduler or the next command may start such a point again


@dataclass(frozen=True)
class Running:
    """A point that runs now, as of its last metrics line; NaN where there is none yet."""

    name: str
    step: float
    steps: float
    loss: float
    tokens_per_s: float


@dataclass
class Snapshot:
    """The sweep at one moment. `finished`: (name, status, detail), in the order in which they ended."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    finished: list[tuple[str, str, str]] = field(default_factory=list)
    seconds_a_point: float = float("nan")
    queued: int = 0  # points that a scheduler has and that will start without anybody's doing

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def left(self) -> int:
        return self.counts.get("running", 0) + self.counts.get("pending", 0)

    def line(self) -> str:
        """`3 of 6 points done: 2 ok, 1 oom, 1 running, 2 pending; about 4 min left`."""
        order = sorted(
            self.counts, key=lambda s: (s in ("running", "pending"), STATUSES.index(s) if s in STATUSES else 99, s)
        )
        parts = ", ".join(f"{self.counts[s]} {s}" for s in order)
        text = f"{self.name}: {self.total - self.left} of {self.total} points done: {parts}"
        if self.left and self.seconds_a_point == self.seconds_a_point:
            text += f"; about {duration(self.left * self.seconds_a_point)} left"
        return text


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


Ended = tuple[str, str, str, str, float]  # time, name, status, detail, seconds


class Watcher:
    """Reads a sweep again and again; a point that has ended is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # In the order in which they were seen to have ended
        self.ended: dict[Path, Ended] = {}

    def look(self) -> Snapshot:
        """The sweep now."""
        sweep: SweepFolder = read_sweep(self.folder)
        shot = Snapshot(sweep.name)
        jobs = _jobs(sweep.meta)
        news: dict[Path, Ended] = {}
        for point in sweep.points:
            known = self.ended.get(point.path)
            state = known[2] if known and known[2] not in AGAIN else self._read(point, shot, news, jobs)
            shot.counts[state] = shot.counts.get(state, 0) + 1
        self.ended |= dict(sorted(news.items(), key=lambda item: item[1]))
        done = list(self.ended.values())
        shot.finished = [(name, state, detail) for _, name, state, detail, _ in done]
        trained = [
            seconds for _, _, state, _, seconds in done if seconds > 0 and state not in ("invalid", "infeasible")
        ]
        if trained:
            shot.seconds_a_point = sum(trained) / len(trained)
        return shot

    def _read(self, point: PointFolder, shot: Snapshot, news: dict[Path, Ended], jobs: dict[str, str]) -> str:
        self.ended.pop(point.path, None)
        status = read_json(point.path / "status.json")
        state: Any = status.get("status")
        if not isinstance(state, str):
            state = "pending"
        elif why := gone(status):
            state, status = "lost", status | {"reason": why}
        shot.queued += _queued(state, status.get("job"), jobs.get(point.path.name))
        if state == "running":
            shot.running.append(_running(point.path))
        elif state != "pending":
            detail = " ".join(str(status.get("reason") or "").split())
            if state == "ok":
                rate = _last(point.path).get("perf/throughput", float("nan"))
                detail = f"{cell(rate, 'tokens_per_s')} tokens/s in the last step" if rate == rate else ""
            ended = str(status.get("ended") or "")
            news[point.path] = (ended, point.path.name, state, detail, wall_seconds(status))
        return state


def _jobs(meta: dict[str, Any]) -> dict[str, str]:
    """The array that has a point last, by the point's folder."""
    out: dict[str, str] = {}
    for job in meta.get("jobs") or []:
        if isinstance(job, dict):
            out |= {str(name): str(job.get("id")) for name in job.get("points") or []}
    return out


def _queued(state: str, job: Any, array: str | None) -> bool:
    """Whether a point that does not run waits in a scheduler's queue, by its status and the array that has it last."""
    job = job if isinstance(job, dict) else {}
    if state in AGAIN:
        return bool(job.get("requeued"))
    return state == "pending" and array is not None and str(job.get("id")).partition("_")[0] != array


def _running(folder: Path) -> Running:
    last = _last(folder)
    nan = float("nan")
    steps = number(read_config(folder / "config.yaml").get("steps"))
    return Running(folder.name, last.get("step", nan), steps, last.get("loss", nan), last.get("perf/throughput", nan))


def _last(folder: Path) -> dict[str, float]:
    """The last readable metrics line, from the end of the file."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return {}
    columns = parse_lines(data).columns
    return {name: float(values[-1]) for name, values in columns.items() if len(values)}


def watch(folder: Path, interval: float = 2.0, once: bool = False, out: TextIO | None = None) -> int:
    """Shows the sweep until nothing is left to run; Ctrl-C ends it at any time. Always returns 0."""
    stream = out or sys.stdout
    watcher = Watcher(folder)
    if once:
        print(plain(watcher.look()), file=stream)
        return 0
    try:
        if stream.isatty():
            _live(watcher, interval)
        else:
            _lines(watcher, interval, stream)
    except KeyboardInterrupt:
        pass
    return 0


def plain(shot: Snapshot) -> str:
    """A snapshot as lines of text."""
    lines = [shot.line()]
    lines += [f"  {name}  {state}  {detail}".rstrip() for name, state, detail in shot.finished[-RECENT:]]
    lines += [f"  {run_line(run)}" for run in shot.running]
    return "\n".join(lines)


def run_line(run: Running) -> str:
    """`zero2o-mb8-1a2b3c4d  step 12 of 40  loss 4.21  51,200 tokens/s`."""
    if run.step != run.step:
        return f"{run.name}  starting"
    of = f" of {run.steps:.0f}" if run.steps == run.steps else ""
    text = f"{run.name}  step {run.step + 1:.0f}{of}"
    text += f"  loss {run.loss:.4g}" if run.loss == run.loss else ""
    return text + (
        f"  {cell(run.tokens_per_s, 'tokens_per_s')} tokens/s" if run.tokens_per_s == run.tokens_per_s else ""
    )


class _Quiet:
    """Tells when nothing has run for PATIENCE seconds, by this process's own monotonic clock."""

    def __init__(self) -> None:
        self.since = time.monotonic()

    def over(self, shot: Snapshot) -> bool:
        if shot.running or shot.queued:
            self.since = time.monotonic()
        return shot.left + shot.queued == 0 or time.monotonic() - self.since > PATIENCE


def _lines(watcher: Watcher, interval: float, stream: TextIO) -> None:
    """For pipes and logs: a line when a point ends, and one when the census changes."""
    shown: set[tuple[str, str, str]] = set()
    before, quiet = "", _Quiet()
    while True:
        shot = watcher.look()
        for name, state, detail in shot.finished:
            if (name, state, detail) not in shown:
                print(f"{name}  {state}  {detail}".rstrip(), file=stream, flush=True)
        shown |= set(shot.finished)
        line = shot.line().partition("; about")[0]
        if line != before:
            print(shot.line(), file=stream, flush=True)
            before = line
        if quiet.over(shot):
            if shot.left:
                print(f"nothing is running; {shot.left} points pending", file=stream, flush=True)
            return
        time.sleep(interval)


def _live(watcher: Watcher, interval: float) -> None:
    """For terminals: one picture that is drawn again."""
    from rich.live import Live

    quiet = _Quiet()
    with Live(_picture(watcher.look()), auto_refresh=False) as live:
        while True:
            shot = watcher.look()
            live.update(_picture(shot), refresh=True)
            if quiet.over(shot):
                return
            time.sleep(interval)


def _picture(shot: Snapshot) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colors = {"ok": "green", "running": "cyan", "infeasible": "dim", "invalid": "dim"}
    for name, state, detail in shot.finished[-RECENT:]:
        table.add_row(Text(name), Text(state, style=colors.get(state, "red")), Text(detail, style="dim"))
    for run in shot.running:
        table.add_row(Text(run.name), Text("running", style="cyan"), Text(run_line(run).partition("  ")[2]))
    bar = ProgressBar(total=max(shot.total, 1), completed=shot.total - shot.left, width=48)
    return Group(Text(shot.line(), style="bold"), bar, table)
