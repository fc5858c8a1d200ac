"""Where Triton can run."""

import functools
import importlib.util
import os

import torch

from train import config
from train.kernels import names


def used(cfg: config.Train, device: torch.device) -> tuple[str, ...]:
    """The kernels of this rank, whose mesh is resolved: what was asked for; of `auto` what fits, where Triton runs."""
    if cfg.compile.kernels == "auto" and not (device.type == "cuda" and triton_runs(device)):
        return ()
    return names.fitting(cfg, {name: int(getattr(cfg.parallelism, name)) for name in ("pp", "cp", "tp")})


def triton_runs(device: torch.device) -> bool:
    """Whether the kernels run on `device`: on GPUs where Triton is installed; on a CPU under Triton's interpreter only."""
    return _installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
