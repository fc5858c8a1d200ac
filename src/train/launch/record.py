"""A point's folder around its run: earlier attempts put away, and room kept for the last status.json."""

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

from train.sweep.freeze import read_json

#: what a run writes, and the next attempt moves away
WRITTEN = (
    "status.json", "metrics.jsonl", "manifest.json", "leaves.jsonl", "logs", "rendezvous", "rendezvous-fresh", "nodes",
)  # fmt: skip
RESERVE = ".reserve"


def now() -> str:
    """The time of day, UTC, ISO 8601. For people: durations come from monotonic clocks."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def archive(folder: Path) -> int:
    """Move what an earlier attempt left to attempts/<n>/; the number of the attempt that starts now."""
    for half in folder.glob(".*.json.*"):  # a kill in the middle of a write
        half.unlink()
    done = folder / "attempts"
    number = 1 + max((int(p.name) for p in done.glob("*") if p.name.isdigit()), default=0) if done.is_dir() else 1
    old = [folder / n for n in WRITTEN if (folder / n).exists()]
    moving = done / f".{number}"  # a kill in between leaves it, and the next call goes on with it
    if not moving.exists():
        if not old or (
            len(old) == 1 and (read_json(old[0]) or {}).get("status") == "pending"
        ):  # decided, never started
            return number
        moving.mkdir(parents=True)
    for path in old:
        path.rename(moving / path.name)
    moving.rename(done / str(number))
    return number + 1


def reserve(folder: Path, ranks: int) -> None:
    """Occupy what the last status.json will need: ranks that fill the disk must not leave the point `running`.

    Raises OSError when there is no room even now.
    """
    path = folder / RESERVE
    try:
        path.write_bytes(os.urandom((64 + ranks) << 10))  # random: no file system stores it in less
    except OSError as e:
        path.unlink(missing_ok=True)
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # other errors, as a limit on a file's size, need not hit the small status.json


def release(folder: Path) -> None:
    """Give the reserved room back, to be written now."""
    (folder / RESERVE).unlink(missing_ok=True)
