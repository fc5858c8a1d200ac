"""The LM head whose logits become their own gradient: neither fp32 logits nor a second tensor of their size exists."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train import config
from train.kernels import backend
from train.model import loss


def head(cfg: config.Memory) -> loss.Loss:
    """In place of `loss.build`'s: whole, or over chunks of memory.lm_head_chunk tokens."""
    return fused_loss if cfg.lm_head_chunk is None else functools.partial(fused_chunks, chunk=cfg.lm_head_chunk)


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`lm_loss`: hidden [B, T, dim], weight [vocab, dim], targets [B, T] → mean cross-entropy, 0-dim."""
    return _Head.apply(hidden, weight, targets)


def fused_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """`chunked_loss`."""
    return loss.chunked_loss(hidden, weight, targets, chunk, loss_and_slope_)


def loss_and_slope_(logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """logits [n, vocab], targets [n] → (sum of cross-entropies x weight, `logits` overwritten by its gradient in them)."""
    if backend.triton_runs(logits.device):
        from train.kernels.jit.loss import cross_entropy

        return cross_entropy(logits, targets, weight).sum() * weight, logits
    value, slope = loss._loss_and_slope(logits, targets, weight)
    return value, logits.copy_(slope)


class _Head(torch.autograd.Function):
    """Saves the slope in the logits' memory. What follows the loss scales gradients of the slope's matmuls, not the slope:
    those are sixteen times smaller."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        y = targets.flatten()
        value, slope = loss_and_slope_(F.linear(hidden.flatten(0, 1), weight), y, 1 / len(y))
        ctx.save_for_backward(hidden, weight, slope)
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slope = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        grad_x = (slope @ weight).view_as(hidden) if want_x else None
        grad_weight = slope.t() @ hidden.flatten(0, 1) if want_weight else None
        made = [g for g in (grad_x, grad_weight) if g is not None]
        torch._foreach_mul_(made, outputs[0].to(slope.dtype))  # in one launch, of wide loads
        return grad_x, grad_weight, None
