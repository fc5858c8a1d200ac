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
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over pieces, with its state made at once so that it can be hashed
    or loaded before step 1.

    One call of the operator under torch.optim.AdamW(fused=True) for the pieces that decay and one for the others, on lists
    that are made once: the optimizer object would go through all pieces several times a step in Python.
    """

    fused = False  # reads gradients in their own dtype and writes the weights too: train.kernels.adamw

    def __init__(self, pieces: Sequence[Piece], optim: config.Optim) -> None:
        self.pieces = [p for p in pieces if p.tensor.numel()]  # a rank may own nothing of a small parameter
        self.tensors = [p.tensor for p in self.pieces]
        self.tap: Callable[[list[Piece], Sequence[Tensor]], None] | None = None  # sees reduced gradients (train.replay)
        self._optim = optim
        if not self.pieces:
            return
        # one counter a piece, as torch has it, in one tensor: fp32 is what the fused kernels read
        self._steps = torch.zeros(len(self.pieces), dtype=torch.float32, device=self.tensors[0].device)
        self._kinds = {
            "exp_avg": [torch.zeros_like(p) for p in self.tensors],
            "exp_avg_sq": [torch.zeros_like(p) for p in self.tensors],
            "step": list(self._steps),
        }
        self._place = {id(p): i for i, p in enumerate(self.pieces)}
        everything = (self.tensors, *self._kinds.values())
        self._groups = []  # (which pieces, their lists for the operator, weight decay)
        for decay in (True, False):
            index = [i for i, p in enumerate(self.pieces) if p.decay == decay]
            lists = [[tensors[i] for i in index] for tensors in everything]
            self._groups.append((index, lists, optim.weight_decay if decay else 0.0))

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float | Tensor) -> None:
        """Update with grads * scale; `grads` (one for each of `tensors`, its shape and dtype) are overwritten.

        `scale`: 0-dim, of the gradients' dtype, on their device. `lr`: a number, or 0-dim fp32 on the device.
        """
        if not self.pieces:
            return
        if self.tap is not None:
            self.tap(self.pieces, grads)
        torch._foreach_mul_(list(grads), scale)
        self._steps += 1
        o = self._optim
        for index, (weights, exp_avgs, exp_avg_sqs, steps), weight_decay in self._groups:
            if index:
                torch._fused_adamw_(
                    weights, [grads[i] for i in index], exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=o.beta1,
                    beta2=o.beta2, weight_decay=weight_decay, eps=o.eps, amsgrad=False, maximize=False,
                )  # fmt: skip

    def norms(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """`norms` of the gradients of all `tensors`, which `step` gets next."""
        return norms(grads, device)

    def captured(self) -> None:
        """A call of `step` was recorded (parallel/graph.py): what it reads of the host's making is to be put in place, once."""

    def state(self, piece: Piece, kind: str) -> Tensor:
        """`kind`: weight, exp_avg, exp_avg_sq or step."""
        return piece.tensor if kind == "weight" else self._kinds[kind][self._place[id(piece)]]

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
