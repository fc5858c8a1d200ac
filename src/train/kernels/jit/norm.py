"""RMSNorm's backward from the gradients of several readers, with the residual stream's added, in one pass."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 16, 16  # elements that a thread has of a row; warps that an SM has at once, of all its programs
SHARED = 96 * 1024  # bytes of a program's shared memory, which every GPU since Ampere has
INTERPRETED = 3  # programs where there are no SMs
ROWS, COLUMNS = 128, 16  # of `partials` that a program of their sum has at once: 64 bytes of a row


@triton.jit
def rms_norm_backward_kernel(
    residual, grad, second, third, x, weight, out, partials, rows,
    GRADS: tl.constexpr, EPS: tl.constexpr, ROUNDS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th row: out = residual + the norm's gradient in x; and this program's row of `partials`, the sum
    over its rows of the gradient in weight. Of the result's gradients there are GRADS, 1 to 3. STAGES=3: rows are on their way
    into shared memory while one is worked on."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < DIM
    w = tl.load(weight + columns, mask=mask, other=0).to(WIDE)
    slope = tl.zeros((BLOCK,), WIDE)
    for i in tl.range(0, ROUNDS, num_stages=STAGES):  # a constant, for the interpreter counts to no other
        row = program.to(tl.int64) + i * programs
        here = mask & (row < rows)
        at = row * DIM + columns
        a = tl.load(x + at, mask=here, other=0).to(WIDE)
        g = tl.load(grad + at, mask=here, other=0).to(WIDE)
        if GRADS > 1:
            g += tl.load(second + at, mask=here, other=0).to(WIDE)
        if GRADS > 2:
            g += tl.load(third + at, mask=here, other=0).to(WIDE)
        r = tl.load(residual + at, mask=here, other=0).to(WIDE)
        gw = g * w
        inverse = 1 / tl.sqrt(tl.sum(a * a, 0) / DIM + EPS)
        along = tl.sum(gw * a, 0) / DIM * inverse * inverse
        tl.store(out + at, (r + inverse * (gw - a * along)).to(out.dtype.element_ty), mask=here)
        slope += g * (a * inverse)
    tl.store(partials + program.to(tl.int64) * DIM + columns, slope, mask=mask)


@triton.jit
def column_sums_kernel(
    partials, out, rows, DIM: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out [DIM] = the sum of `partials` [rows, DIM] over its rows; COLUMNS of it a program."""
    row, columns = tl.arange(0, ROWS)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), partials.dtype.element_ty)
    for i in tl.range(0, ROUNDS):
        at = row + i * ROWS
        total += tl.load(partials + at * DIM + columns, mask=(at < rows) & (columns < DIM), other=0)
    sums = tl.sum(total, 0)[None, :]
    tl.store(out + columns, sums.to(out.dtype.element_ty), mask=columns < DIM)


def backward(residual: Tensor, grads: Sequence[Tensor], x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual, 1 to 3 grads and x [..., dim], weight [dim] → (the gradient in x, contiguous; in weight)."""
    residual, x, weight, *lying = (t.contiguous() for t in (residual, x, weight, *grads))
    assert 1 <= len(lying) <= 3, len(lying)
    grad, second, third = [*lying, *lying[:1] * 2][:3]  # the kernel reads those alone that there are
    dim = weight.numel()
    rows = x.numel() // dim
    block = triton.next_power_of_2(dim)
    warps = min(32, max(1, block // (32 * BLOCK)))
    wide = torch.promote_types(x.dtype, torch.float32)
    programs = min(rows, _multiprocessors(x.device) * max(1, WARPS // warps))
    out = torch.empty_like(x)
    partials = torch.empty(programs, dim, dtype=wide, device=x.device)
    rms_norm_backward_kernel[(programs,)](
        residual, grad, second, third, x, weight, out, partials, rows,
        GRADS=len(lying), EPS=eps, ROUNDS=triton.cdiv(rows, programs), DIM=dim, BLOCK=block,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        STAGES=3 if 2 * (2 + len(lying)) * block * x.element_size() <= SHARED else 1, num_warps=warps,
    )  # fmt: skip
    slope = torch.empty_like(weight)
    column_sums_kernel[(triton.cdiv(dim, COLUMNS),)](
        partials, slope, programs, DIM=dim, ROUNDS=triton.cdiv(programs, ROWS), ROWS=ROWS, COLUMNS=COLUMNS
    )  # torch's own sum of so few rows takes 13 to 18 us
    return out, slope


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED
