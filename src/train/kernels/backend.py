"""Where Triton can run."""

import functools
import importlib.util
import os

import torch


def triton_runs(device: torch.device) -> bool:
    """Whether the kernels run on `device`: on GPUs where Triton is installed; on a CPU under Triton's interpreter only."""
    return _installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
