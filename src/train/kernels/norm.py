"""RMSNorm before a branch, whose backward takes the gradients of all that read it, and of the residual stream, as they are: one
pass over each of them, where autograd would add them up before."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.kernels import backend
from train.model.transformer import Aliased


def normed(x: Tensor, norm: nn.RMSNorm, readers: int) -> tuple[Tensor, Aliased]:
    """(x, norm(x)): x [..., dim]; for 2 or 3 readers of norm(x) an alias for each.

    All are to be used, for backward adds up the gradients of all, and inside one graph: of aliases that leave a compiled
    graph torch 2.11 loses the gradients.
    """
    x, *aliases = _Norm.apply(x, norm.weight, norm.eps, readers)
    return x, aliases[0] if readers == 1 else tuple(aliases)


@torch.library.custom_op("mfu_sweep::rms_norm_backward", mutates_args=())
def backward(residual: Tensor, grads: Sequence[Tensor], x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual: the gradient that comes by x itself, grads: 1 to 3 of the norm's result, summed in their order; all
    [..., dim] → (x's gradient, weight's).

    Computed in fp32 (fp64 for fp64), rounded once. The norm's root is taken again: a row is there anyway.
    """
    if backend.triton_runs(x.device):
        from train.kernels.jit import norm

        return norm.backward(residual, grads, x, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    r, g, a, w = (t.to(wide) for t in (residual, grads[0], x, weight))
    for more in grads[1:]:
        g = g + more
    inverse = (a.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = a * inverse
    gw = g * w
    d_x = r + inverse * (gw - unit * (gw * unit).mean(-1, keepdim=True))
    d_weight = (g * unit).flatten(0, -2).sum(0)
    return d_x.to(x.dtype).contiguous(), d_weight.to(weight.dtype)


@backward.register_fake
def _(residual: Tensor, grads: Sequence[Tensor], x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d_x, d_weight = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))
    return d_x, d_weight


class _Norm(torch.autograd.Function):
    """Forward is torch's own, which Inductor fuses with what is around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, readers: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = F.rms_norm(x, weight.shape, weight, eps)
        if readers == 1:
            return x.view_as(x), out
        return x.view_as(x), *(out.view_as(out) for _ in range(readers))  # all of a kind: a graph then saves one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Of a result that nobody used torch brings zeros."""
        d_x, d_weight = backward(grads[0], grads[1:], *ctx.saved_tensors, ctx.eps)
        return d_x, d_weight, None, None
