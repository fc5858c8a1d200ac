"""Linear maps of one input, whose gradients in it are summed where they are computed: each matmul after the first adds to the
result of those before, in its epilogue, instead of writing a tensor of its own for a later kernel to add."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Each linear map of x [..., dim]; they have no bias."""
    return _Project.apply(x, *(each.weight for each in linears))


@torch.library.custom_op("mfu_sweep::input_grad", mutates_args=())
def input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of grads[i] @ weights[i], [n, out_i] and [out_i, dim] → [n, dim]; rounded after each, in their order.

    One operator, since as matmuls of a graph Inductor would copy what is there before it adds to it.
    """
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


@input_grad.register_fake
def _(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty(grads[0].shape[0], weights[0].shape[1])


@register_flop_formula(torch.ops.mfu_sweep.input_grad)
def _flops(grads: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """For torch's FlopCounterMode, which gives shapes in the tensors' place."""
    return sum(2 * n * out * weight[1] for (n, out), weight in zip(grads, weights, strict=True))


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        d_x = input_grad(flat, weights).view_as(x)
        rows = x.flatten(0, -2)
        return d_x, *(grad.t() @ rows for grad in flat)
