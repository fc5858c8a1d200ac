"""SwiGLU's product as one operator with one for its backward, so that compiled layers and recompute's policies see them whole;
alone, or with the matmul behind it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.kernels import backend


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: gate, up [..., ffn] → [..., ffn]."""
    return product(gate, up)


def down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """F.linear(silu(gate) * up, weight): gate, up [..., ffn], weight [dim, ffn] → [..., dim].

    Saves gate and up alone: backward makes their product again in the pass that it needs for their gradients.
    """
    return _Down.apply(gate, up, weight)


@torch.library.custom_op("mfu_sweep::swiglu", mutates_args=())
def product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 (fp64 for fp64), rounded once."""
    if backend.triton_runs(gate.device):
        from train.kernels.jit import swiglu

        return swiglu.product(gate, up)
    wide = _wide(gate)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


@product.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("mfu_sweep::swiglu_backward", mutates_args=())
def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """From the product's gradient: (gate's gradient, up's)."""
    d_gate, d_up = _gradients(grad, gate, up, again=False)
    return d_gate, d_up


@torch.library.custom_op("mfu_sweep::swiglu_backward_again", mutates_args=())
def backward_again(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the product's gradient: (gate's gradient, up's, the product)."""
    d_gate, d_up, out = _gradients(grad, gate, up, again=True)
    return d_gate, d_up, out


@backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    return d_gate, d_up


@backward_again.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_gate, d_up, out = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(3))
    return d_gate, d_up, out


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, ...]:
    if backend.triton_runs(gate.device):
        from train.kernels.jit import swiglu

        return swiglu.backward(grad, gate, up, again)
    d, g, u = (t.to(_wide(gate)) for t in (grad, gate, up))
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    results = d * u * (sigmoid + silu * (1 - sigmoid)), d * silu, *((silu * u,) if again else ())
    return tuple(t.to(gate.dtype).contiguous() for t in results)


def _inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return backward(grad, *ctx.saved_tensors)


product.register_autograd(_back, setup_context=_inputs)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(product(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        d_gate, d_up, out = backward_again(grads[0] @ weight, gate, up)
        return d_gate, d_up, grads[0].flatten(0, -2).t() @ out.flatten(0, -2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
