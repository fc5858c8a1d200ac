"""A rank's own account of its failure: what kind, where, and the memory at that moment. Runs in the rank, imports torch."""

import errno
import os
import re
import resource
import time
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from train.config import ConfigError
from train.launch import limits
from train.measure import memory
from train.measure.metrics import NonFinite

GIB = 2**30
#: descriptors that one step of a library (an event loop, a socket with its pair) opens at a time
SPARE_FILES = 10
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
#: how a collective's error reads on the rank whose peer has gone
_COMM = (
    "Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "nccl", "Socket", "recvValue failed",
    "wait timeout", "process group",
)  # fmt: skip


def kind_of(error: BaseException) -> str:
    """oom (device) | host_oom | invalid | nonfinite | comm (may be the consequence of a peer's failure) | error."""
    text = str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or getattr(error, "errno", 0) == errno.ENOMEM:
        return "host_oom"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return "oom"
    if isinstance(error, ConfigError):
        return "invalid"
    if isinstance(error, NonFinite):
        return "nonfinite"
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in _COMM)):
        return "comm"
    return "error"


def requested(text: str) -> Optional[int]:
    """Bytes that a failed allocation asked for, from torch's message; None where it does not say."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|B|[KMGT]iB)", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def memory_now(device: Optional[torch.device], text: str) -> dict[str, Any]:
    """GiB at failure: requested, free, total, and what this process holds."""
    out: dict[str, Any] = {}
    asked = requested(text)
    if asked is not None:
        out["requested_gib"] = asked / GIB
    if device is not None and device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
            out |= {"free_gib": free / GIB, "total_gib": total / GIB}
            out |= {
                "allocated_gib": torch.cuda.memory_allocated(device) / GIB,
                "reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            }
        except RuntimeError:  # the context itself is gone
            pass
        return out
    out["rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            out["free_gib"] = int(line.split()[1]) * 1024 / GIB
    out["total_gib"] = memory.capacity(torch.device("cpu"))
    return out


def _limited(error: BaseException) -> bool:
    """Did the rank run into a limit on processes or open files? Libraries often lose the system's own error."""
    numbers = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
    if getattr(error, "errno", None) in numbers or "can't start new thread" in str(error):
        return True
    try:
        return (
            sum(1 for _ in Path("/proc/self/fd").iterdir())
            >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
        )
    except OSError:  # not even one more for the listing
        return True


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib < 10**6 else f"{gib:.3g} GiB"


def describe(error: BaseException, step: int, device: Optional[torch.device]) -> dict[str, Any]:
    """The record for the supervisor: {kind, type, message, at (monotonic seconds), step, memory}."""
    at = time.monotonic()
    kind, text = kind_of(error), str(error).strip()
    record: dict[str, Any] = {"kind": kind, "type": type(error).__name__, "at": at, "step": step}
    message = (text.splitlines() or [""])[0][:500]
    if kind in ("oom", "host_oom"):
        on_gpu = kind == "oom" and device is not None and device.type == "cuda"
        m = record["memory"] = memory_now(device if on_gpu else None, text)
        what = "device" if on_gpu else "host"
        parts = [f"{_size(m['requested_gib'])} requested"] if "requested_gib" in m else []
        parts += [f"{_size(m['free_gib'])} free of {_size(m['total_gib'])}"] if "free_gib" in m else []
        parts += [f"{_size(m['allocated_gib'])} allocated by torch"] if "allocated_gib" in m else []
        record["where"] = what
        message = f"out of {what} memory: {', '.join(parts)}"
    elif _limited(error):
        record["limits"] = limits.named()  # this rank's own, for the reason
    record["message"] = message
    record["pid"] = os.getpid()
    return record
