"""The sum of all ranks' copies of a slice, in rank order, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # 8 elements a thread: 16 bytes of a bf16 copy


@triton.jit
def ordered_sum_kernel(
    received, own, out, numel,
    RANKS: tl.constexpr, RANK: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (out, if ADD, else 0) + the rows of received [RANKS, numel], one after the other; in row RANK's place is `own`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    if ADD:
        total = tl.load(out + i, mask=mask)
    for r in tl.static_range(RANKS):
        row = own if r == RANK else received + r * numel
        copy = tl.load(row + i, mask=mask).to(total.dtype)
        total = copy if r == 0 and not ADD else total + copy  # 0 + -0 were another zero
    tl.store(out + i, total, mask=mask)


def add_up(received: Tensor, rank: int, own: Tensor, out: Tensor, add: bool) -> None:
    """received [ranks, n], own and out [n], contiguous."""
    numel = out.numel()
    ordered_sum_kernel[(triton.cdiv(numel, BLOCK),)](
        received, own, out, numel, RANKS=len(received), RANK=rank, ADD=add, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
