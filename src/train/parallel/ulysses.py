"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): attention over the whole sequence on some of the heads.

One all-to-all takes q, k and v from [B, T/cp, H, d] to [B, T, H/cp, d], attention runs there on the kernel that runs without cp
too, and a second all-to-all takes its result back. Backward is the same two in reverse.
"""

from typing import Any

import torch
from torch import Tensor

from train.model.attention import attend
from train.parallel import collectives, line

TRAFFIC = "cp_all_to_all"  # its name in the traffic record


class Ulysses:
    """q [B, T/cp, H, d], k and v [B, T/cp, KV, d] of every rank → attention's [B, T/cp, H, d]. Collective.

    With fewer KV heads than ranks each travels to the cp/KV ranks whose query heads use it.
    """

    def __init__(self, name: str, cp: int) -> None:
        """`name`: of the ranks' line."""
        self.name, self.cp = name, cp

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, path: str) -> Tensor:
        q, k, v = _ToHeads.apply(q, k, v, self.name, self.cp)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), path)
        return _ToSequence.apply(out.transpose(1, 2), self.name, self.cp)


class _ToHeads(torch.autograd.Function):
    """[B, T/cp, heads, d] → [B, T, heads/cp, d] of q, k, v in one exchange; few KV heads → [B, T, 1, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, cp: int) -> tuple[Tensor, ...]:
        ctx.of, ctx.kv_heads = (name, cp), k.shape[2]
        return _to_heads((q, _replicate(k, cp), _replicate(v, cp)), name, cp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = _to_sequence(grads, *ctx.of)
        return dq, _add_copies(dk, ctx.kv_heads), _add_copies(dv, ctx.kv_heads), None, None


class _ToSequence(torch.autograd.Function):
    """[B, T, H/cp, d] → [B, T/cp, H, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, cp: int) -> Tensor:
        ctx.of = name, cp
        return _to_sequence((x,), name, cp)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grads, *ctx.of)[0], None, None


def _replicate(x: Tensor, cp: int) -> Tensor:
    """KV heads [B, T/cp, KV, d] → [B, T/cp, max(KV, cp), d]: rank i's query heads use head i * KV // cp."""
    return x if x.shape[2] >= cp else x.repeat_interleave(cp // x.shape[2], 2)


def _add_copies(grad: Tensor, kv_heads: int) -> Tensor:
    """The reverse of `_replicate`."""
    return grad if grad.shape[2] == kv_heads else grad.unflatten(2, (kv_heads, -1)).sum(3)


def _to_heads(parts: tuple[Tensor, ...], name: str, cp: int) -> tuple[Tensor, ...]:
    """Of each [B, t, cp * h, d]: heads by rank → [B, cp * t, h, d]."""
    by_rank = [x.unflatten(2, (cp, -1)).movedim(2, 0) for x in parts]  # [cp, B, t, h, d]
    got = torch.ops.train_cp.exchange(torch.cat(by_rank, 3).contiguous(), name)
    return tuple(x.movedim(0, 1).flatten(1, 2) for x in got.split([x.shape[3] for x in by_rank], 3))


def _to_sequence(parts: tuple[Tensor, ...], name: str, cp: int) -> tuple[Tensor, ...]:
    """Of each [B, cp * t, h, d]: positions by rank → [B, t, cp * h, d]."""
    by_rank = [x.unflatten(1, (cp, -1)).movedim(1, 0) for x in parts]  # [cp, B, t, h, d]
    got = torch.ops.train_cp.exchange(torch.cat(by_rank, 3).contiguous(), name)
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in got.split([x.shape[3] for x in by_rank], 3))


# An operator of its own: selective recompute keeps its result (train.memory.recompute.ALWAYS), and what is really sent, and no
# more, is counted.
@torch.library.custom_op("train_cp::exchange", mutates_args=())
def exchange(x: Tensor, name: str) -> Tensor:
    """x[i] goes to rank i of the line, the result's [i] comes from there. Collective."""
    to, got = line.get(name), torch.empty_like(x)
    to.meter.sent(TRAFFIC, x.nbytes * (to.size - 1) // to.size)
    with to.meter.waiting(TRAFFIC):
        collectives.all_to_all(got, x, group=to.group)
    return got


@exchange.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)
