"""What ranks run: a few optimizer steps of a small model, and what came of them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import config
from train.kernels import apply as kernels
from train.memory import levers
from train.memory.offload import Offload
from train.model import fp8
from train.model.moe import MoE
from train.model.transformer import Transformer
from train.parallel import context, expert, pipeline, tensor
from train.parallel.balance import Balance
from train.parallel.build import DTYPES, build, param_dtype
from train.parallel.dims import DATA, Dims

ROWS = 8  # global batch
SEQ = {False: 6, True: 16}  # tokens a row, of sizes that 8 divides or not
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    reduction: str
    dtype: str = "fp64"
    scaling: str | None = None  # of fp8; with another dtype the same shape of model
    bucket_mib: float | None = 0.004
    accumulate: str | None = None
    grad_accum: int = 1
    reshard: bool | int | None = None
    prefetch: int | None = None
    dp_replicate: int = -1
    tp: int = 1
    cp: int = 1
    cp_method: str = "ulysses"
    pp: int = 1
    pp_schedule: str | None = None
    pp_virtual: int | None = None
    layers: int = 2
    ep: int = 1
    model: str = "transformer"  # transformer | tied | odd | even (sizes that 8 divides) | even_tied | even_moe
    experts: int = 8  # even_moe
    balance: str = "none"  # even_moe
    balance_coef: float = 0.02
    qk_norm: bool = False
    kv_heads: int | None = None  # others than the model has
    memory: tuple[tuple[str, Any], ...] = ()  # keys of memory.*
    attention: str = "math"
    widths: tuple[int, ...] = (5, 7, 3)  # odd: layer widths
    unused: bool = False  # odd: parameters that get no gradient in some steps
    compiled: bool = False
    kernels: str = "inductor"  # compile.kernels
    backend: str = "aot_eager"  # the graphs that inductor would get, without minutes of a C++ compiler
    steps: int = 3
    clip_norm: float | None = 0.05  # below the norms met here: clipping happens
    beta1: float = 0.0  # the first moment is then the clipped gradient itself
    lr: float = 1e-2
    device: str = "cpu"  # cuda: GPU number `rank`
    transport: str | None = None  # reduction.transport


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)  # mean over this rank's rows, by step
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # by step, clipped
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # masters after each step
    model: dict[str, Tensor] = field(default_factory=dict)  # the weights that forward reads, after the last step
    traffic: dict[str, Any] = field(default_factory=dict)
    imbalance: list[list[float]] = field(default_factory=list)  # even_moe: by step, mean and worst layer
    routing: dict[str, Tensor] = field(default_factory=dict)  # even_moe: counts and biases after the last step
    margin: float = float("inf")  # even_moe: the closest call between a chosen and a rejected expert


class Odd(nn.Module):
    """An embedding and matrices of any shape; in odd steps, and for `never` in all, parameters get no gradient."""

    def __init__(self, widths: tuple[int, ...], unused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, widths[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(widths[-1], 11, bias=False)
        self.unused = unused
        if unused:
            self.never = nn.Parameter(torch.ones(3, 5))
            self.sometimes = nn.Parameter(torch.ones(widths[-1]))
        self.calls = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens % 11)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.unused and self.calls % 2 == 0:
            x = x * self.sometimes
        self.calls += 1
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten() % 11)


def configuration(case: Case) -> config.Train:
    """The part of a configuration that a reduction reads."""
    even = case.model.startswith("even")
    heads, kv_heads, vocab = (8, 4, 64) if even else (4, 2, 61)
    return config.Train(
        model=config.Model(
            name="test",
            dim=32 if case.scaling else 24,
            layers=case.layers,
            heads=heads,
            kv_heads=case.kv_heads or kv_heads,
            head_dim=8,
            ffn=0 if case.model == "even_moe" else 64 if case.scaling else 40,
            vocab=vocab,
            tied=case.model.endswith("tied"),
            qk_norm=case.qk_norm,
            **(moe(case) if case.model == "even_moe" else {}),
        ),
        grad_accum=case.grad_accum,
        seq_len=SEQ[even],
        parallelism=config.Parallelism(
            "test",
            case.pp,
            case.dp_replicate,
            cp=case.cp,
            cp_method=case.cp_method,
            tp=case.tp,
            ep=case.ep,
            pp_schedule=case.pp_schedule,
            pp_virtual=case.pp_virtual,
        ),
        reduction=config.Reduction(
            case.reduction, case.bucket_mib, case.accumulate, case.reshard, case.prefetch, case.transport
        ),
        memory=config.Memory("test", **dict(case.memory)),
        compile=config.Compile("layer" if case.compiled else "none", case.kernels),
        attention=config.Attention(case.attention),
        precision=config.Precision(case.dtype, case.scaling),
        optim=config.Optim("adamw", lr=case.lr, beta1=case.beta1, clip_norm=case.clip_norm),
    )


def moe(case: Case) -> dict[str, Any]:
    """What the configuration of a mixture of experts has besides."""
    return {
        "experts": case.experts, "experts_per_token": 2, "expert_ffn": 24,
        "balance": case.balance, "balance_coef": case.balance_coef,
    }  # fmt: skip


def make_model(case: Case, cfg: config.Train, dims: Dims | None = None) -> nn.Module:
    """The same weights on every call; with `dims` this rank's part of them."""
    torch.manual_seed(0)
    dtype = param_dtype(cfg, DTYPES[case.dtype])
    device = CPU if dims is None else dims.device
    if case.model == "odd":
        return Odd(case.widths, case.unused).to(device, dtype)
    with torch.device("meta"):
        model = Transformer(cfg.model if dims is None else tensor.local(cfg.model, case.tp), case.attention)
        if dims is not None:
            tensor.apply(model, dims)
            expert.apply(model, cfg, dims)
            pipeline.prune(model, cfg, dims)
            context.apply(model, dims, case.cp_method)
    if case.dtype == "fp8":
        assert case.scaling is not None
        fp8.apply(model, case.scaling)
    model.to(dtype)
    if dims is None or case.reduction != "fsdp" or case.device != "cpu":  # a GPU draws other random numbers
        model.materialise(CPU, 0)
    if device.type != "cpu":
        model.to(device)  # before weights are laid together
    _levers(model, cfg)
    kernels.apply(model, cfg, CPU)
    if case.compiled:
        with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=case.backend)):
            model.compile_layers()
    return model


def _levers(model: Transformer, cfg: config.Train) -> None:
    levers.apply(model, cfg.memory, CPU)
    offload = getattr(model.saving, "__self__", None)
    if isinstance(offload, Offload):
        offload._min_bytes = 64  # a test's activations are small


def rows(step: int, seq_len: int = SEQ[False]) -> tuple[Tensor, Tensor]:
    """(tokens, targets), [ROWS, seq_len], of a step's global batch."""
    data = torch.randint(0, 61, (ROWS, seq_len + 1), generator=torch.Generator().manual_seed(step))
    return data[:, :-1], data[:, 1:]


def train(rank: int, world: int, case: Case) -> Outcome:
    """Run `case` as one of `world` ranks, each with its rows of the global batch."""
    cfg = configuration(case)
    device = torch.device(case.device, rank) if case.device == "cuda" else CPU
    dims = Dims.of(cfg, world, rank, device)
    model = make_model(case, cfg, dims)
    balance = Balance(model, cfg.model, dims) if case.model == "even_moe" else None
    dp = build(model, cfg, dims)
    cfg.micro_batch = ROWS // dims.size(*DATA) // case.grad_accum
    line = pipeline.Pipeline(model, cfg, dims, DTYPES[case.dtype]) if case.pp > 1 else None
    out = Outcome()
    watch_margins(model, out)
    for step in range(case.steps):
        out.losses.append(one_step(dp, dims, case, step, device, line))
        with no_host_synchronisation(device):
            norm = dp.step(case.lr)
            load = None if balance is None else balance.step()
        out.norms.append(float(norm))
        if load is not None:
            out.imbalance.append(load.tolist())
        out.gradients.append({k: v.cpu() for k, v in dp.full("exp_avg").items()})
        out.weights.append({k: v.cpu() for k, v in dp.full_weights().items()})
    out.traffic = dp.traffic()
    if balance is not None:
        out.routing = {name: t.clone() for name, t in balance.state_dict().items()}
    dp.close()  # waits for the weights that are still under way
    if case.reduction != "fsdp" and case.tp == case.pp == case.ep == 1:
        out.model = {k: v.detach().cpu() for k, v in model.named_parameters()}
    return out


def watch_margins(model: nn.Module, out: Outcome) -> None:
    """Keep the smallest gap between the score of a chosen and of a rejected expert: routing is discontinuous there."""

    @torch.compiler.disable
    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, MoE)
        with torch.no_grad():
            k = module.cfg.experts_per_token
            best = module.biased(module.scores(args[0].flatten(0, 1))).topk(k + 1).values
            out.margin = min(out.margin, float((best[:, k - 1] - best[:, k]).min()))

    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_pre_hook(look)


def all_data(rank: int, world: int) -> Dims:
    """A place where every rank has rows of its own."""
    return Dims({"pp": 1, "dp_replicate": world, "dp_shard": 1, "cp": 1, "tp": 1}, rank, CPU)


def one_step(dp: Any, dims: Dims, case: Case, step: int, device: torch.device = CPU, line: Any = None) -> float:
    """Forward and backward of all micro-batches of a step; the mean loss over this rank's rows, NaN where it isn't known."""
    mine = [
        dims.rows_of_sequence(t.chunk(dims.size(*DATA))[dims.index(*DATA)]).to(device)
        for t in rows(step, SEQ[case.model.startswith("even")])
    ]
    if line is not None:
        loss = float(line.step(*mine))
        return loss if line.last else float("nan")
    tokens, targets = (t.chunk(case.grad_accum) for t in mine)
    losses = []
    # Inductor waits for the GPU when it compiles, and DDP once, when it orders its buckets anew after the first step
    waits = case.backend == "inductor" and step == 0 or case.reduction == "ddp" and step == 1
    watched = CPU if waits else device
    for i in range(case.grad_accum):
        with no_host_synchronisation(watched), dp.micro_step(i, case.grad_accum):
            loss = dp.module(tokens[i], targets[i]) / case.grad_accum
            loss.backward()
        losses.append(loss.detach())
    return float(sum(losses))


@contextmanager
def no_host_synchronisation(device: torch.device) -> Iterator[None]:
    """On a GPU, an operation inside that makes the host wait raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
