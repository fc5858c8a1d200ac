"""A bucket: consecutive parameters in one flat buffer of weights, cut into one contiguous slice for each rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from train.parallel.adamw import Piece, master_dtype

Master = Callable[[Tensor, torch.dtype], Tensor]  # a weight's master copy, wherever it is kept
Buffer = Callable[[int, torch.dtype], Tensor]  # flat memory for weights
#: elements; 256 bytes in bf16, so that what begins inside a buffer is as well aligned as a tensor of its own
ALIGN = 128


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat buffer."""

    name: str
    parameter: nn.Parameter
    start: int  # elements
    numel: int
    decay: bool


class Bucket:
    """Parameters become views into `weight`, [world * shard] in their dtype; rank r owns elements [r * shard, (r+1) * shard).

    `master`: this rank's slice in fp32 (fp64 for fp64 weights); the slice of `weight` itself where the dtypes are equal.
    Gaps between parameters and at the end hold zeros: they are reduced and gathered along and belong to no parameter.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        world: int,
        rank: int,
        master: Master = torch.Tensor.to,
        buffer: Buffer | None = None,
    ) -> None:
        first = named[0][1]
        self.slots: list[Slot] = []
        end = 0
        for name, p in named:
            start = end if self.slots and together(self.slots[-1].parameter, p) else _aligned(end)
            self.slots.append(Slot(name, p, start, p.numel(), p.ndim >= 2))
            end = start + p.numel()
        self.world, self.rank = world, rank
        self.shard = _aligned(-(-end // world))
        size = world * self.shard
        self.weight = (
            torch.zeros(size, dtype=first.dtype, device=first.device) if buffer is None else buffer(size, first.dtype)
        )
        for slot in self.slots:
            view = self.weight[slot.start : slot.start + slot.numel].view(slot.parameter.shape)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        self.own = self.weight[rank * self.shard : (rank + 1) * self.shard]
        self.master = master(self.own, master_dtype(first.dtype))
        self.gaps = [self.weight.new_zeros(gap) for gap in self._gaps()]  # what follows each parameter, as gradients
        self.grad: Tensor | None = None  # this rank's slice of the sum over ranks, [shard] in the master's dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def pieces(self) -> list[Piece]:
        """What this rank owns of each parameter, as views of the master."""
        return [Piece(slot.name, self.master[low:high], slot.decay) for slot, low, high in self.owned()]

    def grad_pieces(self) -> list[Tensor]:
        """The gradients of `pieces()`, as views of `grad`."""
        assert self.grad is not None
        return [self.grad[low:high] for _, low, high in self.owned()]

    def pack_grads(self, out: Tensor | None = None) -> Tensor:
        """All gradients in one flat buffer, `out` or a new one, of the layout of `weight`, zeros where there is none; clears
        the parameters'."""
        parts = []
        for slot, gap in zip(self.slots, self.gaps, strict=True):
            grad = slot.parameter.grad
            parts.append(self.weight.new_zeros(slot.numel) if grad is None else grad.reshape(-1))
            if len(gap):  # an empty part would cost cat its fast kernel
                parts.append(gap)
            slot.parameter.grad = None
        return torch.cat(parts, out=out)

    def gathered(self, shards: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) from the flat [world * shard] concatenation of all ranks' slices."""
        for slot in self.slots:
            yield slot.name, shards[slot.start : slot.start + slot.numel].view(slot.parameter.shape)

    def owned(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, low, high): the slice of this rank's shard that lies in the parameter."""
        base = self.rank * self.shard
        for slot in self.slots:
            low, high = max(slot.start, base), min(slot.start + slot.numel, base + self.shard)
            if low < high:
                yield slot, low - base, high - base

    def _gaps(self) -> Iterator[int]:
        ends = [slot.start for slot in self.slots[1:]] + [self.world * self.shard]
        return (end - slot.start - slot.numel for slot, end in zip(self.slots, ends, strict=True))


def make_buckets(
    named: Sequence[tuple[str, nn.Parameter]],
    mib: float,
    world: int,
    rank: int,
    master: Master = torch.Tensor.to,
    buffer: Buffer | None = None,
) -> list[Bucket]:
    """Buckets of at most `mib` MiB of gradients (a larger parameter or stack gets one of its own) in reverse order of
    registration: about the order in which backward finishes gradients. All parameters of a bucket have one dtype. Those that
    lie in one memory (`together`) stay so, in their order: backward finishes them at once."""
    stacks: list[list[tuple[str, nn.Parameter]]] = []
    for name, p in named:
        if stacks and together(stacks[-1][-1][1], p):
            stacks[-1].append((name, p))
        else:
            stacks.append([(name, p)])
    buckets: list[Bucket] = []
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for stack in reversed(stacks):
        nbytes = sum(p.numel() * p.element_size() for _, p in stack)
        if group and (size + nbytes > mib * 2**20 or stack[0][1].dtype != group[0][1].dtype):
            buckets.append(Bucket(group, world, rank, master, buffer))
            group, size = [], 0
        group += stack
        size += nbytes
    return [*buckets, Bucket(group, world, rank, master, buffer)] if group else buckets


def together(a: Tensor, b: Tensor) -> bool:
    """Does b begin where a ends, in one memory? As train.kernels.stacked lays weights."""
    one = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return one and a.storage_offset() + a.numel() == b.storage_offset()


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
