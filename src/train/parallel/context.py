"""Context parallel: the cp ranks share every sequence, each with T/cp contiguous positions of it.

Only attention looks across positions. Ulysses (Jacobs et al. 2023, arXiv 2309.14509) gives every rank some of the heads
over the whole sequence for it: one all-to-all takes q, k and v from [B, T/cp, H, d] to [B, T, H/cp, d], attention runs there on
the kernel that runs without cp too, and a second all-to-all takes its result back. Backward is the same two in reverse. The
ring is in ring.py. Both stay out of compiled graphs: a compiled layer is in pieces around them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train import config
from train.model.attention import attend
from train.model.transformer import Attention, Transformer
from train.parallel import collectives
from train.parallel.dims import Dims
from train.parallel.traffic import Meter

TRAFFIC = "cp_all_to_all"  # its name in the traffic record


def local_heads(cfg: config.Model, degrees: dict[str, int], method: str) -> tuple[int, int]:
    """(query heads, KV heads) that one rank's attention works on."""
    tp, cp = degrees["tp"], degrees["cp"] if method == "ulysses" else 1
    return cfg.heads // tp // cp, max(1, cfg.kv_heads // tp // cp)


def apply(model: Transformer, dims: Dims, method: str) -> None:
    """Make `model` work on one cp rank's positions. Before compile and reduction."""
    cp = dims.size("cp")
    if cp == 1:
        return
    model.cp = cp, dims.index("cp")
    group = dims.group("cp")
    _lines[group.group_name] = _Line(group, cp, dims.meter)
    across = Ulysses(group.group_name, cp)
    for module in model.modules():
        if isinstance(module, Attention):
            module.across = across


class Ulysses:
    """q [B, T/cp, H, d], k and v [B, T/cp, KV, d] of every rank → attention's [B, T/cp, H, d]. Collective.

    With fewer KV heads than ranks each travels to the cp/KV ranks whose query heads use it.
    """

    def __init__(self, line: str, cp: int) -> None:
        self.line, self.cp = line, cp

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, path: str) -> Tensor:
        q, k, v = _ToHeads.apply(q, k, v, self.line, self.cp)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), path)
        return _ToSequence.apply(out.transpose(1, 2), self.line, self.cp)


class _ToHeads(torch.autograd.Function):
    """[B, T/cp, heads, d] → [B, T, heads/cp, d] of q, k, v in one exchange; few KV heads → [B, T, 1, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, line: str, cp: int) -> tuple[Tensor, ...]:
        ctx.of, ctx.kv_heads = (line, cp), k.shape[2]
        return _to_heads((q, _replicate(k, cp), _replicate(v, cp)), line, cp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = _to_sequence(grads, *ctx.of)
        return dq, _add_copies(dk, ctx.kv_heads), _add_copies(dv, ctx.kv_heads), None, None


class _ToSequence(torch.autograd.Function):
    """[B, T, H/cp, d] → [B, T/cp, H, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: str, cp: int) -> Tensor:
        ctx.of = line, cp
        return _to_sequence((x,), line, cp)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grads, *ctx.of)[0], None, None


def _replicate(x: Tensor, cp: int) -> Tensor:
    """KV heads [B, T/cp, KV, d] → [B, T/cp, max(KV, cp), d]: rank i's query heads use head i * KV // cp."""
    return x if x.shape[2] >= cp else x.repeat_interleave(cp // x.shape[2], 2)


def _add_copies(grad: Tensor, kv_heads: int) -> Tensor:
    """The reverse of `_replicate`."""
    return grad if grad.shape[2] == kv_heads else grad.unflatten(2, (kv_heads, -1)).sum(3)


def _to_heads(parts: tuple[Tensor, ...], line: str, cp: int) -> tuple[Tensor, ...]:
    """Of each [B, t, h * cp, d]: heads by rank → [B, cp * t, h, d]."""
    by_rank = [x.unflatten(2, (cp, -1)).movedim(2, 0) for x in parts]  # [cp, B, t, h, d]
    got = torch.ops.train_cp.exchange(torch.cat(by_rank, 3).contiguous(), line)
    return tuple(x.movedim(0, 1).flatten(1, 2) for x in got.split([x.shape[3] for x in by_rank], 3))


def _to_sequence(parts: tuple[Tensor, ...], line: str, cp: int) -> tuple[Tensor, ...]:
    """Of each [B, cp * t, h, d]: positions by rank → [B, t, cp * h, d]."""
    by_rank = [x.unflatten(1, (cp, -1)).movedim(1, 0) for x in parts]  # [cp, B, t, h, d]
    got = torch.ops.train_cp.exchange(torch.cat(by_rank, 3).contiguous(), line)
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in got.split([x.shape[3] for x in by_rank], 3))


@dataclass(frozen=True)
class _Line:
    group: Any
    size: int
    meter: Meter


_lines: dict[str, _Line] = {}  # by the group's name: an operator takes no objects


# An operator of its own, so that selective recompute keeps its result as one (train.memory.recompute.ALWAYS) and only what is
# really sent is counted.
@torch.library.custom_op("train_cp::exchange", mutates_args=())
def exchange(x: Tensor, line: str) -> Tensor:
    """x[i] goes to rank i of the cp ranks, the result's [i] comes from there. Collective."""
    to, got = _lines[line], torch.empty_like(x)
    to.meter.sent(TRAFFIC, x.nbytes * (to.size - 1) // to.size)
    with to.meter.waiting(TRAFFIC):
        collectives.all_to_all(got, x, group=to.group)
    return got


@exchange.register_fake
def _(x: Tensor, line: str) -> Tensor:
    return torch.empty_like(x)
