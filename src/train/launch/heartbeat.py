"""A rank's sign of life: a small shared file with a counter, the step, and the slowest step so far.

The reader judges by its own monotonic clock when the counter last moved, so a jump of the time of day can't end a run.
"""

import mmap
import os
import struct
import time
from pathlib import Path

#: steps that compile and autotune; they have a time limit of their own and don't count for the slowest step
FIRST_STEPS = 2

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
        self.last = time.monotonic_ns()
        self.beat()

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """One more sign of life, at the start of step `step`."""
        now = time.monotonic_ns()
        if step is not None and step > FIRST_STEPS and self.step == step - 1:
            self.slowest = max(self.slowest, now - self.last)
        self.count, self.last = self.count + 1, now
        self.phase = phase or self.phase
        self.step = self.step if step is None else step
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
