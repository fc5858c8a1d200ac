"""A mixture of experts in place of a layer's feed-forward: every token goes to `experts_per_token` of `experts` networks.

Rows are sorted by expert and multiplied in groups (model/grouped.py): no token is dropped, no row is padding, and the host
waits for nothing. A token's routing weight multiplies the hidden row before w_down, which is linear: the same result as
after it, on a narrower row, and w_down's result is then needed by no backward.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import config
from train.model.grouped import grouped_mm


class Experts(nn.Module):
    """`count` SwiGLU networks side by side."""

    def __init__(self, cfg: config.Model, count: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(count, cfg.expert_ffn, cfg.dim))
        self.w_up = nn.Parameter(torch.empty(count, cfg.expert_ffn, cfg.dim))
        self.w_down = nn.Parameter(torch.empty(count, cfg.dim, cfg.expert_ffn))

    def forward(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """rows [R, dim] sorted by expert, weights [R], ends [count] int32 (last row of each expert + 1) → [R, dim]."""
        hidden = F.silu(grouped_mm(rows, self.w_gate, ends)) * grouped_mm(rows, self.w_up, ends)
        return grouped_mm(hidden * weights[:, None].to(hidden.dtype), self.w_down, ends)


class Exchange(Protocol):
    """Runs experts that other ranks hold: see train.parallel.expert."""

    def __call__(self, experts: Experts, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """rows [R, dim] sorted by expert, weights [R], counts [experts] of these rows → [R, dim]."""


class MoE(nn.Module):
    """x [B, T, dim] → ([B, T, dim], tokens that chose each expert [experts] int64)."""

    tokens: Tensor
    raises: Tensor

    def __init__(self, cfg: config.Model) -> None:
        super().__init__()
        self.cfg = cfg
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.experts = Experts(cfg, cfg.experts)
        # integers, so that no cast of the model rounds them
        self.register_buffer("tokens", torch.zeros(cfg.experts, dtype=torch.int64))  # by expert, since the last step
        self.register_buffer(
            "raises", torch.zeros(cfg.experts, dtype=torch.int64)
        )  # aux_loss_free: bias in coefficients
        self.exchange: Exchange | None = None  # None: this rank has all experts
        self.over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts  # sum over the ranks with other tokens
        # both for recompute of a layer in pieces: see train.memory.recompute.Choices
        self.keep: Callable[[Tensor], Tensor] = lambda chosen: chosen
        self.collect: Callable[[Tensor, Tensor, Tensor, int], Tensor] = collect
        self.aux_share = 1.0  # of a micro-batch on this rank in a step's auxiliary loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat, k = x.flatten(0, 1), self.cfg.experts_per_token  # [N, dim]
        scores = self.scores(flat)
        chosen = self.keep(self.choose(scores.detach()))
        ids, order = chosen.flatten().to(torch.int32).sort(stable=True)  # [N k]: by expert, then by token
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(
            ids, torch.arange(self.cfg.experts, dtype=torch.int32, device=ids.device), right=True, out_int32=True
        )
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        weights = self.weights(scores, chosen, counts)
        rows = spread(flat, order, inverse, k)
        by_row = spread(weights.flatten()[:, None], order, inverse, 1)[:, 0]
        if self.exchange is None:
            rows = self.experts(rows, by_row, ends)
        else:
            rows = self.exchange(self.experts, rows, by_row, counts)
        return self.collect(rows, order, inverse, k).view_as(x), counts

    def scores(self, flat: Tensor) -> Tensor:
        """How well each expert suits each token: [N, dim] → [N, experts], fp32 (fp64 for fp64) from the logits on."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        logits = flat.to(wide) @ self.router.weight.to(wide).t()
        return logits.softmax(-1) if self.cfg.router_score == "softmax" else logits.sigmoid()

    def biased(self, scores: Tensor) -> Tensor:
        """What the choice goes by; under aux_loss_free the bias moves it, and never a weight (arXiv 2408.15664)."""
        if self.cfg.balance != "aux_loss_free":
            return scores
        return scores + self.raises * self.cfg.balance_coef

    def choose(self, scores: Tensor) -> Tensor:
        """[N, experts] → the chosen experts of each token, [N, experts_per_token] int64."""
        if self.cfg.force_balance:
            slots = torch.arange(len(scores) * self.cfg.experts_per_token, device=scores.device)
            return (slots % self.cfg.experts).view(len(scores), -1)
        return self.biased(scores).topk(self.cfg.experts_per_token, sorted=False).indices

    def weights(self, scores: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """By which the chosen experts' results are multiplied: [N, experts_per_token]."""
        weights = scores.gather(1, chosen)
        if self.cfg.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if self.cfg.balance == "aux_loss":
            return _AlsoLose.apply(weights, self.aux_loss(scores, counts))
        return weights

    def aux_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """0-dim: coefficient x experts x sum over experts of (share of choices) x (mean score); the coefficient if balanced.

        Fedus et al. 2021 (arXiv 2101.03961, equation 4), with the choices of the micro-batch on all ranks (arXiv 2501.11873).
        """
        everywhere = self.over_ranks(counts)
        share = everywhere.to(scores.dtype) / everywhere.sum()
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        return (share * mean).sum() * (self.cfg.experts * self.cfg.balance_coef * self.aux_share)

    @torch.no_grad()
    def count(self, counts: Tensor) -> None:
        """Keep what `forward` counted. Outside of what backward may run again."""
        self.tokens += counts


class _AlsoLose(torch.autograd.Function):
    """x, and `aux` added to the loss without being handed up to it: its gradient is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, aux: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(aux))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]


def spread(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """x [N, d] → [N k, d]: row i is x[order[i] // k]. `inverse`: where each of N k slots went."""
    return _Spread.apply(x, order, inverse, k)


def collect(rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """rows [N k, d] → [N, d]: the sum of the k rows that `spread` made of each. Its adjoint: each is the other's backward.

    Both only read rows: no atomic additions, so the same bits every time.
    """
    return _Collect.apply(rows, order, inverse, k)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return _spread(x, order, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        _, inverse = ctx.saved_tensors
        return _collect(grads[0], inverse, ctx.k), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        # not by save_for_backward: recompute would then run w_down again, to come to the point where this is saved
        ctx.order, ctx.k = order, k
        return _collect(rows, inverse, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _spread(grads[0], ctx.order, ctx.k), None, None, None


def _spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x[order // k] if k > 1 else x[order]


def _collect(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    found = rows[inverse]
    return found.unflatten(0, (-1, k)).sum(1) if k > 1 else found
