"""The sum of all ranks' copies of a slice, in rank order, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # 8 elements a thread: 16 bytes of a bf16 copy


@triton.jit
def ordered_sum_kernel(
    received, own, out, numel,
    RANKS: tl.constexpr, RANK: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (out, if ADD, else nothing) + the rows of received [RANKS, numel], one after the other; in row RANK's place
    (-1: in none's) `own`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    if ADD:
        total = tl.load(out + i, mask=mask)
    for r in tl.static_range(RANKS):
        row = own if r == RANK else received + r * tl.cast(numel, tl.int64)
        copy = tl.load(row + i, mask=mask).to(total.dtype)
        total = copy if r == 0 and not ADD else total + copy  # 0 + -0 were another zero
    tl.store(out + i, total, mask=mask)


def add_up(received: Tensor, out: Tensor | None, dtype: torch.dtype, own: tuple[int, Tensor] | None) -> Tensor:
    """received [ranks, n], contiguous, as the tensors of `own` and `out` [n] are."""
    add = out is not None
    out = received.new_empty(received.shape[1:], dtype=dtype) if out is None else out
    rank, elsewhere = (-1, received) if own is None else own
    ordered_sum_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        received, elsewhere, out, out.numel(), RANKS=len(received), RANK=rank, ADD=add, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return out
