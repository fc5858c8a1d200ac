"""Peak FLOP/s of a device: the vendor's dense figure by torch's exact device name, or a measured matmul.

Only exact names: the same chip is sold at other clocks and power limits, so a similar name is no evidence. Where a
source prints tensor cores' sparse figure, the table holds half of it. GeForce cards accumulate bf16 and fp16 in fp32 at
half rate, which is how training runs, so that rate is listed.
"""

import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.sweep.freeze import read_json, write_json

if TYPE_CHECKING:  # torch is imported by what measures alone
    import torch


@dataclass(frozen=True)
class Peak:
    """What MFU is measured against."""

    flops: float  # dense FLOP/s
    kind: str  # vendor | measured
    source: str


_HOPPER_SXM = {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5}
_A100_SOURCE = "NVIDIA A100 Tensor Core GPU datasheet"
_ADA_SOURCE = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_GA102_SOURCE = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"

#: torch.cuda.get_device_name() → (source, dense TFLOP/s by dtype; fp64 on tensor cores where there are some)
_TABLE: dict[str, tuple[str, dict[str, float]]] = {
    "NVIDIA B200": ("NVIDIA HGX B200 specifications, per GPU", {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}),
    "NVIDIA GB200": ("NVIDIA GB200 NVL72 specifications, per GPU", {"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}),
    "NVIDIA H200": ("NVIDIA H200 datasheet, SXM; decimals from the H100 whitepaper", _HOPPER_SXM),
    "NVIDIA H200 NVL": (
        "NVIDIA H200 datasheet, NVL",
        {"bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    ),
    "NVIDIA GH200 480GB": ("NVIDIA GH200 datasheet; decimals from the H100 whitepaper", _HOPPER_SXM),
    "NVIDIA H100 80GB HBM3": ("NVIDIA H100 GPU architecture whitepaper, SXM5", _HOPPER_SXM),
    "NVIDIA H100 PCIe": (
        "NVIDIA H100 datasheet, PCIe; fp32 and fp64 from the H100 whitepaper",
        {"bf16": 756.5, "fp16": 756.5, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.2, "fp64": 51.2},
    ),
    "NVIDIA H100 NVL": (
        "NVIDIA H100 datasheet, NVL",
        {"bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    ),
    "NVIDIA A100-SXM4-40GB": (_A100_SOURCE, _A100),
    "NVIDIA A100-SXM4-80GB": (_A100_SOURCE, _A100),
    "NVIDIA A100-PCIE-40GB": (_A100_SOURCE, _A100),
    "NVIDIA A100 80GB PCIe": (_A100_SOURCE, _A100),
    "NVIDIA A30": ("NVIDIA A30 datasheet", {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3, "fp64": 10.3}),
    "NVIDIA A40": (_GA102_SOURCE, {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    "NVIDIA A10": ("NVIDIA A10 datasheet", {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    "NVIDIA L40S": (
        "NVIDIA L40S datasheet",
        {"bf16": 362.05, "fp16": 362.05, "fp8": 733.0, "tf32": 183.0, "fp32": 91.6},
    ),
    "NVIDIA L40": (
        "NVIDIA L40 datasheet",
        {"bf16": 181.05, "fp16": 181.05, "fp8": 362.0, "tf32": 90.5, "fp32": 90.5},
    ),
    "NVIDIA L4": ("NVIDIA L4 datasheet", {"bf16": 121.0, "fp16": 121.0, "fp8": 242.5, "tf32": 60.0, "fp32": 30.3}),
    "NVIDIA RTX 6000 Ada Generation": (
        _ADA_SOURCE,
        {"bf16": 364.2, "fp16": 364.2, "fp8": 728.5, "tf32": 182.1, "fp32": 91.1},
    ),
    "NVIDIA RTX A6000": (_GA102_SOURCE, {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    "NVIDIA GeForce RTX 5090": (
        "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A, fp32 accumulate",
        {"bf16": 209.5, "fp16": 209.5, "fp8": 419.0, "tf32": 104.8, "fp32": 104.8},
    ),
    "NVIDIA GeForce RTX 4090": (
        _ADA_SOURCE + ", fp32 accumulate",
        {"bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "tf32": 82.6, "fp32": 82.6},
    ),
    "NVIDIA GeForce RTX 3090": (
        _GA102_SOURCE + ", fp32 accumulate",
        {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},
    ),
    "Tesla V100-SXM2-16GB": ("NVIDIA V100 datasheet, SXM2", {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8}),
    "Tesla V100-SXM2-32GB": ("NVIDIA V100 datasheet, SXM2", {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8}),
    "Tesla T4": ("NVIDIA T4 datasheet", {"fp16": 65.0, "fp32": 8.1}),
}


def lookup(device_name: str, dtype: str) -> Peak | None:
    """The vendor's dense peak of exactly this device for bf16, fp16, fp8, tf32, fp32 or fp64; None where unknown."""
    if device_name not in _TABLE:
        return None
    source, tflops = _TABLE[device_name]
    return Peak(tflops[dtype] * 1e12, "vendor", source) if dtype in tflops else None


def measure(device: "torch.device", dtype: "torch.dtype") -> Peak:
    """A large square matmul on `device`, under the matmul settings in force: 2 n^3 over the fastest of some repeats: others
    on the machine only take away. One of
    fp8 operands, with one scale each, makes bf16."""
    import torch

    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    multiply = functools.partial(torch.mm, a, b)
    if dtype.itemsize == 1:
        one = torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    seconds: list[float] = []
    deadline = time.perf_counter() + 0.5
    multiply()  # loads the library and wakes the clocks
    while len(seconds) < 3 or (len(seconds) < 9 and time.perf_counter() < deadline):
        _wait(device)
        start = time.perf_counter()
        multiply()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    flops = 2 * n**3 / min(seconds)
    return Peak(flops, "measured", f"{n} x {n} x {n} matmul of {str(dtype)[6:]}, fastest of {len(seconds)}")


def of_ranks(cache: Path, device: "torch.device", dtype: "torch.dtype", rank: int, world: int) -> Peak:
    """`measure` on all ranks, the slowest one's; once per host and sweep, through `cache`, so that all points share one
    denominator. Collective."""
    import torch
    import torch.distributed as dist

    stored = read_json(cache) or {"flops": 0.0, "source": ""}
    if world > 1:  # every rank decides as rank 0 does
        known = torch.tensor([stored["flops"]], dtype=torch.float64, device=device)
        dist.broadcast(known, 0)
        stored["flops"] = known.item()
    if stored["flops"]:
        return Peak(stored["flops"], "measured", stored["source"])
    found = measure(device, dtype)
    if world > 1:
        value = torch.tensor([found.flops], dtype=torch.float64, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        found = dataclasses.replace(found, flops=value.item())
    if rank == 0 and cache.parent.is_dir():
        write_json(cache, {"flops": found.flops, "source": found.source}, sync=False)
    return found


def _wait(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
