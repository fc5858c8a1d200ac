"""SwiGLU's product, and its backward in one pass that can make the product again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # 8 elements a thread: 16 bytes of each bf16 tensor


@triton.jit
def swiglu_kernel(gate, up, out, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up, of one block."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    g, u = tl.load(gate + i, mask=mask).to(WIDE), tl.load(up + i, mask=mask).to(WIDE)
    silu = g * (1 / (1 + tl.exp(-g)))  # as in backward, to the bit
    tl.store(out + i, (silu * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, d_gate, d_up, out, n, AGAIN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """From the product's gradient those of gate and up, and if AGAIN the product itself, which w_down's gradient needs."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    d = tl.load(grad + i, mask=mask).to(WIDE)
    g, u = tl.load(gate + i, mask=mask).to(WIDE), tl.load(up + i, mask=mask).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-g))
    silu = g * sigmoid
    dtype = d_up.dtype.element_ty
    tl.store(d_gate + i, (d * u * (sigmoid + silu * (1 - sigmoid))).to(dtype), mask=mask)
    tl.store(d_up + i, (d * silu).to(dtype), mask=mask)
    if AGAIN:
        tl.store(out + i, (silu * u).to(dtype), mask=mask)


def product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n = gate.numel()
    swiglu_kernel[(triton.cdiv(n, BLOCK),)](gate, up, out, n, WIDE=_wide(gate), BLOCK=BLOCK, num_warps=WARPS)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, ...]:
    """(gradient of gate, of up), and with `again` silu(gate) * up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    results = tuple(torch.empty_like(gate) for _ in range(3 if again else 2))
    n = gate.numel()
    swiglu_backward_kernel[(triton.cdiv(n, BLOCK),)](
        grad, gate, up, *results[:2], results[-1], n, AGAIN=again, WIDE=_wide(gate), BLOCK=BLOCK, num_warps=WARPS
    )
    return results


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
