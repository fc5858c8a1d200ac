"""Bytes that a rank sends in a step, and the time that its step waits for communication."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from train.measure import marks
from train.measure.marks import Mark


class Meter:
    """Counts bytes by collective and times the stretches in which compute waits for communication.

    On a GPU a stretch lies between two events of the compute stream; they are read once they have happened, never waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._bytes: Counter[str] = Counter()  # of the step under way
        self._waits: list[tuple[str, Mark, Mark]] = []  # of the step under way
        self._pending: deque[list[tuple[str, Mark, Mark]]] = (
            deque()
        )  # ended steps whose events may not have happened yet
        self._last_bytes: dict[str, int] = {}
        self._last_exposed: dict[str, float] = {}
        self._steps = 0
        self._total = 0.0

    def sent(self, collective: str, nbytes: int) -> None:
        """This rank sends `nbytes` to others by `collective`."""
        self._bytes[collective] += nbytes

    def mark(self) -> Mark:
        """Now, on the clock of the compute stream."""
        return marks.mark(self._device)

    def exposed(self, collective: str, start: Mark, end: Mark) -> None:
        """Between the two marks compute waited for `collective`."""
        self._waits.append((collective, start, end))

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Inside, compute waits for `collective`."""
        start = self.mark()
        yield
        self.exposed(collective, start, self.mark())

    def end_step(self) -> None:
        """The step's communication has been issued (GPU) or has ended (CPU)."""
        self._pending.append(self._waits)
        self._last_bytes, self._bytes, self._waits = dict(self._bytes), Counter(), []
        self._collect()

    def report(self) -> dict[str, Any]:
        """{"bytes": {collective: sent by this rank in the last step}, "exposed_s": {collective: seconds in the newest step
        that can be read, on a GPU one or two steps ago}, "exposed_s_mean": mean seconds a step over "steps" steps}.

        zero2*: weights gathered after a step are waited for in the next one and count there.
        """
        self._collect()
        return {
            "bytes": self._last_bytes,
            "exposed_s": self._last_exposed,
            "exposed_s_mean": self._total / max(1, self._steps),
            "steps": self._steps,
        }

    def _collect(self) -> None:
        while self._pending and all(not self._cuda or end.query() for _, _, end in self._pending[0]):
            seconds: dict[str, float] = {}
            for collective, start, end in self._pending.popleft():
                seconds[collective] = seconds.get(collective, 0.0) + marks.seconds(start, end)
            self._last_exposed = seconds
            self._total += sum(seconds.values())
            self._steps += 1
