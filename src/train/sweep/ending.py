"""What a command says when it is over: where the time went, what is kept and how to go on, where the logs are."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from train.launch.classify import FAILED
from train.sweep.folder import Sweep
from train.sweep.freeze import read_json
from train.sweep.points import Frozen

PHASES = ("start", "build", "compile", "train")
#: failed points whose logs are named
SHOWN = 3


def typed() -> list[str]:
    """The command line as it was typed, before __main__ prepared it: `python -m train …` or the console script's name."""
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    for i in range(len(words) - 1):
        if words[i : i + 2] == ["-m", "train"]:
            return ["python", "-m", "train", *words[i + 2 :]]
    return [Path(words[1]).name, *words[2:]]


def go_on(command: list[str], path: Path) -> str:
    """The command that goes on with the sweep in `path`."""
    kept = [word for word in command if not word.startswith("name=")]
    return shlex.join([*kept, f"name={path.name}"])


def interrupted(sweep: Sweep, statuses: list[str]) -> str:
    """What is kept after a signal, and the command that goes on."""
    done = sum(s not in FAILED for s in statuses)
    where = os.path.relpath(sweep.path)
    return (
        f"interrupted: {done} of {len(statuses)} points are finished and kept in {where}; go on with\n"
        f"  {go_on(typed(), sweep.path)}"
    )


def _statuses(sweep: Sweep) -> list[tuple[Frozen, dict[str, Any]]]:
    return [(p, read_json(sweep.folder(p) / "status.json") or {}) for p in sweep.points]


def where_time_went(sweep: Sweep, total: float) -> str:
    """Seconds of each phase over the points that this process ran, as rank 0 saw them, and what lies between points."""
    own = [s for _, s in _statuses(sweep) if (s.get("supervisor") or {}).get("pid") == os.getpid()]
    spent = [(s.get("summary") or {}).get("seconds") or {} for s in own]
    sums = {phase: sum(float(s.get(phase, 0.0)) for s in spent) for phase in PHASES}
    rest = max(0.0, total - sum(sums.values()))
    parts = [f"{phase} {seconds:.1f} s" for phase, seconds in sums.items()]
    return f"time: {total:.1f} s = " + ", ".join([*parts, f"rest {rest:.1f} s"])


def logs(sweep: Sweep) -> list[str]:
    """Where to look for the first failed points."""
    failed = [p for p, s in _statuses(sweep) if s.get("status") in ("crashed", "timeout")]
    return [f"log: {os.path.relpath(sweep.folder(p))}/logs/" for p in failed[:SHOWN]]


def existing(path: Path) -> Path:
    """The deepest folder on the way to `path` that is there already."""
    return next(p for p in (path, *path.parents, Path.cwd()) if p.exists())


def undo(path: Path, points: list[Frozen], before: Path) -> None:
    """Take back what a sweep that could not be written has left, up to the folder `before`; never what it didn't make."""
    if (path / "sweep.json").exists():
        return
    for p in points:
        shutil.rmtree(path / p.folder, ignore_errors=True)
    shutil.rmtree(path / ".sweep", ignore_errors=True)
    for folder in (path, *path.parents):
        if folder == before.resolve():
            return
        try:
            folder.rmdir()
        except OSError:
            return
