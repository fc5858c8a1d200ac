"""RMSNorm before a branch, whose backward takes the residual stream's gradient with it: one pass over four tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.kernels import backend


def normed(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """(x, norm(x)): x [..., dim]. Both are to be used, for backward adds up the gradients of both."""
    return _Norm.apply(x, norm.weight, norm.eps)


@torch.library.custom_op("mfu_sweep::rms_norm_backward", mutates_args=())
def backward(residual: Tensor, grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual: the gradient that comes by x itself, grad: of the norm's result, all [..., dim] → (x's gradient, weight's).

    Computed in fp32 (fp64 for fp64), rounded once. The norm's root is taken again: a row is there anyway.
    """
    if backend.triton_runs(x.device):
        from train.kernels.jit import norm

        return norm.backward(residual, grad, x, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    r, g, a, w = (t.to(wide) for t in (residual, grad, x, weight))
    inverse = (a.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = a * inverse
    gw = g * w
    d_x = r + inverse * (gw - unit * (gw * unit).mean(-1, keepdim=True))
    d_weight = (g * unit).flatten(0, -2).sum(0)
    return d_x.to(x.dtype).contiguous(), d_weight.to(weight.dtype)


@backward.register_fake
def _(residual: Tensor, grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d_x, d_weight = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))
    return d_x, d_weight


class _Norm(torch.autograd.Function):
    """Forward is torch's own, which Inductor fuses with what is around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = backward(*grads, *ctx.saved_tensors, ctx.eps)
        return d_x, d_weight, None
