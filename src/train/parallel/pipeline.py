"""Pipeline parallel: a rank has some of the layers, and micro-batches go through the ranks one behind the other.

`prune` leaves a rank its part of the model under the original parameter names and makes a `Chunk` of each of its stages;
`Pipeline` runs them by a schedule of torch.distributed.pipelining. Gradients are reduced over data parallel once a step, after
the last micro-batch: parts of a schedule compute gradients without running the parameters' hooks.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from train import config
from train.measure.timeline import Timeline
from train.model.transformer import Transformer
from train.parallel.dims import Dims
from train.parallel.stages import SCHEDULES, Plan, plan


def of(cfg: config.Train, dims: Dims) -> Plan | None:
    """The pipeline that `cfg` describes, None without one."""
    return plan(cfg, dims.size("pp"), cfg.grad_accum or 1)


def prune(model: Transformer, cfg: config.Train, dims: Dims) -> None:
    """Drop what other ranks have, and make model.chunks. On the meta device, before anything is done to the layers."""
    pipeline = of(cfg, dims)
    if pipeline is None:
        return
    mine = pipeline.of_rank(dims.index("pp"))
    kept = {layer for stage in mine for layer in pipeline.layers(stage)}
    for index in set(range(len(model.layers))) - kept:
        del model.layers._modules[str(index)]  # not `del layers[i]`, which gives those that stay new names
    if 0 not in mine:
        model.embed = None
    if pipeline.stages - 1 not in mine:
        model.norm = model.head = None
    model.chunks = tuple(Chunk(model, pipeline, stage) for stage in mine)


class Chunk(nn.Module):
    """One stage: tokens [B, T] or the stage before's x [B, T, dim] → x, or for the last stage the loss.

    Its modules are the model's own, so that names, weights and compiled layers are one and the same.
    """

    def __init__(self, model: Transformer, pipeline: Plan, stage: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == pipeline.stages - 1
        self.embed = model.embed if self.first else None
        self.layers = nn.ModuleList(model.layers._modules[str(index)] for index in pipeline.layers(stage))
        self.norm = model.norm if self.last else None
        self.head = model.head if self.last else None
        self._model = (model,)  # in a tuple: not a module of this one

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """`targets` [B, T]: for the last stage; every stage of a rank that has it gets them."""
        model = self._model[0]
        length = x.shape[1] if self.embed is not None else x.shape[1] * sequence_shards(model)
        if self.embed is not None:
            x = self.embed(x)
        x = model.run(self.layers, x, length)
        if self.norm is None or self.head is None:
            return x
        assert targets is not None
        return model.loss(self.norm(x), self.head.weight, targets)


def sequence_shards(model: Transformer) -> int:
    """tp ranks that share the positions of a row between the matrices."""
    return 1 if model.cut is None else model.cut.tp


class Stage(PipelineStage):
    """torch's stage, whose chunk's work is timed."""

    timeline: Timeline

    def _timed(self, micro_batch: int, kind: str) -> AbstractContextManager[None]:
        return self.timeline.action(self.stage_index, micro_batch, kind)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(fwd_chunk_id, "F"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(bwd_chunk_id, "B" if kwargs.get("full_backward", True) else "I"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(bwd_chunk_id, "W"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Nothing travels between two stages of one rank, as in zbv; torch 2.11 would try, and gloo can't."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]


class Pipeline:
    """A rank's stages and the schedule over them."""

    def __init__(self, model: Transformer, cfg: config.Train, dims: Dims, dtype: torch.dtype) -> None:
        """After the reduction took over. `dtype`: of activations. Raises ConfigError for a schedule that torch doesn't have."""
        found = of(cfg, dims)
        assert found is not None and cfg.grad_accum is not None
        self.plan, self._dims, self.chunks = found, dims, model.chunks
        self.stages = found.of_rank(dims.index("pp"))
        self.first, self.last = 0 in self.stages, found.stages - 1 in self.stages
        self.timeline = Timeline(dims.device)
        rows = cfg.micro_batch, cfg.seq_len // dims.size("cp")
        hidden = cfg.micro_batch, rows[1] // sequence_shards(model), cfg.model.dim
        self._boundary_bytes = math.prod(hidden) * dtype.itemsize * cfg.grad_accum
        made = [
            self._stage(chunk, stage, rows, hidden, dtype)
            for chunk, stage in zip(self.chunks, self.stages, strict=True)
        ]
        kind = schedule_class(found.name)
        if SCHEDULES[found.name].split and cfg.precision.scaling is not None and not splits_fp8():
            why = (
                f"torch {torch.__version__} can't run the two backwards of precision=fp8's layers apart; torch 2.13 can"
            )
            raise config.ConfigError("parallelism.pp_schedule", found.name, why)
        multi = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        count = cfg.grad_accum
        self._schedule = kind(
            made if multi else made[0], count, loss_fn=lambda loss, _: loss / count, scale_grads=False
        )

    def _stage(self, chunk: nn.Module, index: int, rows: Any, hidden: Any, dtype: torch.dtype) -> Stage:
        """Shapes are told, so that torch need not run the model to learn them."""
        between = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(rows, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
        stage = Stage(
            chunk, index, self.plan.stages, self._dims.device, group=self._dims.group("pp"),
            input_args=(tokens if index == 0 else between,),
            output_args=(loss if index == self.plan.stages - 1 else between,),
        )  # fmt: skip
        stage.timeline = self.timeline
        return stage

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step: activations to the next stage's rank, their gradients to the one before's."""
        place, last = self._dims.index("pp"), self.plan.stages - 1
        sends = sum(
            0 <= other <= last and self.plan.rank_of(other) != place
            for stage in self.stages
            for other in (stage - 1, stage + 1)
        )
        return {"pp_send": sends * self._boundary_bytes}

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches of a step: tokens, targets [micro_batch x grad_accum, T / cp] of this
        data-parallel rank. The mean loss over them on ranks with the last stage, elsewhere 0."""
        losses: list[Tensor] = []
        given = {"targets": targets} if self.last else {}
        with self.timeline.step():
            self._schedule.step(
                *((tokens.contiguous(),) if self.first else ()),  # torch 2.11 compares strides with those it was told
                target=targets if self.last else None,
                losses=losses if self.last else None, return_outputs=False, **given,
            )  # fmt: skip
        if not losses:
            return torch.zeros((), device=tokens.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


def splits_fp8() -> bool:
    """Whether torch runs the gradients of inputs and of weights apart where a layer's matmuls are autograd functions of ours:
    seen to fail in 2.11 and to work in 2.13."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def schedule_class(name: str) -> Any:
    """torch's class. Raises ConfigError where the installed torch has none."""
    try:
        return torch_schedules.get_schedule_class(SCHEDULES[name].torch)
    except ValueError:
        why = f"torch {torch.__version__} has no {SCHEDULES[name].torch}"
        raise config.ConfigError("parallelism.pp_schedule", name, why) from None
