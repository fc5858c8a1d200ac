"""SignSGD (Bernstein et al. 2018, arXiv 1802.04434) with decoupled weight decay: no state at all."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from train import config
from train.parallel.adamw import AdamW, Piece


class SignSGD(AdamW):
    """w ← w (1 - lr x decay) - lr sign(g), by the interface of AdamW."""

    def __init__(self, pieces: Sequence[Piece], optim: config.Optim) -> None:
        self.tap = None
        self.pieces = [p for p in pieces if p.tensor.numel()]
        self.tensors = [p.tensor for p in self.pieces]
        self._decayed = [p.tensor for p in self.pieces if p.decay]
        self._weight_decay = optim.weight_decay

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float | Tensor) -> None:
        """As AdamW's."""
        rate = float(lr)
        torch._foreach_mul_(list(grads), scale)
        if self.tap is not None:
            self.tap(self.pieces, grads)
        if self._decayed:
            torch._foreach_mul_(self._decayed, 1 - rate * self._weight_decay)
        if self.tensors:
            torch._foreach_add_(self.tensors, torch._foreach_sign(list(grads)), alpha=-rate)

    def state(self, piece: Piece, kind: str) -> Tensor:
        """`kind`: weight alone. Raises KeyError for the moments that there are none of."""
        return {"weight": piece.tensor}[kind]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for piece in self.pieces:
            yield f"{piece.name}.weight", piece.tensor
