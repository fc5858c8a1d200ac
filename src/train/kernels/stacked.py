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
from train.model.transformer import Aliased, Attention, Block, FeedForward
from train.parallel.bucket import together


def apply(block: Block) -> None:
    """Have a dense layer run stacked; its weights have memory, and no reduction or optimizer yet. `follow` has to come."""
    assert isinstance(block.ffn, FeedForward)
    block.attention.qkv, block.ffn.hidden = qkv, hidden
    for module in (block.attention, block.ffn):
        module.stack = lay_together(_linears(module))


def _linears(module: Attention | FeedForward) -> tuple[nn.Linear, ...]:
    return (module.wq, module.wk, module.wv) if isinstance(module, Attention) else (module.w_gate, module.w_up)


@torch.no_grad()
def lay_together(linears: Sequence[nn.Linear]) -> Tensor:
    """The weights [out, in] of all, moved into one [sum of outs, in], which is returned."""
    whole = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, whole.split([linear.weight.shape[0] for linear in linears]), strict=True):
        linear.weight.data = part
    return whole


def follow(model: nn.Module) -> None:
    """Once a reduction may have moved the weights: the stacks are where they are now. Raises RuntimeError where weights of a
    stack lie apart."""
    for name, module in model.named_modules():
        if isinstance(module, (Attention, FeedForward)) and module.stack is not None:
            weights = [linear.weight.data for linear in _linears(module)]
            if not all(map(together, weights, weights[1:])):
                raise RuntimeError(f"compile.kernels=stacked: weights of {name} were moved apart")
            module.stack = weights[0].as_strided(module.stack.shape, module.stack.stride())


def qkv(attention: Attention, x: Aliased, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`transformer.qkv` of a model without qk_norm."""
    assert isinstance(x, Tensor)
    weights = attention.wq.weight, attention.wk.weight, attention.wv.weight
    return _Qkv.apply(x, attention.stack, cos, sin, tuple(w.shape[0] // attention.head_dim for w in weights), *weights)


def hidden(ffn: FeedForward, x: Aliased) -> Tensor:
    """`transformer.hidden`."""
    assert isinstance(x, Tensor)
    return _Hidden.apply(x, ffn.stack, ffn.w_gate.weight, ffn.w_up.weight)


def _slopes(grad: Tensor, x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., in] and of whole [out, in], from that of their product [..., out]."""
    return grad @ whole, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Qkv(torch.autograd.Function):
    """x [B, T, dim], the stack, which needs no gradient, and the weights in it → q, k, turned, and v: [B, T, heads, d] each,
    views of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, whole, cos, sin)
        ctx.sizes = [w.shape[0] for w in weights]
        rows = F.linear(x, whole).unflatten(-1, (sum(heads), -1))
        turn_rows(rows, cos, sin, heads[0], heads[1])
        return rows.split(heads, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, whole, cos, sin = ctx.saved_tensors
        q, k, v = grads
        d_x, d_whole = _slopes(turned_back(q, k, v, cos, sin).flatten(2), x, whole)
        return d_x, None, None, None, None, *d_whole.split(ctx.sizes)


class _Hidden(torch.autograd.Function):
    """x [..., dim], the stack and the weights in it → silu(gate) * up [..., ffn]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, *weights: Tensor) -> Tensor:
        rows = F.linear(x, whole)
        ctx.save_for_backward(x, whole, rows)
        ctx.sizes = [w.shape[0] for w in weights]
        return joint_product(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, whole, rows = ctx.saved_tensors
        d_x, d_whole = _slopes(joint_backward(grads[0], rows), x, whole)
        return d_x, None, *d_whole.split(ctx.sizes)


@torch.library.custom_op("mfu_sweep::turn_rows", mutates_args=("rows",))
def turn_rows(rows: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    """rows [B, T, H + 2 KV, d], contiguous: its q and k turned where they lie."""
    q, k, _ = rows.split((heads, kv_heads, kv_heads), 2)
    if backend.triton_runs(rows.device):
        from train.kernels.jit.rope import rope_

        rope_(q, k, cos, sin)
        return
    for part, turned in zip((q, k), plain.turn(q, k, cos, sin), strict=True):
        part.copy_(turned)


@turn_rows.register_fake
def _(rows: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    return None


@torch.library.custom_op("mfu_sweep::turned_back", mutates_args=())
def turned_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of what attention got, [B, T, heads, d] → of the rows before they were turned, [B, T, H + 2 KV, d]."""
    if backend.triton_runs(q.device):
        from train.kernels.jit.rope import joint_back

        return joint_back(q, k, v, cos, sin)
    return torch.cat((*plain.turn(q, k, cos, -sin), v), 2)


@turned_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
