"""memory.optimizer_offload=full: gradients, masters and optimizer state in host memory, updated by the CPU.

A gradient leaves the device as soon as it is there; a thread adds it up in fp32 and, once all gradients of an optimizer's
pieces are in, runs the update (torch's fused CPU AdamW, or SignSGD) and sends the new weights, beside the rest of backward.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from train import config
from train.memory.offload import HostPool
from train.memory.sign_sgd import SignSGD
from train.parallel.adamw import AdamW, Piece, norms

LEAVING = 8  # gradients on their way to the host, whose device memory is still held


class HostOptimizer(AdamW):
    """By the interface of AdamW; besides, gradients may be handed over one by one with `deliver`.

    Pieces are host tensors. No clipping: an update begins before the norm over all gradients is known.
    """

    def __init__(
        self, pieces: Sequence[Piece], weights: Sequence[Tensor], optim: config.Optim, device: torch.device
    ) -> None:
        self.tap = None
        kept = [i for i, p in enumerate(pieces) if p.tensor.numel()]
        self.pieces = [pieces[i] for i in kept]
        self.tensors = [p.tensor for p in self.pieces]
        self._weights = [weights[i] for i in kept] if weights else []
        self._inner = SignSGD(self.pieces, optim) if optim.name == "sign_sgd" else AdamW(self.pieces, optim)
        self._sums = [torch.empty_like(t, pin_memory=False) for t in self.tensors]
        self._engine = engine(device)
        self._jobs: list[Future[None]] = []
        self._begun: set[int] = set()  # pieces with a gradient in this step
        self._complete: set[int] = set()  # pieces whose last gradient of this step is in
        self.square = 0.0  # of the norm of the last step's gradient

    def deliver(self, index: int, grad: Tensor, update: tuple[float, float] | None) -> None:
        """Piece `index`'s gradient of one micro-batch. With the last one of a step comes `update`: what the sum is
        multiplied by, and the learning rate. The caller drops the gradient."""
        staged, event = self._engine.to_host(grad)
        self._submit(self._add, index, staged, event, index not in self._begun)
        self._begun.add(index)
        if update is not None:
            self._complete.add(index)
            if len(self._complete) == len(self.pieces):
                self._start(update)

    def complete(self, update: tuple[float, float]) -> None:
        """All gradients of the step have been delivered; where there was none it is zero."""
        if len(self._complete) == len(self.pieces):
            return  # its update has been started by the last of them
        for index in set(range(len(self.pieces))) - self._begun:
            self._submit(self._sums[index].zero_)
        self._start(update)

    def _start(self, update: tuple[float, float]) -> None:
        self._complete = set(range(len(self.pieces)))
        self._submit(self._update, *update)

    def _submit(self, job: Callable[..., Any], *args: Any) -> None:
        self._jobs.append(self._engine.thread.submit(job, *args))

    @torch.no_grad()
    def _add(self, index: int, staged: Tensor, event: Any, first: bool) -> None:
        if event is not None:
            event.synchronize()
        into = self._sums[index]
        if first:
            into.copy_(staged.view_as(into))
        else:
            into.add_(staged.view_as(into))
        self._engine.give(staged)

    @torch.no_grad()
    def _update(self, scale: float, lr: float) -> None:
        if not self.pieces:
            return
        self.square = float(norms(self._sums, torch.device("cpu")).square().sum()) * scale**2
        factor = torch.tensor(scale, dtype=self._sums[0].dtype)
        if self.tap is not None:
            self.tap(self.pieces, [s * factor for s in self._sums])
        self._inner.step(self._sums, factor, lr)
        for weight, master in zip(self._weights, self.tensors, strict=bool(self._weights)):
            self._engine.to_device(weight, master)

    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float | Tensor) -> None:
        """Hand over all gradients at once, on any device and in any dtype; the update goes on after this returns."""
        update = (float(scale), float(lr))
        for index, grad in enumerate(grads):
            self.deliver(index, grad, update)

    def finish(self) -> None:
        """Wait for the step's update; compute that follows finds the new weights. Raises what went wrong in it."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        self._begun.clear()
        self._complete.clear()
        self._engine.join()

    def state(self, piece: Piece, kind: str) -> Tensor:
        self.finish()
        return self._inner.state(piece, kind)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        self.finish()
        return self._inner.items()


class Engine:
    """The thread that updates, the streams to and from the host, and the pinned buffers on the way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # a thread begins on GPU 0, whatever this rank's is; set_device takes no "cuda" without an index
        here = device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()
        begin = functools.partial(torch.cuda.set_device, here) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "optimizer", begin)
        self._out, self._back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        # two, so that each has one thread that takes from it
        self._grads, self._rounded = (HostPool(pinned=device.type == "cuda") for _ in range(2))
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._sending: deque[tuple[Any, Tensor]] = deque()  # host buffers whose copy to the device may be unfinished

    def to_host(self, grad: Tensor) -> tuple[Tensor, Any]:
        """(host copy, event or None). `grad` may be dropped: its memory returns to the stream that made it behind the copy."""
        if not grad.is_cuda:
            return grad, None
        assert self._out is not None
        buffer = self._grads.take(grad.nbytes)
        staged = buffer.view(grad.dtype).view(grad.shape)
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            staged.copy_(grad, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._out)
        # (Tensor.record_stream would keep a whole backward's gradients: the host frees them long before they are copied)
        self._leaving.append((event, grad))
        while len(self._leaving) > LEAVING:
            torch.cuda.current_stream().wait_event(self._leaving.popleft()[0])
        return staged, event

    def give(self, staged: Tensor) -> None:
        """A host copy is read."""
        if self._out is not None and staged.is_pinned():
            self._grads.give(staged.view(-1).view(torch.uint8))

    def to_device(self, weight: Tensor, master: Tensor) -> None:
        """Round a master into its weight. Called by the thread, once backward has used the weight: its gradient is in."""
        if self._back is None:
            weight.copy_(master.view_as(weight))
            return
        while self._sending and self._sending[0][0].query():
            self._rounded.give(self._sending.popleft()[1])
        buffer = self._rounded.take(weight.nbytes)
        rounded = buffer.view(weight.dtype).view(weight.shape)
        rounded.copy_(master.view_as(weight))
        with torch.cuda.stream(self._back):
            weight.copy_(rounded, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._back)
        self._sending.append((event, buffer))

    def join(self) -> None:
        """Compute that follows comes after all weights sent so far."""
        self._leaving.clear()  # the thread has waited for these copies
        if self._back is not None:
            torch.cuda.current_stream().wait_stream(self._back)


@functools.cache
def engine(device: torch.device) -> Engine:
    """One a device and process."""
    return Engine(device)
