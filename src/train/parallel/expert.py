"""Expert parallel: the ep ranks share a layer's experts, and every token travels to the ranks that hold its experts.

An all-to-all of counts says how many rows come, one of rows (in the model's dtype) brings them, sorted here by expert,
and a third carries the results home; backward goes the same way back. Attention and the rest are as they were: dp_shard x
cp x tp = expert_shard x ep, so the ep ranks are ranks with other tokens. A rank's gradient of its experts has the tokens
of all ep ranks in it; ranks with the same experts add theirs up.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from train import config
from train.model.moe import Experts, MoE, collect, spread
from train.model.transformer import Cut, Transformer
from train.parallel.dims import TOKENS, Dims
from train.parallel.traffic import Meter

TRAFFIC = "ep_all_to_all"
_ops = torch.ops._c10d_functional


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to experts (and not to their router)."""
    return ".experts." in name


def apart(name: str, dims: Dims) -> bool:
    """Whether a parameter's copies lie on other ranks than those of the rest: that of an expert, with ep or tp.

    With tp every rank has all of its experts whole, and tokens of its own.
    """
    return is_expert(name) and dims.size("ep") * dims.size("tp") > 1


def moes(model: torch.nn.Module) -> dict[str, MoE]:
    """The mixtures of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def apply(model: Transformer, cfg: config.Train, dims: Dims) -> None:
    """Leave a rank its experts, and show it the others. On the meta device, after tensor.apply, before the rest."""
    ep = dims.size("ep")
    for moe in moes(model).values():
        if dims.size(*TOKENS) > 1:
            moe.over_ranks = functools.partial(_sum, group=dims.group(*TOKENS).group_name)
        # a rank's loss is its mean over micro-batches, and tp ranks each have a part of its tokens
        moe.aux_share = 1 / ((cfg.grad_accum or 1) * dims.size("tp"))
        if ep > 1:
            with moe.router.weight.device:
                moe.experts = Experts(moe.cfg, moe.cfg.experts // ep)
            moe.exchange = AllToAll(ep, dims.index("ep"), dims.group("ep").group_name, dims.meter)
    if ep > 1:
        model.cut = Part(ep, dims.index("ep"), model.cut)


def _sum(counts: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(counts, "sum", group))


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """The experts of `ep` ranks as one: `parallelism.dispatch=torch`."""

    ep: int
    index: int
    group: str
    meter: Meter

    @torch.compiler.disable
    def __call__(self, experts: Experts, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """rows [R, dim] sorted by expert, weights [R], counts [ep x local] of these rows → results in the rows' order."""
        sent = counts.view(self.ep, -1)  # [to rank, its expert]
        got = _wait(_ops.all_to_all_single(sent, [1] * self.ep, [1] * self.ep, self.group))  # [from rank, my expert]
        out, back = self._splits(sent, got, len(rows))
        arrived = exchange(rows, out, back, self)
        their_weights = exchange(weights, out, back, self)
        # by source, then expert → by expert, then source
        experts_of_rank = torch.arange(got.shape[1], device=got.device).repeat(self.ep)
        ids = experts_of_rank.repeat_interleave(got.flatten(), output_size=sum(back))
        _, order = ids.sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = got.sum(0).cumsum(0).to(torch.int32)
        mine = spread(arrived, order, inverse, 1), spread(their_weights[:, None], order, inverse, 1)[:, 0]
        done = collect(experts(*mine, ends), order, inverse, 1)
        return exchange(done, back, out, self)

    def _splits(self, sent: Tensor, got: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Rows to and from each rank. One host synchronisation; on fake tensors, which hold no counts, equal parts."""
        if isinstance(sent, FakeTensor):
            equal = [rows // self.ep + (i < rows % self.ep) for i in range(self.ep)]
            return equal, equal
        out, back = torch.stack((sent.sum(1), got.sum(1))).tolist()
        return out, back


def exchange(x: Tensor, out: list[int], back: list[int], to: AllToAll) -> Tensor:
    """The first out[0] rows of x to rank 0 of the group, the next out[1] to rank 1, …; back[i] rows come from rank i."""
    return _Exchange.apply(x, out, back, to)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], back: list[int], to: AllToAll) -> Tensor:
        ctx.of = out, back, to
        return _exchange(x, out, back, to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        out, back, to = ctx.of
        return _exchange(grads[0], back, out, to), None, None, None


def _exchange(x: Tensor, out: list[int], back: list[int], to: AllToAll) -> Tensor:
    row_bytes = x[:1].numel() * x.itemsize if len(x) else 0
    to.meter.sent(TRAFFIC, (len(x) - out[to.index]) * row_bytes)
    with to.meter.waiting(TRAFFIC):
        return _wait(_ops.all_to_all_single(x.contiguous(), back, out, to.group))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _ops.wait_tensor(x)
    return done


@dataclasses.dataclass(frozen=True)
class Part:
    """The experts of ep rank `index`; `rest`: how the other parameters are cut."""

    ep: int
    index: int
    rest: Cut | None

    @property
    def tp(self) -> int:
        """Ranks that share the positions of a row between the matrices."""
        return 1 if self.rest is None else self.rest.tp

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Of the parameter of which this rank's part has `shape`."""
        if is_expert(name):
            return torch.Size((shape[0] * self.ep, *shape[1:]))
        return shape if self.rest is None else self.rest.whole_shape(name, shape)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Of the whole parameter, this rank's part."""
        if is_expert(name):
            return whole.chunk(self.ep)[self.index]
        return whole if self.rest is None else self.rest.part(name, whole)


def assemble(mine: Tensor, dims: Dims) -> Tensor:
    """All experts' parameter from the ep ranks' parts, on each of them. Collective."""
    if dims.size("ep") == 1:
        return mine
    parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dims.size("ep"))]
    dist.all_gather(parts, mine.contiguous(), group=dims.group("ep"))
    return torch.cat(parts)
