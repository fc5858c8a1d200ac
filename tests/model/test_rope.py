"""Rotary tables: cache on = off bit for bit, Llama 3.1's scaling, precision."""

import math

import pytest
import torch

from tests.model.tiny import TINY, build, tokens
from train import config
from train.model import rope

LLAMA = config.RopeScaling(factor=32.0)


def model(**changes: object) -> config.Model:
    return config.Model(**{**TINY, "head_dim": 64, **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cache_on_equals_off_bitwise_in_a_training_step(dtype: torch.dtype) -> None:
    results = []
    for cache in (True, False, True):
        m = build(dtype, rope_cache=cache, rope_scaling=LLAMA)
        m(*tokens()).backward()
        results.append([p.grad for p in m.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_cache_returns_the_same_tensors_and_off_computes_anew() -> None:
    cpu = torch.device("cpu")
    on = [rope.tables(model(), 16, torch.float32, cpu)[0].data_ptr() for _ in range(2)]
    off = [rope.tables(model(rope_cache=False), 16, torch.float32, cpu)[0] for _ in range(2)]
    assert on[0] == on[1]
    assert off[0].data_ptr() != off[1].data_ptr()


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"rope_scaling": LLAMA}, {"head_dim": 32}])
def test_cache_tells_models_apart(changes: dict) -> None:
    args = (16, torch.float32, torch.device("cpu"))
    plain, other = rope.tables(model(), *args)[0], rope.tables(model(**changes), *args)[0]
    assert plain.shape != other.shape or not torch.equal(plain, other)


def test_first_use_in_inference_mode_does_not_spoil_training() -> None:
    with torch.inference_mode():
        rope.tables(model(), 13, torch.float32, torch.device("cpu"))
    cos, sin = rope.tables(model(), 13, torch.float32, torch.device("cpu"))
    x = torch.ones(1, 13, 1, 64, requires_grad=True)
    rope.rotate(x, cos, sin).sum().backward()


def test_bf16_models_get_fp32_tables_and_fp64_models_fp64() -> None:
    cpu = torch.device("cpu")
    assert rope.tables(model(), 4, torch.bfloat16, cpu)[0].dtype == torch.float32
    assert rope.tables(model(), 4, torch.float64, cpu)[0].dtype == torch.float64


def test_llama_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    """By the three cases of Llama 3.1's reference, frequency by frequency."""
    cfg = model(rope_theta=5e5, rope_scaling=LLAMA)
    cos, sin = rope.tables(cfg, 2, torch.float64, torch.device("cpu"))
    got = torch.atan2(sin[1], cos[1])  # position 1: the angle is the frequency
    kinds = set()
    for i, value in enumerate(got.tolist()):
        f = 5e5 ** (-2 * i / 64)
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            kind, expected = "kept", f
        elif wavelength > 8192 / 1:
            kind, expected = "stretched", f / 32
        else:
            kind, smooth = "between", (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * f / 32 + smooth * f
        kinds.add(kind)
        assert value == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "between", "stretched"}


def test_scores_depend_on_relative_position_only() -> None:
    cos, sin = rope.tables(model(), 40, torch.float64, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rope.rotate(x.expand(1, 40, 1, 64), cos, sin)[0, :, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(-39, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-10)
