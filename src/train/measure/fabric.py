"""What the links of these ranks carry: host to device and back, all-reduce and all-to-all at a few sizes.

Bus bandwidth as NCCL's tests define it (nccl-tests, doc/PERFORMANCE.md): bytes over time, times 2 (n-1)/n for all-reduce and
(n-1)/n for all-to-all, so that it can be held against a link's speed whatever the number of ranks.
"""

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.parallel import collectives

SIZES = {"cuda": (2**20, 16 * 2**20, 256 * 2**20), "cpu": (2**16, 2**20, 8 * 2**20)}  # bytes on each rank
REPEATS = 5
COPY_BYTES = 256 * 2**20  # host to device; large enough that the latency of a copy is nothing


def cached(path: Path, device: torch.device, rank: int, world: int) -> dict[str, Any] | None:
    """This host's entry of fabric.json, measured unless it is there. Collective; rank 0 decides, writes, and alone gets it."""
    key = f"{socket.gethostname()}-{device.type}-{world}-{_settings()}"
    known = _read(path) if rank == 0 else {}
    there = torch.tensor([key in known], dtype=torch.int64, device=device)
    if world > 1:
        dist.broadcast(there, 0)
    if not there.item():
        known[key] = measure(device, world)
        if rank == 0 and path.parent.is_dir():
            temp = path.with_suffix(f".{os.getpid()}")
            temp.write_text(json.dumps(known, indent=1))
            temp.replace(path)
    return known[key] if rank == 0 else None


def _settings() -> str:
    """NCCL's own settings change what the links carry."""
    names = ("NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")
    return ",".join(f"{n[5:]}={os.environ[n]}" for n in names if n in os.environ) or "default"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def measure(device: torch.device, world: int) -> dict[str, Any]:
    """GB/s (1e9 bytes): {"host_to_device", "device_to_host"} on a GPU, {"all_reduce", "all_to_all": {bytes: bus bandwidth}}
    with several ranks. Collective."""
    out: dict[str, Any] = {}
    if device.type == "cuda":
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        out["host_to_device"] = COPY_BYTES / _seconds(device, lambda: there.copy_(host, non_blocking=True)) / 1e9
        out["device_to_host"] = COPY_BYTES / _seconds(device, lambda: host.copy_(there, non_blocking=True)) / 1e9
    if world > 1:
        for name, factor in (("all_reduce", 2 * (world - 1) / world), ("all_to_all", (world - 1) / world)):
            out[name] = {str(n): n * factor / _seconds(device, _collective(name, n, device, world)) / 1e9
                         for n in SIZES[device.type]}  # fmt: skip
    return out


def _collective(name: str, nbytes: int, device: torch.device, world: int) -> Callable[[], Any]:
    sent = torch.zeros(nbytes // 4 // world * world, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(sent)
    received = torch.empty_like(sent)
    return lambda: collectives.all_to_all(received, sent)


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Median of some repeats after a first one, which connects and allocates."""
    times = []
    for _ in range(REPEATS + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
