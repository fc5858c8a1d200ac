"""The real rank in this process: a small model on one device, and what came of its steps."""

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor

from train import config
from train.parallel import graph
from train.sweep import validate
from train.worker import Rank

#: sizes that torch's grouped matmul takes too
DENSE = config.Model("test", dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=61)
MOE = dataclasses.replace(DENSE, ffn=0, experts=4, experts_per_token=2, expert_ffn=32, balance="aux_loss_free")
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MFU_SWEEP_CORES": "1"}


def configuration(device: str = "cpu", /, **keys: Any) -> config.Train:
    """A resolved point of one rank on `device`. `keys`: of config.Train, a group's with __ for the dot (optim__clip_norm)."""
    cfg = config.Train(
        model=dataclasses.replace(DENSE), data=config.Data("fake"), parallelism=config.Parallelism("data", 1, 1, 1),
        reduction=config.Reduction("zero2"), memory=config.Memory("none"), compile=config.Compile("none"),
        nccl=config.Nccl("default"), attention=config.Attention("math"),
        precision=config.Precision("bf16" if device == "cuda" else "fp32"), optim=config.Optim("adamw", lr=1e-2),
        hardware=config.Hardware("auto", peak_tflops=1.0), launch=config.Launch("local"), micro_batch=2, grad_accum=1,
        seq_len=16, steps=20, device=device, nproc=1, deterministic=False, fabric=False,
    )  # fmt: skip
    for key, value in keys.items():
        at: Any = cfg
        *path, last = key.split("__")
        for part in path:
            at = getattr(at, part)
        setattr(at, last, value)
    assert cfg.grad_accum is not None
    cfg.global_batch = cfg.micro_batch * cfg.grad_accum
    assert validate.combination(cfg, 1) is None
    return cfg


@contextmanager
def built(point: Path, cfg: config.Train) -> Iterator[Rank]:
    """The rank, ready to train in a folder that may have its checkpoints; afterwards this thread computes on the default
    stream again."""
    point.mkdir(exist_ok=True)
    _clean(cfg.device)
    (point / "config.yaml").write_text(yaml.safe_dump(config.to_dict(cfg)))
    with mock.patch.dict("os.environ", ENVIRONMENT):
        rank = Rank(point, point)
        threads = torch.get_num_threads()
        try:
            rank.set_device()
            if cfg.compile.cuda_graph:
                graph.use_stream(rank.device)
            rank.build()
            yield rank
            rank.dp.close()
        finally:
            torch.set_num_threads(threads)
            gc.unfreeze()  # where it raised between Garbage and its end
            gc.enable()
            if cfg.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_stream(torch.cuda.default_stream())


def _clean(device: str) -> None:
    """Nothing of an earlier run: compiled code has limits a process, and memory is compared, workspaces of streams included."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def train(point: Path, cfg: config.Train) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(lines of metrics.jsonl, masters and moments at the end)."""
    with built(point, cfg) as rank:
        rank.train(rank.make_meter())
        state = {name: t.detach().cpu().clone() for name, t in rank.dp.state_dict().items()}
        if rank.balance is not None:
            state |= {name: t.cpu().clone() for name, t in rank.balance.state_dict().items()}
        return [json.loads(line) for line in (rank.folder / "metrics.jsonl").read_text().splitlines()], state
