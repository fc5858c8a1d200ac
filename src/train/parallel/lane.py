"""Where communication runs beside compute: a CUDA stream of its own, or gloo's threads."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from train.parallel.traffic import Meter

IN_FLIGHT = (
    4  # packed buffers that wait for their collective; more only cost memory once communication is the slower one
)


class Lane:
    """On a GPU, what follows a collective is issued on the lane at once; on a CPU it is done when the result is fetched.

    `ticket` turns a collective's work, and what was issued after it, into something to `redeem`: compute that follows comes
    after it. The time that compute waits there is measured.
    """

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._meter = meter
        self._held: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @property
    def asynchronous(self) -> bool:
        """Whether waiting for a collective inside `beside` costs the host nothing."""
        return self._stream is not None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is issued inside comes after all compute issued so far and runs beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def ticket(self, work: Any) -> Any:
        """Call inside `beside`."""
        if self._stream is None:
            return work
        if work is not None:  # None: it is on the lane itself
            work.wait()  # the lane waits, not the host
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def redeem(self, tickets: Sequence[Any], collective: str) -> None:
        """Compute that follows comes after the tickets' collectives."""
        with self._meter.waiting(collective):
            for ticket in tickets:
                if self._stream is None:
                    ticket.wait()
                else:
                    torch.cuda.current_stream().wait_event(ticket)

    def hold(self, sent: Tensor, collective: str) -> None:
        """Keep a buffer that compute made until the lane, as issued so far, is done with it.

        Its memory goes back to the compute stream only behind the wait below. (Tensor.record_stream would keep every
        buffer of a step: the host frees them long before the GPU is done with the first.)
        """
        if self._stream is None:
            return
        event = torch.cuda.Event()
        event.record(self._stream)
        self._held.append((sent, event))
        while len(self._held) > IN_FLIGHT:
            self.redeem([self._held.popleft()[1]], collective)

    def join(self, collective: str) -> None:
        """Compute that follows comes after all that was issued on the lane."""
        if self._stream is not None:
            with self._meter.waiting(collective):
                torch.cuda.current_stream().wait_stream(self._stream)
            self._held.clear()
