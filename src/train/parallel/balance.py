"""Tokens per expert of a step over all ranks: the bias of balance=aux_loss_free, and what the metrics say."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train import config
from train.parallel.dims import TOKENS, Dims
from train.parallel.expert import moes

METRICS = ("moe/imbalance", "moe/imbalance_worst")


class Balance:
    """Once a step, after its last micro-batch and outside of every graph."""

    def __init__(self, model: nn.Module, cfg: config.Model, dims: Dims) -> None:
        """`model`: with its weights in place, before the reduction takes over or after."""
        found = moes(model)
        self._names, self._moes, self._dims = list(found), list(found.values()), dims
        self._bias = cfg.balance == "aux_loss_free"
        self._forced = cfg.force_balance
        self._total = torch.zeros(len(found), cfg.experts, dtype=torch.int64, device=dims.device)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Counts to biases and totals, without host synchronisation. Collective.

        Returns [2]: the most loaded expert's tokens over the mean, the mean of the layers and the worst layer.
        """
        counts = torch.stack([moe.tokens for moe in self._moes])  # [layers, experts]
        if self._dims.size(*TOKENS) > 1:
            dist.all_reduce(counts, group=self._dims.group(*TOKENS))
        if self._bias:
            # one unit towards the mean, whatever the distance (Wang et al. 2024, arXiv 2408.15664, algorithm 1)
            moves = (counts.sum(1, keepdim=True) - counts.shape[1] * counts).sign()
            torch._foreach_add_([moe.raises for moe in self._moes], list(moves))
        torch._foreach_zero_([moe.tokens for moe in self._moes])
        self._total += counts
        imbalance = counts.amax(1) / counts.double().mean(1)
        return torch.stack((imbalance.mean(), imbalance.max()))

    def restart(self) -> None:
        """Back to the first step."""
        for tensor in (self._total, *(moe.raises for moe in self._moes), *(moe.tokens for moe in self._moes)):
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors by names that are unique in the model; the same on all ranks that have the layers."""
        biases = {f"{name}.raises": moe.raises for name, moe in zip(self._names, self._moes, strict=True)}
        return biases | {f"{name}.tokens": row for name, row in zip(self._names, self._total, strict=True)}

    def report(self) -> dict[str, Any]:
        """Each expert's share of its layer's tokens over all steps, by layer, of all pipeline stages. Collective."""
        shares = self._total.double() / self._total.sum(1, keepdim=True)
        rows = {f"{name}.load": row for name, row in zip(self._names, shares, strict=True)}
        whole = self._dims.union_over_pp(rows)
        return {"load": {k.removesuffix(".ffn.load"): t.tolist() for k, t in whole.items()}, "forced": self._forced}
