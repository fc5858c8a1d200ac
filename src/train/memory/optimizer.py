"""The optimizer that optim.*, memory.optimizer_offload and optim.state_dtype ask for, by the interface of AdamW."""

from collections.abc import Sequence

import torch
from torch import Tensor

from train import config
from train.kernels import backend
from train.kernels.adamw import FusedAdamW
from train.memory.host import HostOptimizer
from train.memory.sign_sgd import SignSGD
from train.memory.streamed import Ring, StreamedAdamW
from train.parallel.adamw import AdamW, Piece

DTYPES = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}


class Optimizers:
    """Makes the optimizers of one rank's model; those of one model share the streams that their state travels on."""

    def __init__(self, cfg: config.Train, device: torch.device) -> None:
        self._cfg, self._device = cfg, device
        self.full = cfg.memory.optimizer_offload == "full"
        self.fused = "adamw" in backend.used(cfg, device)
        self._streamed = cfg.memory.optimizer_offload == "optimizer"
        self._ring = Ring(device)

    def master(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The master copy of a device's weight: the weight itself where `dtype` is its own; on the host under full."""
        if not self.full:
            return weight.to(dtype)
        pinned = self._device.type == "cuda"
        return torch.empty(weight.shape, dtype=dtype, pin_memory=pinned).copy_(weight)

    def make(self, pieces: Sequence[Piece], weights: Sequence[Tensor] = ()) -> AdamW:
        """Of `pieces`. `weights`, one for each or none: the device's, where the optimizer makes them follow their masters."""
        optim = self._cfg.optim
        if self.full:
            return HostOptimizer(pieces, weights, optim, self._device)
        if optim.name == "sign_sgd":
            return SignSGD(pieces, optim)
        dtype = DTYPES[optim.state_dtype]
        if self.fused:
            return FusedAdamW(pieces, weights, optim, dtype)
        if self._streamed or any(dtype not in (None, p.tensor.dtype) for p in pieces):
            return StreamedAdamW(pieces, optim, dtype, self._ring, self._streamed)
        return AdamW(pieces, optim)
