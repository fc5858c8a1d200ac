"""parallelism.async_tp: Inductor splits a matmul and the gather before it, or the scatter after it, into steps that overlap.

Its pass (torch._inductor.fx_passes.micro_pipeline_tp) replaces what tensor.py's `gather` and `scatter` trace to by operators on
symmetric memory, which GPUs read from each other directly. Needs compiled layers and GPUs with peer access.
"""

from typing import Any

import torch
from torch._inductor import config as inductor
from torch.distributed import _symmetric_memory as symmetric

from train.config import ConfigError
from train.parallel.dims import Dims

KEY = "parallelism.async_tp"


def enable(dims: Dims) -> None:
    """For the tp ranks' group, before anything is compiled. Collective.

    Raises ConfigError where torch or the GPUs can't.
    """
    if not hasattr(inductor, "_micro_pipeline_tp"):
        raise ConfigError(
            KEY, True, f"torch {torch.__version__} has no micro-pipelined tensor parallel; set it to false"
        )
    if dims.device.type != "cuda":
        raise ConfigError(KEY, True, "symmetric memory needs GPUs; set it to false")
    here = dims.device.index
    first = here - dims.index("tp")  # tp is innermost: its ranks are neighbours
    for peer in range(first, first + dims.size("tp")):
        if not 0 <= peer < torch.cuda.device_count():
            raise ConfigError(KEY, True, f"tp {dims.size('tp')} reaches beyond this node's GPUs; set it to false")
        if peer != here and not torch.cuda.can_device_access_peer(here, peer):
            raise ConfigError(KEY, True, f"GPU {here} can't read the memory of GPU {peer}; set it to false")
    announce(dims.group("tp"))
    inductor._micro_pipeline_tp = True


def announce(group: Any) -> None:
    """That `group`'s ranks will use symmetric memory; from torch 2.13 on every group can."""
    enable = getattr(symmetric, "enable_symm_mem_for_group", None)
    if enable is not None and not hasattr(enable, "__deprecated__"):
        enable(group.group_name)
