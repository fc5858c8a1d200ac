"""Tensor parallel with sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).

The tp ranks share every layer's matrices: wq, wk, wv, w_gate, w_up by rows (each rank has some heads and some of the FFN),
wo and w_down by columns, embedding and LM head by vocabulary. Between them, where norms and residuals work, each rank holds
T/tp positions; entering a matrix gathers the sequence, leaving one adds the ranks' parts up and scatters it. No rank sees
the full logits. Weights are plain tensors of the local shape, so every reduction shards and reduces them as ever.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from train import config
from train.model import loss
from train.model.transformer import Attention, FeedForward, Transformer
from train.parallel.dims import Dims

#: parameter's module → the dimension of its weight that is cut; what is not here every tp rank holds whole
CUT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w_gate": 0, "w_up": 0, "w_down": 1, "embed": 0, "head": 0}
_ops = torch.ops._c10d_functional


def cut_dim(name: str) -> int | None:
    """The dimension of parameter `name` that is cut over tp, None for a parameter that is not."""
    return CUT.get(name.rpartition(".")[0].rpartition(".")[2])


def local(cfg: config.Model, tp: int) -> config.Model:
    """The shape of one tp rank's part of the model."""
    cuts = {key: getattr(cfg, key) // tp for key in ("heads", "kv_heads", "ffn", "vocab")}
    return dataclasses.replace(cfg, **cuts)


def apply(model: Transformer, dims: Dims) -> None:
    """Make a model of the `local` shape one tp rank's part. On the meta device, before compile and reduction."""
    tp = dims.size("tp")
    if tp == 1:
        return
    group = dims.group("tp").group_name
    first = dims.index("tp") * model.cfg.vocab
    model.cut = Cut(tp, dims.index("tp"))
    model.embed = VocabParallelEmbedding(model.cfg, first, group, tp)
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            module.register_forward_pre_hook(lambda _, args: (gather(args[0], group, tp), *args[1:]))
            module.register_forward_hook(lambda _, __, out: scatter(out, group, tp))
    assert model.norm is not None
    model.norm.register_forward_hook(lambda _, __, out: gather(out, group, tp))
    model.shard = loss.VocabShard(first, group)
    model.loss = loss.build(config.Memory(), model.shard)


class VocabParallelEmbedding(nn.Embedding):
    """Rows [first, first + V/tp) of the table: tokens [B, T] → [B, T/tp, dim]."""

    def __init__(self, cfg: config.Model, first: int, group: str, tp: int) -> None:
        """`cfg`: local."""
        super().__init__(cfg.vocab, cfg.dim)
        self.first, self.group, self.tp = first, group, tp

    def forward(self, tokens: Tensor) -> Tensor:
        here = tokens - self.first
        mine = (here >= 0) & (here < self.num_embeddings)
        rows = F.embedding(here.where(mine, 0), self.weight) * mine[..., None]
        return scatter(rows, self.group, self.tp)


def gather(x: Tensor, group: str, tp: int) -> Tensor:
    """[B, T/tp, d] of every rank → [B, T, d] on all; backward adds the ranks' gradients up and scatters them."""
    return _Gather.apply(x, group, tp)


def scatter(x: Tensor, group: str, tp: int) -> Tensor:
    """Sum over ranks of [B, T, d] → this rank's positions [B, T/tp, d]; backward gathers."""
    return _Scatter.apply(x, group, tp)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, tp: int) -> Tensor:
        ctx.of = group, tp
        return _gather(x, group, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grads[0], *ctx.of), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, tp: int) -> Tensor:
        ctx.of = group, tp
        return _scatter(x, group, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], *ctx.of), None, None


def _gather(x: Tensor, group: str, tp: int) -> Tensor:
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), tp, group))  # [tp * B, T/tp, d]
    return torch.cat(parts.chunk(tp), 1)  # this chunk and cat, and those below, are what async_tp recognizes


def _scatter(x: Tensor, group: str, tp: int) -> Tensor:
    parts = torch.cat(x.chunk(tp, 1))  # [tp * B, T/tp, d]
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", tp, group))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The part of tp rank `index`."""

    tp: int
    index: int

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Of the parameter of which a rank's part has `shape`."""
        at = cut_dim(name)
        return torch.Size(n * self.tp if i == at else n for i, n in enumerate(shape))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Of the whole parameter, this rank's part."""
        at = cut_dim(name)
        return whole if at is None else whole.chunk(self.tp, at)[self.index]


def assemble(name: str, mine: Tensor, dims: Dims) -> Tensor:
    """The whole parameter from the tp ranks' parts, on each of them. Collective."""
    at = cut_dim(name)
    if at is None or dims.size("tp") == 1:
        return mine
    parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dims.size("tp"))]
    dist.all_gather(parts, mine.contiguous(), group=dims.group("tp"))
    return torch.cat(parts, at)


def traffic(model: Transformer, cfg: config.Train, dims: Dims, itemsize: int) -> dict[str, int]:
    """Bytes that a rank sends in a step for gathering and scattering sequences, as rings send them; by the layout, for a
    compiled layer shows no counters."""
    tp = dims.size("tp")
    if tp == 1:
        return {}
    assert cfg.grad_accum is not None
    once = cfg.micro_batch * cfg.seq_len // dims.size("cp", "tp") * cfg.model.dim * itemsize * (tp - 1)
    # attention and FFN gather once and scatter once each, and the reverse in backward; embedding and head one of the two
    blocks = [sum(isinstance(m, (Attention, FeedForward)) for m in block.modules()) for block in model.layers]
    ends = (model.embed is not None) + (model.norm is not None)
    gathers = scatters = 2 * sum(blocks) + ends
    if cfg.memory.recompute == "full":  # all over again but for an FFN's scatter, whose result nothing needs
        again = blocks[:: cfg.memory.every]
        gathers, scatters = gathers + sum(again), scatters + len(again)
    return {"tp_all_gather": gathers * once * cfg.grad_accum, "tp_reduce_scatter": scatters * once * cfg.grad_accum}
