"""Cross-entropy whose gradient takes the logits' place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits that a program has in registers at once: 16 a thread


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, stride,
    WEIGHT: tl.constexpr, VOCAB: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its cross-entropy, then softmax minus one-hot, times WEIGHT, over its logits.

    The row is read twice; 64 KiB of 32768 bf16 logits are still in L2 the second time.
    """
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    target = tl.load(targets + row)
    picked = tl.load(at + target).to(WIDE)
    top = tl.full((), float("-inf"), WIDE)
    total = tl.zeros((BLOCK,), WIDE)
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(at + columns, mask=columns < VOCAB, other=float("-inf"), eviction_policy="evict_last").to(WIDE)
        now = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - now) + tl.exp(x - now)
        top = now
    rest = tl.log(tl.sum(total, 0))  # apart from `top`, which may be large
    tl.store(losses + row, rest + (top - picked))
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(at + columns, mask=columns < VOCAB, other=float("-inf"), eviction_policy="evict_first").to(WIDE)
        p = tl.exp(x - top - rest)
        slope = tl.where(columns == target, p - 1, p)
        tl.store(at + columns, (slope * WEIGHT).to(logits.dtype.element_ty), mask=columns < VOCAB)


def cross_entropy(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    """logits [n, vocab], its rows contiguous → cross-entropies [n], fp32 (fp64 for fp64).

    `logits` becomes `weight` times the slope of the cross-entropies' sum in it.
    """
    n, vocab = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(n, dtype=wide, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    cross_entropy_kernel[(n,)](
        logits, targets, losses, logits.stride(0),
        WEIGHT=weight, VOCAB=vocab, WIDE=tl.float64 if wide == torch.float64 else tl.float32, BLOCK=block,
        num_warps=min(WARPS, max(1, block // 256)),
    )  # fmt: skip
    return losses
