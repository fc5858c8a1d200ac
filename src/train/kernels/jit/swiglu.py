"""SwiGLU's product, and its backward in one pass that can make the product again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # 8 elements a thread: 16 bytes of each bf16 tensor


@triton.jit
def swiglu_kernel(gate, up, out, width, stride, blocks, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up, of one of the `blocks` of a row; rows of gate and up lie `stride` apart, those of out `width`."""
    program = tl.program_id(0).to(tl.int64)
    row, i = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    at = row * stride + i
    g, u = tl.load(gate + at, mask=mask).to(WIDE), tl.load(up + at, mask=mask).to(WIDE)
    silu = g * (1 / (1 + tl.exp(-g)))  # as in backward, to the bit
    tl.store(out + row * width + i, (silu * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, d_gate, d_up, out, width, stride, blocks,
    AGAIN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the product's gradient those of gate and up, which lie as they do, and if AGAIN the product itself, which w_down's
    gradient needs."""
    program = tl.program_id(0).to(tl.int64)
    row, i = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    at = row * stride + i
    d = tl.load(grad + row * width + i, mask=mask).to(WIDE)
    g, u = tl.load(gate + at, mask=mask).to(WIDE), tl.load(up + at, mask=mask).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-g))
    silu = g * sigmoid
    dtype = d_up.dtype.element_ty
    tl.store(d_gate + at, (d * u * (sigmoid + silu * (1 - sigmoid))).to(dtype), mask=mask)
    tl.store(d_up + at, (d * silu).to(dtype), mask=mask)
    if AGAIN:
        tl.store(out + row * width + i, (silu * u).to(dtype), mask=mask)


def product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _forward(gate, up, out, (1, gate.numel(), 0))
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, ...]:
    """(gradient of gate, of up), and with `again` silu(gate) * up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    results = tuple(torch.empty_like(gate) for _ in range(3 if again else 2))
    _backward(grad, gate, up, results, again, (1, gate.numel(), 0))
    return results


def joint_product(rows: Tensor) -> Tensor:
    """rows [..., 2 ffn], gate before up in each → silu(gate) * up [..., ffn]."""
    rows = rows.contiguous()
    gate, up = rows.chunk(2, -1)
    out = rows.new_empty(gate.shape)
    _forward(gate, up, out, _shape(rows))
    return out


def joint_backward(grad: Tensor, rows: Tensor) -> Tensor:
    """The gradient of `rows`, in one tensor too."""
    grad, rows = grad.contiguous(), rows.contiguous()
    out = torch.empty_like(rows)
    gate, up = rows.chunk(2, -1)
    _backward(grad, gate, up, out.chunk(2, -1), False, _shape(rows))
    return out


def _shape(rows: Tensor) -> tuple[int, int, int]:
    stride = rows.shape[-1]
    return rows.numel() // stride, stride // 2, stride


def _forward(gate: Tensor, up: Tensor, out: Tensor, shape: tuple[int, int, int]) -> None:
    """`shape`: rows, a row's elements, and how far rows of gate lie apart."""
    rows, width, stride = shape
    blocks = triton.cdiv(width, BLOCK)
    swiglu_kernel[(rows * blocks,)](
        gate, up, out, width, stride, blocks, WIDE=_wide(gate), BLOCK=BLOCK, num_warps=WARPS
    )


def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, results: tuple[Tensor, ...], again: bool, shape: tuple[int, int, int]
) -> None:
    rows, width, stride = shape
    blocks = triton.cdiv(width, BLOCK)
    swiglu_backward_kernel[(rows * blocks,)](
        grad, gate, up, *results[:2], results[-1], width, stride, blocks,
        AGAIN=again, WIDE=_wide(gate), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
