"""The sum of all ranks' copies of a slice, in rank order: same bits whatever runs it."""

import torch
from torch import Tensor

from train.kernels import backend


def add_up(received: Tensor, rank: int, own: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`out` [n], or zeros of `dtype`, and then rank after rank its copy, the row of `received` [ranks, n]; row `rank`, which
    may be unwritten, is in `own`. Returns the sum, in `out` if there is one."""
    if backend.triton_runs(received.device):
        from train.kernels.jit import ordered

        add = out is not None
        out = own.new_empty(own.shape, dtype=dtype) if out is None else out
        ordered.add_up(received, rank, own, out, add)
        return out
    if own.data_ptr() != received[rank].data_ptr():
        received[rank].copy_(own)
    if out is None and len(received) == 2:  # one pass over memory; torch orders no more than two
        return received.sum(0, dtype=dtype)
    first = 0
    if out is None:
        out, first = received[0].to(dtype, copy=True), 1
    for copy in received[first:]:
        out.add_(copy)
    return out
