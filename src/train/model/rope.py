"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), dimension i paired with i + head_dim/2 as in Llama's
published weights, with the frequency scaling of Llama 3.1."""

import functools
import math

import torch
from torch import Tensor

from train import config


def tables(
    cfg: config.Model, length: int, dtype: torch.dtype, device: torch.device, firsts: tuple[int, ...] = (0,)
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim/2] for positions 0..length-1, in fp32 (fp64 when `dtype` is fp64).

    `firsts`: where the equal stretches that make up `length` begin, if not one at 0.

    cfg.rope_cache keeps them per process; without it they are computed anew by the same code, so the bits are equal.
    They are never rounded to bf16: its 8 bits can't tell neighbouring angles apart.
    """
    scaling = cfg.rope_scaling
    numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position)
    compute = _cached if cfg.rope_cache else _compute
    return compute(
        cfg.rope_theta, numbers if scaling.factor != 1 else None, firsts, length, cfg.head_dim, _wide(dtype), device
    )


def _compute(
    theta: float,
    scaling: tuple[float, float, float, float] | None,
    firsts: tuple[int, ...],
    length: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    # inference mode off: a cached table must be usable in training whoever asked for it first
    with torch.inference_mode(False), torch.no_grad():
        frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)
        if scaling is not None:
            frequency = _scale(frequency, *scaling)
        each = length // len(firsts)
        at = torch.cat([torch.arange(first, first + each, dtype=dtype, device=device) for first in firsts])
        angle = torch.outer(at, frequency)
        return angle.cos(), angle.sin()


_cached = functools.cache(_compute)


def _scale(
    frequency: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: float
) -> Tensor:
    """Llama 3.1's scaling: wavelengths beyond the trained context are stretched by `factor`, short ones kept, and those
    between are interpolated by how many turns they make in the original context."""
    turns = original_max_position * frequency / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, T, H, head_dim] by the tables [T, head_dim/2]; computed in the tables' dtype, returned in x's."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both of an attention's rotated tensors."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
