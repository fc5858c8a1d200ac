"""parallelism.async_tp: Inductor splits a matmul and the gather before it, or the scatter after it, into steps that overlap.

Its pass (torch._inductor.fx_passes.micro_pipeline_tp) replaces what tensor.py's `gather` and `scatter` trace to by operators on
symmetric memory, which GPUs read from each other directly. Needs compiled layers and GPUs with peer access.
"""

import warnings

import torch
from torch._inductor import config as inductor
from torch.distributed import _symmetric_memory as symmetric

from train.config import ConfigError
from train.parallel.dims import Dims
from train.parallel.peers import reach

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
    group = dims.group("tp")
    reach(dims, group, KEY, True, "false")
    with warnings.catch_warnings():
        # torch says that it need not be called any more; Inductor's pass still asks whether it was (2.11 to 2.13)
        warnings.simplefilter("ignore", FutureWarning)
        if hasattr(symmetric, "enable_symm_mem_for_group"):
            symmetric.enable_symm_mem_for_group(group.group_name)
    inductor._micro_pipeline_tp = True
