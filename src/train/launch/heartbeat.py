"""A rank's sign of life: a small shared file with a counter, the step, and the slowest step so far.

The reader judges by its own monotonic clock when the counter last moved, so a jump of the time of day can't end a run.
"""

import mmap
import os
import struct
import time
from pathlib import Path

LAYOUT = struct.Struct("<QqQ16s")  # counter, step (-1 before the first), slowest step in ns, phase


class Heartbeat:
    """The rank's side."""

    def __init__(self, scratch: Path, rank: int) -> None:
        path = scratch / f"heartbeat-{rank}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, LAYOUT.size)
        self.map = mmap.mmap(fd, LAYOUT.size)
        os.close(fd)
        self.count, self.step, self.slowest, self.phase = 0, -1, 0, "start"
        self.beat()

    def beat(self, phase: str | None = None, step: int | None = None, slowest: float = 0.0) -> None:
        """One more sign of life; `slowest` in seconds."""
        self.count += 1
        self.phase = phase or self.phase
        self.step = self.step if step is None else step
        self.slowest = max(self.slowest, int(slowest * 1e9))
        self.map[:] = LAYOUT.pack(self.count, self.step, self.slowest, self.phase.encode()[:16])


class Watch:
    """The supervisor's side, for one rank."""

    def __init__(self, scratch: Path, rank: int) -> None:
        self.path = scratch / f"heartbeat-{rank}"
        self.count, self.step, self.slowest, self.phase = 0, -1, 0.0, "start"
        self.changed = time.monotonic()

    def look(self) -> float:
        """Read the file; seconds since the counter last moved."""
        now = time.monotonic()
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return now - self.changed
        if len(data) == LAYOUT.size:
            count, self.step, ns, phase = LAYOUT.unpack(data)
            self.slowest, self.phase = ns / 1e9, phase.rstrip(b"\0").decode()
            if count != self.count:
                self.count, self.changed = count, now
        return now - self.changed
