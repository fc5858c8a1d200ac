"""Attention paths: probing, selection, and no path but the one that was asked for."""

import pytest
import torch
import torch.nn.functional as F

from train.config import ConfigError
from train.model import attention

CPU = torch.device("cpu")


def qkv(heads: int = 4, kv_heads: int = 2, length: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, length, 8, dtype=torch.float64, generator=generator) for n in (heads, kv_heads, kv_heads)]


def test_probe_runs_every_path_and_gives_reasons() -> None:
    result = attention.probe(CPU, torch.float32, 4, 2, 32)
    assert tuple(result) == attention.PATHS
    assert result["flash"] is None and result["math"] is None
    assert result["cudnn"] and result["efficient"]  # no such kernels on a CPU


@pytest.mark.parametrize("path", ["flash", "math"])
def test_attend_is_causal_grouped_attention(path: str) -> None:
    q, k, v = qkv()
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(attention.attend(q, k, v, path), expected, rtol=1e-12, atol=1e-12)


def test_a_path_that_rejects_stops_instead_of_falling_back() -> None:
    assert F.scaled_dot_product_attention(*qkv(4, 4), is_causal=True).isfinite().all()
    with pytest.raises(RuntimeError):
        attention.attend(*qkv(4, 4), "cudnn")


@pytest.mark.parametrize(
    ("requested", "rejected", "expected"),
    [("auto", (), "cudnn"), ("auto", ("cudnn",), "flash"), ("auto", ("cudnn", "flash"), "math"), ("math", (), "math")],
)
def test_select(requested: str, rejected: tuple[str, ...], expected: str) -> None:
    probed = {path: "no" if path in rejected else None for path in attention.PATHS}
    assert attention.select(requested, probed, ("cudnn", "flash", "math")) == expected


def test_select_on_this_cpu() -> None:
    probed = attention.probe(CPU, torch.float32, 4, 2, 32)
    assert attention.select("auto", probed, attention.order(CPU)) == "flash"


def test_a_rejected_path_names_the_reason_and_what_to_set() -> None:
    probed = {"flash": None, "cudnn": "head_dim 512 is too large", "efficient": "no", "math": None}
    with pytest.raises(ConfigError, match=r"attention=cudnn: .*head_dim 512 is too large.*set attention=flash\|math"):
        attention.select("cudnn", probed, attention.PATHS)


def test_no_accepting_path_names_every_reason() -> None:
    with pytest.raises(ConfigError, match="attention=auto: no path.*flash: no flash.*math: no math.*set another"):
        attention.select("auto", {path: f"no {path}" for path in attention.PATHS}, attention.PATHS)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention=flsh: valid: auto, flash, cudnn, efficient, math"):
        attention.select("flsh", dict.fromkeys(attention.PATHS), attention.PATHS)


@pytest.mark.gpu
def test_gpu_paths_agree_with_fp64_within_bf16() -> None:
    cuda = torch.device("cuda")
    accepted = [p for p, why in attention.probe(cuda, torch.bfloat16, 16, 8, 128).items() if why is None]
    assert "flash" in accepted and "math" in accepted
    generator = torch.Generator(cuda).manual_seed(0)
    q, k, v = (torch.randn(2, n, 256, 128, device=cuda, generator=generator).bfloat16() for n in (16, 8, 8))
    exact = attention.attend(q.double(), k.double(), v.double(), "math")
    for path in accepted:
        assert (attention.attend(q, k, v, path).double() - exact).norm() <= 1e-2 * exact.norm(), path
