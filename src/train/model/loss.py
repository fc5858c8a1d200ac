"""The LM head and its cross-entropy: in one piece, so that Inductor can fuse it, or over chunks of tokens, so that the
logits [tokens, vocab] never exist at once. With a share of the vocabulary on every rank (tensor parallel) none has them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train import config

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [B, T, dim], weight [vocab, dim], targets [B, T] → 0-dim


def lm_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens: hidden [B, T, dim], weight [vocab, dim], targets [B, T] → 0-dim.

    The softmax is in fp32 (fp64 for fp64 weights). The one upcast of the logits is fused away when compiled; in eager
    mode it is the largest activation of a step: 4 bytes x tokens x vocab.
    """
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits.to(_wide(logits.dtype)), targets.flatten())


@dataclass(frozen=True)
class VocabShard:
    """The rows of the head's weight that a rank has: `first` and on, of all that `group` (by name) has together."""

    first: int
    group: str


def build(cfg: config.Memory, shard: VocabShard | None = None) -> Loss:
    """The head that memory.lm_head_chunk and memory.lm_head_kernel ask for, over the whole vocabulary or a `shard` of it.

    Raises ConfigError for a kernel that the installed torch doesn't have.
    """
    if cfg.lm_head_kernel == "torch" and not hasattr(F, "linear_cross_entropy"):
        raise config.ConfigError(
            "memory.lm_head_kernel", "torch", f"torch {torch.__version__} has no linear_cross_entropy; set it to own"
        )
    if cfg.lm_head_chunk is None:
        return lm_loss if shard is None else functools.partial(parallel_loss, shard=shard)
    if cfg.lm_head_kernel == "torch":
        return functools.partial(torch_loss, chunk=cfg.lm_head_chunk)
    pointwise = _loss_and_slope if shard is None else functools.partial(_parallel_loss_and_slope, shard=shard)
    return functools.partial(chunked_loss, chunk=cfg.lm_head_chunk, pointwise=pointwise)


def compiled(loss: Loss) -> Loss:
    """The same head with Inductor's kernels. Of a chunked head the pointwise part alone: its matmuls are the library's
    and its loop would be unrolled."""
    if isinstance(loss, functools.partial) and loss.func is chunked_loss:
        pointwise = loss.keywords["pointwise"]
        return functools.partial(loss, pointwise=torch.compile(pointwise, fullgraph=True, dynamic=False))
    if loss is lm_loss or isinstance(loss, functools.partial) and loss.func is parallel_loss:
        return torch.compile(loss, fullgraph=True)
    return loss  # torch's own chunked head is one operator


def torch_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """`lm_loss` by torch's own chunked head (torch 2.13 has it)."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, acc_policy="accurate", chunking_method=None)
    return F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), options=options)


def parallel_loss(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """`lm_loss` where `weight` [vocab/tp, dim] is this rank's share: the same loss on every rank. Collective.

    The gradient of `hidden` is this rank's part of a sum over ranks.
    """
    logits = F.linear(hidden, weight).flatten(0, 1)
    return _Parallel.apply(logits, targets.flatten(), shard)


class _Parallel(torch.autograd.Function):
    """Saves the loss's slope in the logits' dtype, in place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
        loss, slope = _parallel_loss_and_slope(logits, targets, 1 / len(targets), shard)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0].to(slope.dtype), None, None


def _parallel_loss_and_slope(
    logits: Tensor, targets: Tensor, weight: float, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """`_loss_and_slope` of logits [n, vocab/tp]: the maximum, then the sum and the target's logit, travel over ranks."""
    wide = logits.to(_wide(logits.dtype))
    wide = wide - _all_reduce(wide.max(-1).values, "max", shard.group)[:, None]
    at = (targets - shard.first)[:, None]
    mine = (at >= 0) & (at < logits.shape[1])
    picked = wide.gather(1, at.where(mine, 0)) * mine
    total, picked = _all_reduce(torch.stack((wide.exp().sum(-1), picked[:, 0])), "sum", shard.group)
    columns = torch.arange(logits.shape[1], device=logits.device)
    slope = (wide.exp() / total[:, None] - (columns == at).to(wide.dtype)) * weight
    return (total.log() - picked).sum() * weight, slope.to(logits.dtype)


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, op, group))


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, pointwise: Any = None) -> Tensor:
    """`lm_loss` with the logits of `chunk` tokens at a time, in forward and in backward.

    Equal to it but for the order in which the weight's gradient is added up: in fp32 over chunks (fp64 for fp64).
    """
    return _Chunked.apply(hidden, weight, targets, chunk, pointwise or _loss_and_slope)


class _Chunked(torch.autograd.Function):
    """Gradients are computed beside the loss, while a chunk's logits are there: no logits are computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, pointwise: Any) -> Tensor:
        x, y = hidden.flatten(0, 1), targets.flatten()  # [N, dim], [N]
        wide = _wide(weight.dtype)
        want_x, want_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if want_x else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            loss, slope = pointwise(x[rows] @ weight.t(), y[rows], 1 / len(x))
            total += loss
            if grad_x is not None:
                torch.mm(slope, weight, out=grad_x[rows])
            if grad_weight is not None:
                _add_mm(grad_weight, slope.t(), x[rows])
            del slope
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.shape, ctx.dtype = hidden.shape, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = outputs[0]
        if grad_x is not None:
            grad_x = (grad_x * scale.to(grad_x.dtype)).view(ctx.shape)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.dtype)
        return grad_x, grad_weight, None, None, None


def _loss_and_slope(logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """logits [n, vocab], targets [n] → (sum of cross-entropies x weight, its gradient in the logits, in their dtype)."""
    log_p = torch.log_softmax(logits.to(_wide(logits.dtype)), -1)
    at = targets[:, None]
    loss = -log_p.gather(1, at).sum() * weight
    columns = torch.arange(logits.shape[1], device=logits.device)
    slope = torch.where(columns == at, log_p.exp() - 1, log_p.exp()) * weight
    return loss, slope.to(logits.dtype)


def _add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added in total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:  # low-precision inputs, fp32 sum and result in one kernel
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
