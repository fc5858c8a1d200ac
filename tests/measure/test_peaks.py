"""Peaks: exact names only, dense figures, and a measured one that is really measured."""

import subprocess
import sys
import time

import pytest
import torch

from train.measure import peaks


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA H200", "fp8", 1978.9),
    ],
)
def test_known_devices(name: str, dtype: str, tflops: float) -> None:
    peak = peaks.lookup(name, dtype)
    assert peak is not None and peak.flops == pytest.approx(tflops * 1e12)
    assert peak.kind == "vendor" and peak.source


@pytest.mark.parametrize(
    "name", ["H200", "NVIDIA H200 ", "nvidia h200", "NVIDIA H100", "NVIDIA H200 MIG 1g.18gb", "cpu", ""]
)
def test_no_guess_from_a_similar_name(name: str) -> None:
    assert peaks.lookup(name, "bf16") is None


def test_no_guess_from_another_dtype() -> None:
    assert peaks.lookup("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peaks.lookup("Tesla T4", "bf16") is None


def test_tensor_core_figures_are_dense() -> None:
    """Where all are known, each halving of the width doubles the rate: no sparse figure slipped in."""
    for name in peaks._TABLE:
        bf16, fp16, fp8, tf32 = (peaks.lookup(name, d) for d in ("bf16", "fp16", "fp8", "tf32"))
        if bf16 and fp16:
            assert bf16.flops == fp16.flops, name
        if bf16 and fp8:
            assert fp8.flops == pytest.approx(2 * bf16.flops, rel=0.02), name
        if bf16 and tf32:
            assert tf32.flops == pytest.approx(bf16.flops / 2, rel=0.02), name


def test_measured_on_this_cpu() -> None:
    started = time.perf_counter()
    peak = peaks.measure(torch.device("cpu"), torch.float32)
    assert time.perf_counter() - started < 5
    assert peak.kind == "measured" and "matmul" in peak.source
    assert 1e8 < peak.flops < 1e14


def test_measured_in_fp8_says_so() -> None:
    peak = peaks.measure(torch.device("cpu"), torch.float8_e4m3fn)
    assert "matmul of float8_e4m3fn" in peak.source and 1e8 < peak.flops < 1e14


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)])
def test_measured_is_below_the_vendors(name: str, dtype: torch.dtype) -> None:
    device = torch.cuda.get_device_name()
    vendor = peaks.lookup(device, name)
    assert vendor is not None, f"{device} is not in the table"
    measured = peaks.measure(torch.device("cuda"), dtype)
    assert 0.4 * vendor.flops < measured.flops < vendor.flops


def test_arithmetic_and_file_checks_import_no_torch() -> None:
    modules = "train.measure.flops, train.measure.peaks, train.data.corpus"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
