"""From a configuration to the reduction that it names."""

import torch
from torch import nn

from train import config
from train.kernels import stacked
from train.parallel import mesh
from train.parallel.base import DataParallel
from train.parallel.dims import REDUCE, Dims

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(cfg: config.Train, device: torch.device) -> torch.dtype:
    """The dtype that forward and backward run in; precision=auto is bf16 on a GPU and fp32 on a CPU."""
    if cfg.precision.name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[cfg.precision.name]


def param_dtype(cfg: config.Train, compute: torch.dtype) -> torch.dtype:
    """The dtype in which `build` wants the model: fsdp's parameters are the masters, the other reductions make masters."""
    return torch.promote_types(compute, torch.float32) if cfg.reduction.name == "fsdp" else compute


def build(model: nn.Module, cfg: config.Train, dims: Dims) -> DataParallel:
    """Take over `model`: this rank's part, on its device (for fsdp it may be on the meta device), in `param_dtype`, compiled
    layers before, not after.

    Raises ConfigError where torch can't do what is asked for.
    """
    if cfg.optim.grad_dtype == "fp32":  # gradients add up, over micro-batches and ranks, in more than bf16's 8 bits
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise config.ConfigError("optim.grad_dtype", "fp32", f"torch {torch.__version__} ties it to the weights'")
        for p in model.parameters():
            if p.dtype == torch.bfloat16:
                p.grad_dtype = torch.float32
    dp = _reduction(model, cfg, dims)
    stacked.follow(model)
    return dp


def _reduction(model: nn.Module, cfg: config.Train, dims: Dims) -> DataParallel:
    if cfg.reduction.name == "fsdp":
        from train.parallel.fsdp import Fsdp

        return Fsdp(model, cfg, dims, compute_dtype(cfg, dims.device))
    if cfg.reduction.name in mesh.ZERO2 and dims.size(*REDUCE) > 1:
        from train.parallel.zero2 import Zero2

        return Zero2(model, cfg, dims)
    from train.parallel.replicated import Replicated

    return Replicated(model, cfg, dims)
