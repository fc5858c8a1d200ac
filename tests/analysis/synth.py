"""Sweep folders with known answers, written as the trainer writes them."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

CAPACITY_GIB = 139.8
PEAK = 989.4e12
NOT_RUN = ("invalid", "infeasible", "pending")
FLOPS_PER_TOKEN = {"mfu": 7.2e9, "mfu_causal": 6.75e9, "hfu": 7.2e9}


@dataclass
class Point:
    """One point; `rate` is the true steady tokens/s over all ranks."""

    micro_batch: int = 4
    reduction: str = "zero2o"
    rate: float = 50_000.0
    status: str = "ok"
    reason: str = ""
    steps: int = 40
    done: int | None = None  # lines written, where the run ended early
    noise: float = 0.01  # standard deviation of log step time
    phi: float = 0.0  # its lag-one autocorrelation
    warmup: tuple[float, ...] = (8.0, 1.6, 1.2)  # factors on the first steps
    drift: tuple[float, int] = (0.0, 10)  # extra at step 0, steps for it to fall by e
    outliers: float = 0.0  # share of steps that take three times as long
    seed: int = 0
    repeat: int | None = None
    nproc: int = 2
    model: str = "dense_1b"
    memory_gib: float | None = None
    host: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    extra_metrics: dict[str, float] = field(default_factory=dict)
    given: list[str] | None = None  # overrides, where they are fewer than the configuration
    started: bool = True  # False: in the grid, without a folder

    @property
    def overrides(self) -> list[str]:
        if self.given is not None:
            return self.given
        items = [f"model={self.model}", f"reduction={self.reduction}", f"micro_batch={self.micro_batch}"]
        items += [f"nproc={self.nproc}"] + [f"{key}={value}" for key, value in self.config.items()]
        return items + ([f"repeat={self.repeat}"] if self.repeat is not None else [])

    def configuration(self) -> dict[str, Any]:
        nested = {
            "model": {"name": self.model, "layers": 18, "width": 2048, "heads": 16},
            "data": {"name": "fake"},
            "parallelism": {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp_replicate": 1},
            "reduction": {"name": self.reduction, "bucket_mb": 25.0},
            "memory": {"recompute": "none"},
            "compile": {"name": "layer"},
            "nccl": {"name": "default"},
            "attention": {"name": "auto"},
            "precision": {"name": "bf16"},
            "optim": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95]},
            "hardware": {"name": "auto"},
            "micro_batch": self.micro_batch,
            "grad_accum": 1,
            "seq_len": 2048,
            "steps": self.steps,
            "seed": 1,
            "nproc": self.nproc,
            "device": "cuda",
            **self.config,
        }
        return nested | ({"repeat": self.repeat} if self.repeat is not None else {})


def identity(point: Point) -> str:
    text = json.dumps(point.configuration(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def folder_name(point: Point) -> str:
    again = f"-r{point.repeat}" if point.repeat is not None else ""
    return f"{point.reduction}-mb{point.micro_batch}{again}-{identity(point)[:8]}"


def step_times(point: Point) -> np.ndarray:
    """Seconds of each step: the truth times warm-up, drift, AR(1) noise and outliers."""
    rng = np.random.default_rng(point.seed)
    truth = point.micro_batch * 2048 * point.nproc / point.rate
    noise = np.empty(point.steps)
    level = rng.normal()
    for i in range(point.steps):
        level = point.phi * level + np.sqrt(1 - point.phi**2) * rng.normal() if i else level
        noise[i] = level
    factor = np.exp(point.noise * noise)
    factor[: len(point.warmup)] *= np.array(point.warmup)[: point.steps]
    factor *= 1 + point.drift[0] * np.exp(-np.arange(point.steps) / point.drift[1])
    factor[rng.random(point.steps) < point.outliers] *= 3
    return truth * factor


def metrics_lines(point: Point) -> list[str]:
    tokens = point.micro_batch * 2048 * point.nproc
    memory = point.memory_gib or 10 + 2.5 * point.micro_batch
    lines = []
    for step, seconds in enumerate(step_times(point)[: point.done]):
        rate = tokens / seconds
        per_gpu = rate / point.nproc
        row = {
            "step": step,
            "time/step": seconds,
            "time/data": 0.001 * seconds,
            "perf/throughput": rate,
            "perf/tokens_per_s_per_gpu": per_gpu,
            **{f"perf/{name}": 100 * per_gpu * flops / PEAK for name, flops in FLOPS_PER_TOKEN.items()},
            "perf/peak_memory": memory,
            "loss": 5.5 - 0.02 * step,
            "grad_norm": 1.0,
            **point.extra_metrics,
        }
        lines.append(json.dumps(row))
    return lines


def write_point(folder: Path, point: Point) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(point.configuration(), sort_keys=False))
    host = {
        "host": "node0",
        "code": {"commit": "0123456789abcdef", "dirty": False, "src_hash": "feedbeef"},
        "gpus": [{"name": "NVIDIA H200"}] * point.nproc,
        "driver": "580.159",
        "cuda": "13.0",
        "nccl": "2.28.9",
        "torch": "2.11.0",
        "python": "3.11.2",
        "env": {"NCCL_ALGO": "Ring"},
        **point.host,
    }
    manifest = {"schema": 1, "hosts": [host], "conventions": {"mfu": "palm"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    memory = point.memory_gib or 10 + 2.5 * point.micro_batch
    summary = {
        "flops_per_token": FLOPS_PER_TOKEN,
        "peak": {"flops": PEAK, "source": "vendor sheet", "kind": "vendor", "device": "NVIDIA H200"},
        "rank_peak_mem_gib": [memory + 1] * point.nproc,
        "rank_step_peak_mem_gib": [memory] * point.nproc,
        "memory_kind": "device",
        "capacity_gib": CAPACITY_GIB,
        "seconds": {"start": 1.5, "build": 0.5, "compile": 6.0, "train": float(step_times(point)[: point.done].sum())},
        "precision": "bf16",
        "leaf_root": "ab" * 32,
        "replay_match": True,
        "attention_backend": "flash",
        "params": 1_100_000_000,
        "tokens_per_step": point.micro_batch * 2048 * point.nproc,
        **point.summary,
    }
    status = {
        "schema": 1,
        "identity": identity(point),
        "status": point.status,
        "reason": point.reason,
        "attempt": 1,
        "started": None if point.status in NOT_RUN else "2026-11-29T10:00:00+00:00",
        "ended": None if point.status in (*NOT_RUN, "running") else "2026-11-29T10:01:00+00:00",
        "ranks": [{"rank": r, "pid": 100 + r, "host": "node0", "exit_code": 0} for r in range(point.nproc)],
        "summary": summary if point.status not in NOT_RUN else {},
    }
    (folder / "status.json").write_text(json.dumps(status))
    if point.status not in NOT_RUN:
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in metrics_lines(point)))


def write_sweep(folder: Path, points: list[Point]) -> Path:
    """The sweep's folder, sweep.json first, then every point that was started."""
    folder.mkdir(parents=True)
    grid = [{"identity": identity(p), "folder": folder_name(p), "overrides": p.overrides} for p in points]
    meta = {
        "schema": 1,
        "command": "python -m train -m reduction=zero2,zero2o micro_batch=4,8,12",
        "created": "2026-11-29T09:59:00+00:00",
        "grid": grid,
        "jobs": [],
        "snapshot": "feedbeef",
    }
    (folder / "sweep.json").write_text(json.dumps(meta, indent=1))
    for point in points:
        if point.started:
            write_point(folder / folder_name(point), point)
    return folder


def standard_grid() -> list[Point]:
    """Two reductions by four micro-batches, one out of memory, one implied by it, one never started."""
    points = []
    for i, reduction in enumerate(("zero2", "zero2o")):
        for j, micro_batch in enumerate((4, 8, 12)):
            rate = 40_000 + 4_000 * i + 3_000 * j
            points.append(Point(micro_batch, reduction, rate, seed=10 * i + j))
    oom = "out of memory on rank 1: 2.0 GiB requested, 0.7 GiB free"
    points.append(Point(48, "zero2", status="oom", reason=oom, done=1))
    points.append(Point(48, "zero2o", status="infeasible", reason=f"implied by {folder_name(points[-1])}"))
    points.append(Point(16, "zero2o", started=False))
    return points
