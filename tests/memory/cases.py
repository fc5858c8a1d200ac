"""What ranks run: a few optimizer steps with some levers on, and what came of them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from train import config
from train.memory import levers
from train.memory.offload import Offload
from train.model.transformer import Transformer
from train.parallel.build import DTYPES, build, param_dtype
from train.parallel.dims import Dims

ROWS, SEQ, VOCAB = 8, 6, 61
MODEL = config.Model("test", dim=24, layers=3, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=VOCAB)


@dataclass(frozen=True)
class Case:
    reduction: str = "zero2o"
    dtype: str = "fp32"
    memory: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    grad_accum: int = 1
    tied: bool = False
    steps: int = 3
    compiled: bool = False
    announce: bool = True
    device: str = "cpu"
    attention: str = "flash"

    def with_(self, memory: dict[str, Any] | None = None, optim: dict[str, Any] | None = None) -> "Case":
        return replace(self, memory=self.memory | (memory or {}), optim=self.optim | (optim or {}))


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # masters after the last step
    state: dict[str, Tensor] = field(default_factory=dict)  # this rank's shard
    model: dict[str, Tensor] = field(default_factory=dict)  # what forward reads


def configuration(case: Case) -> config.Train:
    bucket = None if case.reduction == "fsdp" else 0.004
    return config.Train(
        model=replace(MODEL, tied=case.tied),
        reduction=config.Reduction(case.reduction, bucket_mib=bucket),
        memory=config.Memory("test", **case.memory),
        compile=config.Compile(
            "none", "inductor"
        ),  # one AdamW on either side: on a GPU auto's is not the streamed one's
        precision=config.Precision(case.dtype),
        optim=config.Optim(**({"name": "adamw", "lr": 1e-2, "clip_norm": None} | case.optim)),
    )


def setup(rank: int, world: int, case: Case) -> tuple[config.Train, Any, Transformer]:
    cfg, device = configuration(case), torch.device(case.device)
    with torch.device("meta"):
        model = Transformer(cfg.model, case.attention)
    model.to(param_dtype(cfg, DTYPES[case.dtype]))
    if case.reduction != "fsdp":
        model.materialise(device, 0)
    levers.apply(model, cfg.memory, device)
    offload = getattr(model.saving, "__self__", None)
    if isinstance(offload, Offload):
        offload._min_bytes = 64  # a test's activations are small
    if case.compiled:
        model.compile_layers()
    return cfg, build(model, cfg, Dims.of(cfg, world, rank, device)), model


def train(rank: int, world: int, case: Case) -> Outcome:
    """Run `case` as one of `world` ranks, each with its rows of the global batch."""
    cfg, dp, model = setup(rank, world, case)
    out = Outcome()
    for step in range(case.steps):
        if case.announce:
            dp.announce(cfg.optim.lr)
        out.losses.append(one_step(dp, rank, world, case, step))
        out.norms.append(float(dp.step(cfg.optim.lr)))
    out.weights = {k: v.detach().cpu().clone() for k, v in dp.full_weights().items()}
    out.state = {k: v.detach().cpu().clone() for k, v in dp.shard_items()}
    dp.close()
    if case.reduction != "fsdp":
        out.model = {k: v.detach().cpu().clone() for k, v in model.named_parameters()}
    return out


def one_step(dp: Any, rank: int, world: int, case: Case, step: int) -> float:
    data = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step)).to(case.device)
    parts = data.chunk(world)[rank].chunk(case.grad_accum)
    total = 0.0
    for i, rows in enumerate(parts):
        with dp.micro_step(i, case.grad_accum):
            loss = dp.module(rows[:, :-1], rows[:, 1:]) / case.grad_accum
            loss.backward()
        total += float(loss.detach())
    return total
