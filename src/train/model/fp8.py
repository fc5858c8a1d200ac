"""precision=fp8: the three matmuls of a layer's linear maps in 8-bit floats, everything around them in bf16.

y = x w^T, dx = dy w and dw = dy^T x each run on operands rounded to fp8 just before, with a scale found from their largest
magnitude at that moment (dynamic scaling). Parameters, their gradients, optimizer and collectives never see fp8: a
reduction handles plain bf16 weights with fp32 masters, as under precision=bf16. `rules` without torch: model/fp8_rules.py.

Two scalings, with the choices of dtype and accumulation that torchao's recipes of the same names make:
  tensorwise  one scale a tensor; e4m3 for activations and weights, e5m2 (wider range, 2 bits of mantissa) for dy; only the
              forward matmul accumulates fast, in less than fp32
  rowwise     a scale for each row of the left and each column of the right operand, so along what is summed over; e4m3
              throughout; all three accumulate fast, for which torch's row-wise kernel is made
Formats: Micikevicius et al. 2022, arXiv 2209.05433.
"""

from typing import Any

import torch
from torch import Tensor, nn

from train.config import ConfigError
from train.model.transformer import Attention, FeedForward, Transformer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 2.0**-100  # amax below it counts as this much: the scale of an all-zero tensor, and its inverse, stay finite
EXPONENT = 0x7F800000  # of an fp32


def apply(model: Transformer, scaling: str) -> None:
    """Make the layers' linear maps fp8 ones; parameters and their names stay. After tensor.apply, before compile_layers.

    Not embedding, norms and router, which are no matmuls or tiny ones, and not the LM head: its gradient is where rounding
    hurts most, and its loss works on logits chunk by chunk (model/loss.py).
    """
    for module in model.layers.modules():
        if isinstance(module, (Attention, FeedForward)):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear(child, scaling))


class Linear(nn.Module):
    """x [..., in] → [..., out], with the `weight` [out, in] of an nn.Linear without bias."""

    def __init__(self, linear: nn.Linear, scaling: str) -> None:
        super().__init__()
        assert linear.bias is None
        self.weight: nn.Parameter = linear.weight
        self.scaling: str = scaling

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.scaling == "rowwise")
        return out.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    """x [tokens, in], w [out, in] → [tokens, out]. Keeps x and w in bf16: compiled, torch's partitioner decides what of them
    to keep in fp8 instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rowwise = rowwise
        along = 1 if rowwise else None
        return scaled_mm(quantise(x, E4M3, along), transposed(quantise(w, E4M3, along)), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, w), dy, rowwise = ctx.saved_tensors, grads[0], ctx.rowwise
        along, across = (1, 0) if rowwise else (None, None)
        wide, dx, dw = E4M3 if rowwise else E5M2, None, None
        dy_rows = quantise(dy, wide, along)
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(dy_rows, quantise(w, E4M3, across), x.dtype, fast=rowwise)
        if ctx.needs_input_grad[1]:
            dy_columns = quantise(dy, wide, across) if rowwise else dy_rows
            dw = scaled_mm(transposed(dy_columns), quantise(x, E4M3, across), w.dtype, fast=rowwise)
        return dx, dw, None


Scaled = tuple[Tensor, Tensor]  # fp8 values, and the fp32 factors that they are to be multiplied by, which broadcast


def quantise(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Scaled:
    """x [rows, columns] in `dtype`, one scale for all of it (0-dim) or, with `dim`, each of its rows (1) or columns (0).

    The largest magnitude becomes the format's largest. Scales of rows and columns are powers of two, rounded down: so x
    rounds to the same values along rows in forward and along columns in backward. Inf or NaN in x gives NaN for all that
    shares its scale, whatever casts to fp8 do (torch 2.13 saturates, 2.11 makes NaN): amax = inf makes the scale 0, and
    0 x inf is NaN. Nothing has to be clamped: rounding of the scale and of x to bf16 in between move the largest magnitude by
    less than half a step of the format.
    """
    amax = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()
    scale = torch.finfo(dtype).max / amax.clamp(min=TINY)
    if dim is not None:
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return (x.float() * scale).to(dtype), scale.reciprocal()


def transposed(a: Scaled) -> Scaled:
    """[rows, columns] → [columns, rows], as a view."""
    return a[0].t(), a[1].t()


def scaled_mm(a: Scaled, b: Scaled, out: torch.dtype, fast: bool) -> Tensor:
    """a [m, k] times b [k, n] in dtype `out`. `fast`: GPUs may accumulate in less than fp32.

    cuBLASLt wants a's rows and b's columns contiguous (Hopper has no other fp8 layout).
    """
    left, right = a[0].contiguous(), b[0].t().contiguous().t()
    if a[1].dim() and not left.is_cuda:  # on a CPU torch 2.11's _scaled_mm takes one scale a tensor alone
        return dequantised_mm(a, b, out)
    return torch._scaled_mm(left, right, scale_a=a[1], scale_b=b[1], out_dtype=out, use_fast_accum=fast)


def dequantised_mm(a: Scaled, b: Scaled, out: torch.dtype, sum_in: torch.dtype = torch.float32) -> Tensor:
    """What `scaled_mm` means, in plain operations: the product of the fp8 values in `sum_in`, then scaled."""
    return ((a[0].to(sum_in) @ b[0].to(sum_in)) * (a[1].to(sum_in) * b[1].to(sum_in))).to(out)


def operator(device: torch.device, scaling: str) -> str:
    """The operator that `scaled_mm` runs."""
    return "aten::mm" if device.type == "cpu" and scaling == "rowwise" else "aten::_scaled_mm"


def check(device: torch.device, scaling: str) -> None:
    """Raises ConfigError where this device or torch can't multiply fp8 with that scaling: by trying."""
    x = torch.ones(16, 16, device=device)
    try:
        a, b = (quantise(x, E4M3, None if scaling == "tensorwise" else dim) for dim in (1, 0))
        scaled_mm(a, b, torch.bfloat16, fast=True)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
        why = f"torch {torch.__version__} has no such fp8 matmul for {name}: {first}"
        raise ConfigError("precision.scaling", scaling, why) from error
