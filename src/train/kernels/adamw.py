"""AdamW whose one pass reads gradients in their own dtype and writes the weights that follow the masters.

torch's fused AdamW wants gradients in the masters' dtype, scaled, and leaves the weights to be copied: with bf16 weights
and fp32 masters 48 bytes an element move for an update that reads 14 and writes 14.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from train import config
from train.kernels import backend
from train.parallel.adamw import AdamW, Piece


class FusedAdamW(AdamW):
    """By the interface of AdamW. One step counter for all pieces; moments in any dtype, computed in the masters'."""

    fused = True

    def __init__(
        self, pieces: Sequence[Piece], weights: Sequence[Tensor], optim: config.Optim, dtype: torch.dtype | None
    ) -> None:
        """`weights`: one for each piece, or none; a master that is its own weight has none to write. `dtype`: of the
        moments, None for the masters'."""
        self.tap = None
        kept = [i for i, p in enumerate(pieces) if p.tensor.numel()]
        self.pieces = [pieces[i] for i in kept]
        self.tensors = [p.tensor for p in self.pieces]
        self._optim = optim
        self._weights = [weights[i] for i in kept] if weights else []
        if self._weights and self._weights[0].dtype == self.tensors[0].dtype:
            self._weights = []
        self._moments = [
            (torch.zeros_like(p, dtype=dtype or p.dtype), torch.zeros_like(p, dtype=dtype or p.dtype))
            for p in self.tensors
        ]
        self._index = {id(piece): i for i, piece in enumerate(self.pieces)}
        self._decays = [optim.weight_decay if p.decay else 0.0 for p in self.pieces]
        self._launch = None
        if not self.tensors:
            return
        assert all(t.is_contiguous() for t in (*self.tensors, *self._weights))
        device = self.tensors[0].device
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        if backend.triton_runs(device):
            from train.kernels.jit.adamw import Launch

            self._launch = Launch(self.tensors, self._moments, self._weights, self._decays, optim)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float | Tensor) -> None:
        """Update with grads * scale; `grads` may be of a lower dtype than the masters and are only read.

        `scale`: 0-dim, of the masters' dtype, on their device.
        """
        if not self.tensors:
            return
        if self.tap is not None:
            self.tap(self.pieces, grads)
        assert len({g.dtype for g in grads}) == 1 and len(grads) == len(self.tensors)
        if self._launch is not None:
            self._launch([g.contiguous() for g in grads], scale, self._step, lr)
            return
        self._step += 1
        for i, (master, grad) in enumerate(zip(self.tensors, grads, strict=True)):
            weight = self._weights[i] if self._weights else None
            reference(
                master, grad, *self._moments[i], weight, scale, self._step, float(lr), self._decays[i], self._optim
            )

    def norms(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        if self._launch is None or not all(g.is_contiguous() for g in grads):
            return super().norms(grads, device)
        return self._launch.norms(grads)

    def captured(self) -> None:
        if self.tensors and self._launch is not None:
            self._launch.captured()

    def state(self, piece: Piece, kind: str) -> Tensor:
        if kind == "weight":
            return piece.tensor
        if kind == "step":
            return self._step
        return self._moments[self._index[id(piece)]][kind == "exp_avg_sq"]


def reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    step: Tensor,
    lr: float,
    decay: float,
    optim: config.Optim,
) -> None:
    """What the kernel does to one piece, in place: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), algorithm 2, with
    the bias corrections in fp64 and the rest in the master's dtype."""
    t = step.double()
    size, root = lr / (1 - optim.beta1**t), (1 - optim.beta2**t).sqrt().to(master.dtype)
    g = grad.view_as(master).to(master.dtype) * scale
    first = exp_avg.to(master.dtype) * optim.beta1 + g * (1 - optim.beta1)
    second = exp_avg_sq.to(master.dtype) * optim.beta2 + g * g * (1 - optim.beta2)
    change = first * size.to(master.dtype) / (second.sqrt() / root + optim.eps)
    master.sub_(lr * decay * master).sub_(change)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if weight is not None:
        weight.copy_(master.view_as(weight))
