"""compile.cuda_graph=true: a rank's whole optimizer step is one CUDA graph, which the host starts with one call.

Forward and backward of all micro-batches, clipping, AdamW and the copies of the masters are recorded once, after a few steps
as they are, and replayed. The host then does no more in a step than to fill in rows and learning rate. Rules that this
follows: docs.pytorch.org, CUDA semantics, "CUDA Graphs".
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from train.config import ConfigError
from train.measure import memory
from train.parallel.adamw import AdamW
from train.parallel.graph_rules import WARMUP

#: (micro-batches [rows, seq_len + 1] each, learning rate) → tensors on the device; reads nothing on the host
Compute = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, ...]]


def use_stream(device: torch.device) -> None:
    """From here on this thread computes on a stream of its own: the default one can't be captured. Before the model is built:
    autograd adds up a parameter's gradient on the stream that first used it, and a captured step may touch no other."""
    torch.cuda.set_stream(torch.cuda.Stream(device))


class GraphedStep:
    """`compute`, called as it is WARMUP times, then recorded and replayed. On one stream, from the first call on."""

    def __init__(
        self, compute: Compute, owners: Sequence[AdamW], count: int, shape: tuple[int, int], device: torch.device
    ) -> None:
        """`owners`: the optimizers in `compute`; `count` micro-batches of `shape` = (rows, seq_len + 1)."""
        self._compute, self._owners, self._device = compute, owners, device
        # the graph knows addresses: what changes from step to step is copied to where it looks
        self._rows = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(count)]
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self._calls = 0
        self._graph: Any = None
        self._results: tuple[Tensor, ...] = ()
        self.peak = 0.0  # GiB: a replay allocates nothing, so that the allocator's own peak misses what the graph holds

    def __call__(self, rows: Iterable[Tensor], lr: float) -> tuple[Tensor, ...]:
        """What `compute` returns. Overwritten by the next call: what is to be kept is copied on the same stream before."""
        for static, each in zip(self._rows, rows, strict=True):
            static.copy_(each, non_blocking=True)
        self._lr.fill_(lr)
        self._calls += 1
        if self._calls <= WARMUP:
            return self._compute(self._rows, self._lr)
        if self._graph is None:
            self._capture()
        self._graph.replay()
        return self._results

    def _capture(self) -> None:
        """Record a step without running it. Raises ConfigError where that is impossible."""
        gc.collect()  # what dies in a cycle goes now, not into the recording
        graph = torch.cuda.CUDAGraph()
        first: Exception | None = None  # the end of a broken capture raises an error of its own
        try:
            # thread_local: other threads of this process may do what a capture may not
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                try:
                    self._results = self._compute(self._rows, self._lr)
                except Exception as error:
                    first = error
                    raise
        except RuntimeError as error:
            cause = first or error
            if not isinstance(cause, RuntimeError) or isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            line = str(cause).strip().splitlines()[0]
            raise ConfigError("compile.cuda_graph", True, f"this step can't be captured ({line})") from error
        for owner in self._owners:
            owner.captured()
        self._graph = graph
        self.peak = memory.peak(self._device)
