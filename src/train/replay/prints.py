"""Fingerprints of gradients, made on the device while backward runs, so that a difference is seen where it begins.

Weights and optimizer state alone would not tell: clipping by the global norm spreads one wrong element over every tensor
of every rank within the same step. A fingerprint costs two reads of the gradient, no copy and no synchronisation.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from train.parallel.adamw import AdamW, Piece

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@cache
def _weights(count: int, device: torch.device) -> Tensor:
    """[count] odd int64: an odd factor loses no bit modulo 2^64."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as a matrix of the widest integers that fit: torch sums int64 as it is and copies what is narrower."""
    flat = tensor.detach().contiguous()
    rows = flat.flatten(1) if flat.ndim > 1 else flat.view(1, -1)
    at, width = rows.storage_offset() * rows.element_size(), rows.shape[1] * rows.element_size()
    return rows.view(next(word for word in _WORDS if at % word.itemsize == 0 == width % word.itemsize))


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """[2] int64 on the tensor's device: weighted sums, modulo 2^64, of the row sums and of the column sums of its bits.

    One changed element always changes both. Integer addition has no rounding, so the order of sums does not matter.
    """
    words = _words(tensor)
    sums = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
    return torch.stack([(part * _weights(len(part), part.device)).sum() for part in sums])  # wraps, as int64 does


class Prints:
    """Of one step: local gradients in the order in which backward finishes them, and the reduced ones that a rank owns."""

    def __init__(self, model: nn.Module) -> None:
        """Hook the parameters; before the reduction takes them over, which may send and free a gradient at once."""
        self._seen: dict[str, dict[str, Tensor]] = {"grad": {}, "grad_sum": {}}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._add("grad", name, p.grad))

    def watch(self, owners: Sequence[AdamW]) -> None:
        """See the reduced gradients too, as the optimizers get them."""
        for owner in owners:
            owner.tap = self._reduced

    def _reduced(self, pieces: Sequence[Piece], grads: Sequence[Tensor]) -> None:
        for piece, grad in zip(pieces, grads, strict=True):
            self._add("grad_sum", piece.name, grad)

    def _add(self, stage: str, name: str, grad: Tensor | None) -> None:
        if grad is None or not grad.numel():
            return
        seen = self._seen[stage]
        key = f"{name}.{stage}"
        if key in seen:  # another micro-batch of the same step
            key = f"{key}[{sum(k.split('[')[0] == key for k in seen)}]"
        seen[key] = fingerprint(grad)

    def take(self) -> dict[str, dict[str, str]]:
        """{stage: {name: hex}} of the step that ended; the next one starts empty. Waits for the device."""
        taken = {}
        for stage, seen in self._seen.items():
            table = torch.stack(list(seen.values())).cpu() if seen else torch.zeros(0, 2, dtype=torch.int64)
            taken[stage] = {k: row.numpy().tobytes().hex() for k, row in zip(seen, table, strict=True)}
            seen.clear()
        return taken
