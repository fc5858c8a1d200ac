"""The sum of all ranks' copies of a slice, in rank order: same bits whatever runs it."""

import torch
from torch import Tensor

from train.kernels import backend


def add_up(received: Tensor, out: Tensor | None, dtype: torch.dtype, own: tuple[int, Tensor] | None = None) -> Tensor:
    """`out` [n], or nothing yet, and then rank after rank its copy, the row of `received` [ranks, n], in `dtype`. `own`: the
    rank whose row is elsewhere, and where. Returns the sum, in `out` if there is one.

    Not of compile.kernels' choice: no bit depends on it.
    """
    if backend.triton_runs(received.device):
        from train.kernels.jit import ordered

        return ordered.add_up(received, out, dtype, own)
    if own is not None:
        received[own[0]].copy_(own[1])
    if out is None:
        out, received = received[0].to(dtype, copy=True), received[1:]
    for copy in received:
        out.add_(copy)
    return out
