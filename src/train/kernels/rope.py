"""`rope.turn` as one operator, whose backward is itself with the angles turned back."""

from typing import Any

import torch
from torch import Tensor

from train.kernels import backend
from train.model import rope as plain


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, T, H, d] and k [B, T, KV, d] by the tables [T, d/2]."""
    return rope(q, k, cos, sin, False)


@torch.library.custom_op("mfu_sweep::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Both turned, back where `inverse`; contiguous."""
    if backend.triton_runs(q.device):
        from train.kernels.jit.rope import rope as launch

        return launch(q, k, cos, sin, inverse)
    turned = plain.turn(q, k, cos, -sin if inverse else sin)
    return turned[0].contiguous(), turned[1].contiguous()


@rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    out_q, out_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    return out_q, out_k


def _tables(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.inverse = inputs[4]


def _back(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    return *rope(grad_q, grad_k, *ctx.saved_tensors, not ctx.inverse), None, None, None


rope.register_autograd(_back, setup_context=_tables)
