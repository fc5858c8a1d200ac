"""What a rank has before its first step: device, model, reduction, data, meter; from the frozen configuration alone."""

import dataclasses
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import data, determinism, faults
from train.config import ConfigError, Train, load
from train.kernels import apply as kernels
from train.launch.heartbeat import Heartbeat
from train.measure import flops, manifest, peaks, telemetry
from train.measure.breakdown import Breakdown
from train.measure.metrics import Meter
from train.memory import levers
from train.model import attention, fp8, qualified
from train.model.transformer import Transformer
from train.parallel import async_tp, balance, context, expert, pipeline, tensor
from train.parallel.build import DTYPES, build, param_dtype
from train.parallel.dims import Dims
from train.parallel.round import Islands, Round
from train.replay import passes


class Prepared:
    """Everything that one rank holds while it trains a point."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.born = float(os.environ.get("MFU_SWEEP_SPAWNED", time.monotonic()))  # the supervisor's, same clock
        self.folder, self.scratch = folder, scratch
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.heart = Heartbeat(scratch, self.rank)
        self.cfg: Train = load(folder / "config.yaml")
        self.faults = faults.Injector(self.cfg.fault, self.rank)
        self.seconds: dict[str, float] = {}
        self.replay: passes.Replay | None = None
        self.rounds: Round | None = None
        self.pipeline: pipeline.Pipeline | None = None

    def set_device(self) -> None:
        """The rank's device, and threads: in a fork OMP_NUM_THREADS comes too late."""
        cores = int(os.environ.get("MFU_SWEEP_CORES") or len(os.sched_getaffinity(0)))  # a scheduler may give fewer
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
        if self.cfg.device == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
        else:
            self.device = torch.device("cpu")
        if self.cfg.deterministic:
            determinism.enable(self.cfg.compile.name != "none")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else manifest.cpu_name()
        if self.cfg.hardware.device not in (None, name):
            raise ConfigError("hardware", self.cfg.hardware.name, f"needs {self.cfg.hardware.device}, here is {name}")
        self.device_name = name

    def build(self) -> None:
        """Model, reduction, data: in that order, each from the frozen configuration."""
        cfg, m = self.cfg, self.cfg.model
        self.dtype = DTYPES[cfg.precision.name]
        self.dims = Dims.of(cfg, self.world, self.rank, self.device)
        self._select_attention(context.probe(cfg, self.dims.degrees, self.device, self.dtype))
        self.heart.beat("build")
        if cfg.parallelism.async_tp:
            async_tp.enable(self.dims)
        with torch.device("meta"):
            model = Transformer(tensor.local(m, self.dims.size("tp")), self.attention)
            tensor.apply(model, self.dims)
            expert.apply(model, cfg, self.dims)
            pipeline.prune(model, cfg, self.dims)
        if cfg.precision.scaling is not None:
            fp8.check(self.device, cfg.precision.scaling)
            fp8.apply(model, cfg.precision.scaling)
        self.model = model
        context.apply(model, self.dims, cfg.parallelism.cp_method)
        model.to(param_dtype(cfg, self.dtype))
        if cfg.reduction.name != "fsdp":  # which makes a layer at a time and keeps its shard
            model.materialise(self.device, cfg.seed)
        levers.apply(model, cfg.memory, self.device)
        self.kernels = kernels.apply(model, cfg, self.device)
        if cfg.compile.name == "layer":
            model.compile_layers()
        if cfg.replay:  # its hooks have to see gradients before the reduction takes them
            self.replay = passes.Replay(model, self.device)
        self.balance = balance.Balance(model, m, self.dims) if m.experts else None
        self._reduction(model)
        kept = self.folder / f"memory-rank{self.rank}.pickle"
        self.breakdown = Breakdown(cfg, model, self.dp, self.device, kept)
        assert cfg.global_batch is not None and cfg.grad_accum is not None
        self.source = data.build(cfg.data, m.vocab, cfg.seq_len, cfg.global_batch, cfg.seed, self.device)
        if getattr(self.source, "repeated", False) and self.rank == 0:
            print("data: the text is shorter than one row and repeats to fill it", flush=True)
        self.heart.beat("build")

    def _select_attention(self, probed: Mapping[str, str | None]) -> None:
        """With replay, a path that is known to be reproducible; without a record for one, the result is unqualified."""
        cfg, m, order = self.cfg, self.cfg.model, attention.order(self.device)
        self.qualified: bool | None = None
        if not cfg.replay:
            self.attention = attention.select(cfg.attention.name, probed, order)
        else:
            files = qualified.load(qualified.shipped(), qualified.cache())
            heads = context.local_heads(m, self.dims.degrees, cfg.parallelism.cp_method)
            known = qualified.paths(
                files, qualified.Stack.here(self.device), cfg.precision.weights, heads[0] // heads[1], m.head_dim,
                bool(cfg.deterministic),
            )  # fmt: skip
            self.attention, self.qualified = attention.select_replayable(cfg.attention.name, probed, order, known)
        if self.rank == 0:
            note = " (unqualified: no record shows it to be reproducible here)" if self.qualified is False else ""
            print(f"attention backend: {self.attention}{note}", flush=True)

    def _reduction(self, model: Transformer) -> None:
        """Over all ranks, or with rounds over those of an island."""
        cfg = self.cfg
        if cfg.round.name == "none":
            self.dp = build(model, cfg, self.dims)
        else:
            islands = Islands.of(cfg, self.rank)
            inner = islands.inner_config(cfg)
            place = Dims.of(inner, islands.size, self.rank % islands.size, self.device, islands.inner)
            self.dp = build(model, inner, place)
            self.rounds = Round(cfg.round, self.dp, islands, self.device)
        if self.dims.size("pp") > 1:
            self.pipeline = pipeline.Pipeline(model, cfg, self.dims, self.dtype)
        if self.replay is not None:
            self.replay.attach(self.dp)

    def make_meter(self) -> Meter:
        """FLOPs, peak and the host-side group that step times travel over."""
        cfg = self.cfg
        assert cfg.global_batch is not None
        over_ranks = self.dims.size("cp") > 1
        kernel = "ring" if over_ranks and cfg.parallelism.cp_method == "ring" else self.attention
        compiled, scaling = cfg.compile.name != "none", cfg.precision.scaling
        whole = over_ranks and self.dims.size("ep") == 1 if compiled else scaling is not None
        matmul = fp8.operator(self.device, scaling) if scaling is not None else "aten::mm"
        self.flops = flops.flops_per_token(
            cfg.model, cfg.seq_len, cfg.memory.recompute, cfg.memory, kernel, whole, matmul
        )
        self.peak = self._peak()
        self.host_group = dist.new_group(backend="gloo") if self.world > 1 and self.device.type == "cuda" else None
        return Meter(
            device=self.device, rank=self.rank, world=self.world, tokens_per_step=cfg.global_batch * cfg.seq_len,
            flops_per_token=self.flops, peak_flops=self.peak["flops"], group=self.host_group,
            loss_weight=1.0 if self.pipeline is None or self.pipeline.last else 0.0,
            path=self.folder / "metrics.jsonl" if self.rank == 0 else None,
            more=balance.METRICS if self.balance is not None else (),
            extra=telemetry.Reader(self.scratch) if self.device.type == "cuda" else None,
        )  # fmt: skip

    def _peak(self) -> dict[str, Any]:
        hw = self.cfg.hardware
        if hw.peak_tflops is not None:
            return {
                "flops": hw.peak_tflops * 1e12,
                "source": "hardware.peak_tflops",
                "kind": "given",
                "device": self.device_name,
                "dtype": self.cfg.precision.name,
            }
        known = peaks.lookup(self.device_name, self.cfg.precision.name)
        if known is None:
            name = f"peak-{socket.gethostname()}-{self.device.type}-{self.cfg.precision.name}-{self.world}.json"
            cache = self.folder.parent / ".sweep" / name
            dtype = self.dtype if self.cfg.precision.scaling is None else fp8.E4M3
            known = peaks.of_ranks(cache, self.device, dtype, self.rank, self.world)
        return dataclasses.asdict(known) | {"device": self.device_name, "dtype": self.cfg.precision.name}
