"""Provenance of one host: what code ran on what, with which settings in force."""

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import torch

from train.measure import links

ENV = re.compile(r"(NCCL_|CUBLAS_|TORCH|PYTORCH|CUDA_|GLOO_|OMP_|MKL_|KMP_).*")


def collect(device: torch.device) -> dict[str, Any]:
    """One entry of manifest.json's list of hosts. Called by the first rank of a host."""
    return {
        "host": socket.gethostname(),
        "code": {"src_hash": os.environ.get("MFU_SWEEP_CODE", ""), "commit": os.environ.get("MFU_SWEEP_COMMIT", ""),
                 "dirty": os.environ.get("MFU_SWEEP_DIRTY", "")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version() if device.type == "cuda" else None,
        "driver": None if device.type != "cuda" else driver(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [],
        "links": links.matrix() if device.type == "cuda" else None,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "kernel": platform.release(),
        "env": {k: v for k, v in sorted(os.environ.items()) if ENV.fullmatch(k)},
    }  # fmt: skip


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def nccl_version() -> str:
    """Version of the NCCL library that is loaded, which can differ from the one torch was built with."""
    import ctypes

    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    for path in paths:
        number = ctypes.c_int()
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            v = number.value
            return f"{v // 10000}.{v // 100 % 100}.{v % 100}"
    return ".".join(map(str, torch.cuda.nccl.version()))


def driver() -> str | None:
    """The NVIDIA driver's version."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
        if match:
            return match[1]
    except OSError:
        pass
    nvml = links.nvml()
    return nvml.nvmlSystemGetDriverVersion() if nvml else None


def _gpu(index: int) -> dict[str, Any]:
    p = torch.cuda.get_device_properties(index)
    out: dict[str, Any] = {"name": p.name, "memory_gib": p.total_memory / 2**30, "capability": f"{p.major}.{p.minor}"}
    nvml = links.nvml()
    if nvml is None:
        return out
    try:
        uuid = str(p.uuid)
        handle = links.handle(nvml, uuid)
    except Exception:
        return out
    readings = {
        "uuid": lambda: uuid,
        "power_cap_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_generation_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    }
    for key, read in readings.items():
        try:
            out[key] = read()
        except Exception:  # a device that does not support a reading has no such key
            continue
    return out
