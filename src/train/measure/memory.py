"""Memory of one rank: device peak inside the steps and over the run, or the resident set on a CPU. All in GiB."""

import resource
from pathlib import Path

import torch

GIB = 2**30
_outside: dict[str, int] = {}  # kind → bytes: see `outside`


def start_step(device: torch.device) -> None:
    """The peak counts from here. On a CPU there is nothing to reset: the kernel keeps one peak per process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float:
    """Largest allocated device memory since the last start_step, or the process's peak resident set."""
    if device.type == "cuda":
        # not max_memory_allocated: it sorts all of the allocator's counters by name for this one, and every step asks
        counters = torch.cuda.memory_stats_as_nested_dict(device)
        return (float(counters["allocated_bytes"]["all"]["peak"]) + sum(_outside.values())) / GIB
    return host_peak()


def outside(kind: str, nbytes: int) -> None:
    """So many bytes of the device are held from now on, for `kind`, that torch's allocator doesn't count."""
    _outside[kind] = _outside.get(kind, 0) + nbytes


def held_outside() -> dict[str, int]:
    """Kind → bytes of what `outside` was told of."""
    return dict(_outside)


def host_peak() -> float:
    """Largest resident set of this process so far, pinned buffers included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def kind(device: torch.device) -> str:
    """`device`: allocated by torch's allocator; `rss`: resident set."""
    return "device" if device.type == "cuda" else "rss"


def capacity(device: torch.device) -> float:
    """What this rank could use at most: the device's memory, or the cgroup's limit, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total / GIB
