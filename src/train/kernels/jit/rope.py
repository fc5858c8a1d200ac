"""Rotary positions of q and k in one pass, with v laid behind them if they are to be one tensor."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 2  # of 1, 2, 4 and 8 the fastest on an H200 (docs/results/kernels.json)


@triton.jit
def rope_kernel(
    q, k, v, out_q, out_k, out_v, cos, sin, length, heads, kv_heads,
    q_row, q_at, q_head, k_row, k_at, k_head, v_row, v_at, v_head, to_q_at, to_k_at,
    SIGN: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """One position of one row: all its heads, its angles read once. If COPY, v goes to out_v as it is, as far apart as k."""
    program = tl.program_id(0).to(tl.int64)
    row, at = program // length, program % length
    lanes = tl.arange(0, LANES)
    c = tl.load(cos + at * HALF + lanes, mask=lanes < HALF)[None, :]
    s = tl.load(sin + at * HALF + lanes, mask=lanes < HALF)[None, :] * SIGN
    _turn(q + row * q_row + at * q_at, out_q + program * to_q_at, c, s, heads, q_head, HALF, LANES, HEADS)
    _turn(k + row * k_row + at * k_at, out_k + program * to_k_at, c, s, kv_heads, k_head, HALF, LANES, KV_HEADS)
    if COPY:
        head, lane = tl.arange(0, KV_HEADS)[:, None], tl.arange(0, 2 * LANES)[None, :]
        mask = (head < kv_heads) & (lane < 2 * HALF)
        value = tl.load(v + row * v_row + at * v_at + head * v_head + lane, mask=mask)
        tl.store(out_v + program * to_k_at + head * (2 * HALF) + lane, value, mask=mask)


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
    q, k = (_dense_heads(x) for x in (q, k))
    out_q, out_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    _launch((q, k), (out_q, out_k), cos, sin, inverse)
    return out_q, out_k


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place; positions lie equally far apart in all rows."""
    _launch((q, k), (q, k), cos, sin, False)


def joint_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [B, T, H, d], k and v [B, T, KV, d] with any strides but the last → [B, T, H + 2 KV, d]: q and k turned back, and v."""
    q, k, v = (_dense_heads(x) for x in (q, k, v))
    heads = q.shape[2], k.shape[2], v.shape[2]
    out = q.new_empty(*q.shape[:2], sum(heads), q.shape[3])
    _launch((q, k, v), out.split(heads, 2), cos, sin, True)
    return out


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(inputs: Sequence[Tensor], outputs: Sequence[Tensor], cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """q, k and perhaps v, and where they go."""
    (q, k, *_), (out_q, out_k, *_) = inputs, outputs
    v, out_v = inputs[-1], outputs[-1]
    rows, length, heads, d = q.shape
    rope_kernel[(rows * length,)](
        q, k, v, out_q, out_k, out_v, cos.contiguous(), sin.contiguous(), length, heads, k.shape[2],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], out_q.stride(1), out_k.stride(1),
        SIGN=-1 if inverse else 1, HALF=d // 2, LANES=triton.next_power_of_2(d // 2),
        HEADS=triton.next_power_of_2(heads), KV_HEADS=triton.next_power_of_2(k.shape[2]), COPY=len(inputs) == 3,
        num_warps=WARPS,
    )  # fmt: skip
