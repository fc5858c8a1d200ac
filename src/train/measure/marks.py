"""Moments on a device's own clock: events on a GPU's compute stream, which nothing waits for; the host's clock on a CPU."""

import time
from typing import Any

import torch

Mark = Any  # a torch.cuda.Event, or seconds of the monotonic clock


def mark(device: torch.device) -> Mark:
    """Now, where the compute stream has got to."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Between two marks, which on a GPU have happened."""
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3
    return float(end - begin)
