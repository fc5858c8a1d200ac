"""One rank builds and steps a configuration at its full size, on fake tensors and a fake process group: shapes, groups and
collectives are real, nothing is computed or sent."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from train import config
from train.memory import levers
from train.model.transformer import Transformer
from train.parallel import context, expert, pipeline, tensor
from train.parallel.base import DataParallel
from train.parallel.build import DTYPES, build, param_dtype
from train.parallel.dims import EXPERT_REDUCE, ISLAND, REDUCE, TOKENS, Dims


def main(file: Path, rank: int) -> int:
    """Elements of the master weights that the rank owns. In a process that has no process group."""
    cfg = config.load(file)
    assert cfg.nproc is not None and cfg.grad_accum is not None
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cfg.nproc)
    device = torch.device("cpu")
    dims = Dims.of(cfg, cfg.nproc, rank, device)
    for names in (REDUCE, ISLAND, ("pp",), ("tp",), ("cp",), ("dp_shard", "cp"), TOKENS, ("ep",)):
        dims.group(*names)  # a mesh holds real ranks
    assert dims.shard_mesh.size() == dims.size(*REDUCE)
    assert dims.expert_shard_mesh.size() == dims.size(*EXPERT_REDUCE)
    torch.set_default_dtype(param_dtype(cfg, DTYPES[cfg.precision.name]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Transformer(tensor.local(cfg.model, dims.size("tp")), "math")
        tensor.apply(model, dims)
        expert.apply(model, cfg, dims)
        pipeline.prune(model, cfg, dims)
        context.apply(model, dims, cfg.parallelism.cp_method)
        levers.apply(model, cfg.memory, device)
        dp = build(model, cfg, dims)
        loss = pipelined(model, cfg, dims) if dims.size("pp") > 1 else accumulated(dp, cfg, dims)
        norm = dp.step(1e-3)
    assert loss.shape == norm.shape == ()
    return sum(t.numel() for name, t in dp.shard_items() if name.endswith(".weight"))


def accumulated(dp: DataParallel, cfg: config.Train, dims: Dims) -> torch.Tensor:
    assert cfg.grad_accum is not None
    tokens = dims.rows_of_sequence(torch.zeros(cfg.micro_batch, cfg.seq_len, dtype=torch.int64))
    for index in range(cfg.grad_accum):
        with dp.micro_step(index, cfg.grad_accum):
            loss = dp.module(tokens, tokens)
            loss.backward()
    return loss


def pipelined(model: Transformer, cfg: config.Train, dims: Dims) -> torch.Tensor:
    assert cfg.grad_accum is not None
    line = pipeline.Pipeline(model, cfg, dims, DTYPES[cfg.precision.name])
    tokens = dims.rows_of_sequence(torch.zeros(cfg.micro_batch * cfg.grad_accum, cfg.seq_len, dtype=torch.int64))
    with mock.patch.object(
        schedules._PipelineSchedule, "_warmup_p2p", shapes_are_known, create=True
    ):  # torch 2.13 votes
        return line.step(tokens, tokens)


def shapes_are_known(_: Any, stages: list[Any], *__: Any, **___: Any) -> None:
    """In place of the vote by which the ranks of a pipeline agree that they are: nobody else is there to vote."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
