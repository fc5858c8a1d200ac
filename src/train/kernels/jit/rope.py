"""Rotary positions of q and k in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 2  # of 1, 2, 4 and 8 the fastest on an H200 (docs/results/kernels.json)


@triton.jit
def rope_kernel(
    q, k, out_q, out_k, cos, sin, length, heads, kv_heads,
    q_row, q_at, q_head, k_row, k_at, k_head,
    SIGN: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """One position of one row: all its heads, its angles read once."""
    program = tl.program_id(0).to(tl.int64)
    row, at = program // length, program % length
    lanes = tl.arange(0, LANES)
    c = tl.load(cos + at * HALF + lanes, mask=lanes < HALF)[None, :]
    s = tl.load(sin + at * HALF + lanes, mask=lanes < HALF)[None, :] * SIGN
    to_q, to_k = out_q + program * heads * 2 * HALF, out_k + program * kv_heads * 2 * HALF
    _turn(q + row * q_row + at * q_at, to_q, c, s, heads, q_head, HALF, LANES, HEADS)
    _turn(k + row * k_row + at * k_at, to_k, c, s, kv_heads, k_head, HALF, LANES, KV_HEADS)


@triton.jit
def _turn(
    x, out, c, s, heads, stride, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    head, lanes = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
    mask = (head < heads) & (lanes < HALF)
    a = tl.load(x + head * stride + lanes, mask=mask).to(c.dtype)
    b = tl.load(x + head * stride + HALF + lanes, mask=mask).to(c.dtype)
    to = out + head * (2 * HALF) + lanes
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=mask)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [B, T, H, d], k [B, T, KV, d] with any strides but the last, tables [T, d/2] → the same, turned, contiguous."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out_q, out_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    rows, length, heads, d = q.shape
    rope_kernel[(rows * length,)](
        q, k, out_q, out_k, cos.contiguous(), sin.contiguous(), length, heads, k.shape[2],
        *q.stride()[:3], *k.stride()[:3],
        SIGN=-1 if inverse else 1, HALF=d // 2, LANES=triton.next_power_of_2(d // 2),
        HEADS=triton.next_power_of_2(heads), KV_HEADS=triton.next_power_of_2(k.shape[2]), num_warps=WARPS,
    )  # fmt: skip
    return out_q, out_k
