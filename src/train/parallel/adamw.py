"""AdamW on the pieces of the master weights that a rank owns, and clipping by the global norm."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train import config


@dataclass(frozen=True)
class Piece:
    """What a rank owns of one parameter: the whole of it, a slice of its flat elements, or some of its rows."""

    name: str
    tensor: Tensor  # master weights, fp32 (fp64 for fp64 weights); updated in place
    decay: bool  # matrices decay, norms and biases don't


class AdamW:
    """torch's fused AdamW over pieces, with its state made at once so that it can be hashed or loaded before step 1."""

    fused = False  # reads gradients in their own dtype and writes the weights too: train.kernels.adamw

    def __init__(self, pieces: Sequence[Piece], optim: config.Optim) -> None:
        self.pieces = [p for p in pieces if p.tensor.numel()]  # a rank may own nothing of a small parameter
        self.tensors = [p.tensor for p in self.pieces]
        self.tap: Callable[[list[Piece], Sequence[Tensor]], None] | None = None  # sees reduced gradients (train.replay)
        groups = [
            {"params": [p.tensor for p in self.pieces if p.decay], "weight_decay": optim.weight_decay},
            {"params": [p.tensor for p in self.pieces if not p.decay], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        if not groups:
            self.optimizer = None
            return
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )
        for p in self.tensors:
            step = torch.zeros((), dtype=torch.float32, device=p.device)  # the dtype that the fused kernels read
            self.optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float) -> None:
        """Update with grads * scale; `grads` (one for each of `tensors`, its shape and dtype) are overwritten.

        `scale`: 0-dim, of the gradients' dtype, on their device.
        """
        if self.optimizer is None:
            return
        if self.tap is not None:
            self.tap(self.pieces, grads)
        torch._foreach_mul_(list(grads), scale)
        for p, grad in zip(self.tensors, grads, strict=True):
            p.grad = grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for p in self.tensors:
            p.grad = None

    def state(self, piece: Piece, kind: str) -> Tensor:
        """`kind`: weight, exp_avg, exp_avg_sq or step."""
        if kind == "weight":
            return piece.tensor
        assert self.optimizer is not None
        tensor: Tensor = self.optimizer.state[piece.tensor][kind]
        return tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name.kind, live tensor) of all pieces."""
        for piece in self.pieces:
            for kind in ("weight", "exp_avg", "exp_avg_sq", "step"):
                yield f"{piece.name}.{kind}", self.state(piece, kind)


def norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """2-norm of each tensor, [len(tensors)] fp64: sums of squares in fp64 hardly depend on where tensors are cut."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))


def clip_scale(norm: Tensor, clip_norm: float | None, divisor: int) -> Tensor:
    """What summed gradients are multiplied by: 1/divisor, and clip_norm/norm where the norm is above clip_norm.

    `norm`: 0-dim, of the averaged gradient. A tensor all the way: no host synchronisation.
    """
    if clip_norm is None:
        return torch.full_like(norm, 1.0 / divisor)
    return (clip_norm / norm.clamp(min=clip_norm)) / divisor


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp32 weights, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
