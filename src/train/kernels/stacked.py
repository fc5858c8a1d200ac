"""wq, wk and wv of a layer in one matmul, and w_gate and w_up: x is read once, and of its gradients only the sum is stored.

The matrices stay parameters of their own. They lie one behind the other in memory, so that a view shows them as one matrix,
and their gradients are views of one tensor too. What follows the matmul works on its result as it lies, and backward writes
the gradients of its parts side by side: nothing is concatenated.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.kernels import backend, swiglu
from train.model import rope as plain
from train.model.transformer import Aliased, Attention, Block, FeedForward, Transformer


def apply(block: Block) -> None:
    """Have a dense layer run stacked; its weights have memory, and no reduction or optimizer yet."""
    attention, ffn = block.attention, block.ffn
    assert isinstance(ffn, FeedForward)
    attention.stack = lay_together(attention.wq, attention.wk, attention.wv)
    attention.qkv = qkv
    ffn.stack = lay_together(ffn.w_gate, ffn.w_up)
    ffn.hidden = hidden


@torch.no_grad()
def lay_together(*linears: nn.Linear) -> Tensor:
    """The weights [out, in] of all, moved into one [sum of outs, in], which is returned."""
    whole = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, whole.split([linear.weight.shape[0] for linear in linears]), strict=True):
        linear.weight.data = part
    return whole


def check(model: Transformer) -> None:
    """Once reduction and optimizer are there. Raises RuntimeError if they have moved weights out of a stack."""
    for name, module in model.layers.named_modules():
        if isinstance(module, (Attention, FeedForward)) and module.stack is not None:
            linears = (
                (module.wq, module.wk, module.wv) if isinstance(module, Attention) else (module.w_gate, module.w_up)
            )
            at = module.stack.data_ptr()
            for linear in linears:
                if linear.weight.data_ptr() != at:
                    raise RuntimeError(f"compile.kernels=stacked: a weight of layers.{name} was moved out of its stack")
                at += linear.weight.nbytes


def qkv(attention: Attention, x: Aliased, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`transformer.qkv` of a model without qk_norm."""
    assert isinstance(x, Tensor)
    parts = attention.wq, attention.wk, attention.wv
    rows = _Linear.apply(x, attention.stack, *(linear.weight for linear in parts)).unflatten(
        -1, (-1, attention.head_dim)
    )
    return _Turn.apply(rows, cos, sin, tuple(linear.weight.shape[0] // attention.head_dim for linear in parts))


def hidden(ffn: FeedForward, x: Aliased) -> Tensor:
    """`transformer.hidden`."""
    assert isinstance(x, Tensor)
    return _Gated.apply(_Linear.apply(x, ffn.stack, ffn.w_gate.weight, ffn.w_up.weight))


class _Linear(torch.autograd.Function):
    """x [..., in], `whole` [out, in], which needs no gradient, and the weights that lie in it → [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, whole)
        ctx.sizes = [w.shape[0] for w in weights]
        return F.linear(x, whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, whole = ctx.saved_tensors
        slope = grads[0].flatten(0, -2).t() @ x.flatten(0, -2)
        return grads[0] @ whole, None, *slope.split(ctx.sizes)


class _Turn(torch.autograd.Function):
    """rows [B, T, H + 2 KV, d] → q, k, turned, and v, views of one tensor of that shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return joint_rope(*rows.split(heads, 2), cos, sin, False).split(heads, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = grads
        return joint_rope(q, k, v, *ctx.saved_tensors, True), None, None, None


class _Gated(torch.autograd.Function):
    """rows [..., 2 ffn], gate before up → silu(gate) * up [..., ffn]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return joint_product(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return joint_backward(grads[0], *ctx.saved_tensors)


@torch.library.custom_op("mfu_sweep::joint_rope", mutates_args=())
def joint_rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """q [B, T, H, d] and k turned, back where `inverse`, and v, k's shape, as it is, side by side: [B, T, H + 2 KV, d]."""
    if backend.triton_runs(q.device):
        from train.kernels.jit.rope import joint

        return joint(q, k, v, cos, sin, inverse)
    return torch.cat((*plain.turn(q, k, cos, -sin if inverse else sin), v), 2)


@joint_rope.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[2] + k.shape[2] + v.shape[2], q.shape[3])


@torch.library.custom_op("mfu_sweep::joint_swiglu", mutates_args=())
def joint_product(rows: Tensor) -> Tensor:
    """rows [..., 2 ffn] → silu(gate) * up [..., ffn]."""
    if backend.triton_runs(rows.device):
        from train.kernels.jit.swiglu import joint_product as launch

        return launch(rows)
    return swiglu.product(*rows.chunk(2, -1))


@joint_product.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], rows.shape[-1] // 2)


@torch.library.custom_op("mfu_sweep::joint_swiglu_backward", mutates_args=())
def joint_backward(grad: Tensor, rows: Tensor) -> Tensor:
    """From the product's gradient [..., ffn] that of rows [..., 2 ffn]."""
    if backend.triton_runs(rows.device):
        from train.kernels.jit.swiglu import joint_backward as launch

        return launch(grad, rows)
    return torch.cat(swiglu.backward(grad, *rows.chunk(2, -1)), -1)


@joint_backward.register_fake
def _(grad: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)
