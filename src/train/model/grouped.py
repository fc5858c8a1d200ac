"""One matrix for each group of consecutive rows: torch's grouped matmul where it can, one matmul a group elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_kernel: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # public since torch 2.10
ALIGNMENT = 16  # bytes: what torch._grouped_mm asks of a row's stride


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x [R, in], w [groups, out, in], ends [groups] int32 → [R, out]: rows ends[g-1] to ends[g] times w[g] transposed.

    `ends` ascends to R; empty groups are fine. No host synchronisation where `kernel_takes` the inputs.
    """
    if kernel_takes(x, w):
        out: Tensor = _kernel(x, w.transpose(1, 2), offs=ends)
        return out
    looped: Tensor = loop_mm(x, w, ends)
    return looped


def kernel_takes(x: Tensor, w: Tensor) -> bool:
    """Whether torch's grouped matmul accepts these dtypes and widths: bf16; on a CPU fp32 too; never fp64."""
    if not x.is_cuda and (torch.compiler.is_compiling() or isinstance(x, FakeTensor)):
        return False  # torch traces the GPU's rules alone
    dtypes = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    aligned = all(n * x.itemsize % ALIGNMENT == 0 for n in w.shape[1:])
    return _kernel is not None and x.dtype in dtypes and aligned and len(x) > 0


# An operator of its own, so that a compiled graph holds the loop as one node: its length is read on the host.
@torch.library.custom_op("mfu_sweep::loop_mm", mutates_args=())
def loop_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """What `grouped_mm` returns, group by group. Reads `ends` on the host."""
    out = x.new_empty(x.shape[0], w.shape[1])
    first = 0
    for matrix, last in zip(w, ends.tolist(), strict=True):
        torch.mm(x[first:last], matrix.t(), out=out[first:last])
        first = last
    return out


@torch.library.custom_op("mfu_sweep::loop_mm_weight", mutates_args=())
def loop_mm_weight(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [R, out], x [R, in] → [groups, out, in]: the gradient of `loop_mm`'s w; zeros for an empty group."""
    out = x.new_empty(len(ends), grad.shape[1], x.shape[1])
    first = 0
    for matrix, last in zip(out, ends.tolist(), strict=True):
        torch.mm(grad[first:last].t(), x[first:last], out=matrix)
        first = last
    return out


@loop_mm.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@loop_mm_weight.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    want_x, want_w = ctx.needs_input_grad[:2]
    return (
        loop_mm(grad, w.transpose(1, 2), ends) if want_x else None,
        loop_mm_weight(grad, x, ends) if want_w else None,
        None,
    )


torch.library.register_autograd("mfu_sweep::loop_mm", _backward, setup_context=_save)
