"""AdamW whose moments rest elsewhere or in another dtype, and visit the device in fp32 for their update.

memory.optimizer_offload=optimizer: in pinned host memory; a chunk's moments come and go on two streams of their own
beside the update of the chunks around it. optim.state_dtype=bf16: half the memory, rounded once a step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from train import config
from train.parallel.adamw import AdamW, Piece

CHUNK_BYTES = 256 << 20  # master weights whose moments are on the device at once
LEAVING = 2  # chunks on their way back, whose device memory is still held


class Ring:
    """The chunks of one model in the order of their updates: while one is updated the next is fetched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.chunks: list[_Chunk] = []
        cuda = device.type == "cuda"
        self.coming, self.going = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self._leaving: list[tuple[Any, list[Tensor]]] = []

    def after(self, chunk: "_Chunk") -> "_Chunk | None":
        """The one that is updated next in this step."""
        index = chunk.index + 1
        return self.chunks[index] if index < len(self.chunks) else None

    def hold(self, event: Any, tensors: list[Tensor]) -> None:
        """Keep tensors that compute made until `event`; their memory returns to compute behind it."""
        self._leaving.append((event, tensors))
        while len(self._leaving) > LEAVING:
            torch.cuda.current_stream().wait_event(self._leaving.pop(0)[0])

    def settle(self) -> None:
        """The host waits until all moments are back."""
        if self.going is not None:
            self.going.synchronize()
        self._leaving.clear()


class StreamedAdamW(AdamW):
    """By the interface of AdamW. The update is torch's fused kernel on fp32 (fp64 for fp64) moments, as there."""

    def __init__(
        self, pieces: Sequence[Piece], optim: config.Optim, dtype: torch.dtype | None, ring: Ring, to_host: bool
    ) -> None:
        """`dtype`: of the moments at rest, None for the masters'; `to_host`: where they rest."""
        self.tap = None
        self.pieces = [p for p in pieces if p.tensor.numel()]
        self.tensors = [p.tensor for p in self.pieces]
        self._ring, self._optim = ring, optim
        self._chunks = [_Chunk(group, optim, dtype, ring, to_host) for group in _groups(self.pieces)]
        self._moments = {id(p): moments for c in self._chunks for p, moments in zip(c.pieces, c.rest, strict=True)}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], scale: Tensor, lr: float | Tensor) -> None:
        if not grads:
            return
        torch._foreach_mul_(list(grads), scale)
        if self.tap is not None:
            self.tap(self.pieces, grads)
        start = 0
        for chunk in self._chunks:
            chunk.update(grads[start : start + len(chunk.pieces)], lr)
            start += len(chunk.pieces)

    def state(self, piece: Piece, kind: str) -> Tensor:
        if kind == "weight":
            return piece.tensor
        self._ring.settle()
        return self._moments[id(piece)][kind]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for piece in self.pieces:
            for kind in ("weight", "exp_avg", "exp_avg_sq", "step"):
                yield f"{piece.name}.{kind}", self.state(piece, kind)


class _Chunk:
    """Pieces whose moments travel together."""

    def __init__(
        self, pieces: list[Piece], optim: config.Optim, dtype: torch.dtype | None, ring: Ring, to_host: bool
    ) -> None:
        self.pieces, self._optim, self._ring, self._to_host = pieces, optim, ring, to_host
        self.index = len(ring.chunks)
        ring.chunks.append(self)
        self.rest = [self._zeros(p.tensor, dtype or p.tensor.dtype) for p in pieces]
        self._here: list[list[Tensor]] | None = None  # [exp_avg of all, exp_avg_sq of all], on their way or arrived
        self._arrived: Any = None
        self._gone: Any = None

    def _zeros(self, master: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        where = torch.device("cpu") if self._to_host else master.device
        pinned = self._to_host and master.is_cuda
        shape = tuple(master.shape)
        return {
            "exp_avg": torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned),
            "exp_avg_sq": torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned),
            "step": torch.zeros((), dtype=torch.float32, device=master.device),  # what the fused kernels read
        }

    def fetch(self) -> None:
        """Start bringing the moments to the device."""
        if self._here is not None:
            return
        kinds = ("exp_avg", "exp_avg_sq")
        if not self._to_host or self._ring.coming is None:
            self._here = [[self._copy(p, m[k]) for p, m in zip(self.pieces, self.rest, strict=True)] for k in kinds]
            return
        # allocated by compute, which frees them too; what used the memory before comes first
        self._here = [[torch.empty_like(m[k], device=self._ring.device) for m in self.rest] for k in kinds]
        self._ring.coming.wait_stream(torch.cuda.current_stream())
        if self._gone is not None:
            self._ring.coming.wait_event(self._gone)
        with torch.cuda.stream(self._ring.coming):
            for kind, tensors in zip(kinds, self._here, strict=True):
                for moments, tensor in zip(self.rest, tensors, strict=True):
                    tensor.copy_(moments[kind], non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._ring.coming)

    def _copy(self, piece: Piece, moment: Tensor) -> Tensor:
        return moment.to(piece.tensor.device, piece.tensor.dtype, copy=True)

    def update(self, grads: Sequence[Tensor], lr: float | Tensor) -> None:
        self.fetch()
        if self._to_host and (following := self._ring.after(self)) is not None:
            following.fetch()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None
        assert self._here is not None
        here, self._here = self._here, None
        wide = [[m.to(p.tensor.dtype) for p, m in zip(self.pieces, kind, strict=True)] for kind in here]
        for decay in (True, False):
            mine = [i for i, p in enumerate(self.pieces) if p.decay == decay]
            if mine:
                self._adamw(mine, grads, wide, lr, self._optim.weight_decay if decay else 0.0)
        self._return(here, wide)

    def _adamw(
        self, mine: list[int], grads: Sequence[Tensor], wide: list[list[Tensor]], lr: float | Tensor, decay: float
    ) -> None:
        o = self._optim
        adamw(
            [self.pieces[i].tensor for i in mine],
            [grads[i] for i in mine],
            [wide[0][i] for i in mine],
            [wide[1][i] for i in mine],
            [],
            [self.rest[i]["step"] for i in mine],
            fused=True,
            amsgrad=False,
            beta1=o.beta1,
            beta2=o.beta2,
            lr=lr,
            weight_decay=decay,
            eps=o.eps,
            maximize=False,
        )

    def _return(self, here: list[list[Tensor]], wide: list[list[Tensor]]) -> None:
        """Round the moments to their dtype at rest and bring them back."""
        rest = [[m[k] for m in self.rest] for k in ("exp_avg", "exp_avg_sq")]
        going = self._ring.going
        if not self._to_host or going is None:
            for to, tensors in zip(rest, wide, strict=True):
                torch._foreach_copy_(to, tensors)
            return
        for low, tensors in zip(here, wide, strict=True):
            if low[0] is not tensors[0]:
                torch._foreach_copy_(low, tensors)
        going.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(going):
            for to, tensors in zip(rest, here, strict=True):
                for host, tensor in zip(to, tensors, strict=True):
                    host.copy_(tensor, non_blocking=True)
            self._gone = torch.cuda.Event()
            self._gone.record(going)
        self._ring.hold(self._gone, [t for kind in here for t in kind])


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces of about CHUNK_BYTES."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.tensor.nbytes > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.tensor.nbytes
    if group:
        yield group
