"""What a rank tells when its measured steps are done: its result, and as rank 0 most of status.json."""

import os
from typing import TYPE_CHECKING, Any

from train.measure import flops, memory, timeline
from train.measure.metrics import Meter
from train.parallel import tensor
from train.sweep.freeze import write_json

if TYPE_CHECKING:
    from train.worker import Rank


def result(rank: "Rank", meter: Meter) -> dict[str, Any]:
    """Of the measured pass of this rank: peaks in GiB, its part of a pipeline, and from rank 0 `summary`. Collective."""
    found: dict[str, Any] = {
        "rank_peak_mem_gib": meter.round_peak,
        "rank_step_peak_mem_gib": meter.step_peak,
        "memory_by_kind": rank.breakdown.kinds,
        "rank_host_peak_gib": memory.host_peak(),
    }
    pipelined = _pipeline(rank, found)
    experts = rank.balance.report() if rank.balance is not None else None
    if rank.rank == 0:
        found["summary"] = _summary(rank) | {"experts": experts, "pipeline": pipelined}
    return found


def _summary(rank: "Rank") -> dict[str, Any]:
    """What status.json keeps of rank 0."""
    cfg = rank.cfg
    assert cfg.global_batch is not None
    return {
        "flops_per_token": rank.flops,
        "peak": rank.peak,
        "memory_kind": memory.kind(rank.device),
        "capacity_gib": memory.capacity(rank.device),
        "precision": cfg.precision.name,
        "attention_backend": rank.attention,
        "attention_qualified": rank.qualified,
        "params": flops.param_count(cfg.model),
        "params_active": flops.param_count(cfg.model, active=True),
        "tokens_per_step": cfg.global_batch * cfg.seq_len,
        "seconds": rank.seconds,
        "profiled_steps": rank.trace.steps,
        "traffic": _traffic(rank),
        "engine": _engine(rank),
        "fabric": rank.fabric,
        "round": rank.rounds.report() if rank.rounds else None,
        "checkpoint": rank.checkpoints.report() if rank.checkpoints else None,
    }


def _engine(rank: "Rank") -> dict[str, Any]:
    """What ran, for a reader of this one file; config.yaml has all of it."""
    cfg = rank.cfg
    return {
        "reduction": cfg.reduction.name,
        "bucket_mib": cfg.reduction.bucket_mib,
        "accumulate": cfg.reduction.accumulate,
        "recompute": cfg.memory.recompute,
        "compile": cfg.compile.name,
        "kernels": rank.kernels,
        "attention": rank.attention,
        "precision": cfg.precision.name,
        "rope_cache": cfg.model.rope_cache,
        "deterministic": bool(cfg.deterministic),
        "replay": cfg.replay,
        "force_balance": cfg.model.force_balance,
        "micro_batch": cfg.micro_batch,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "PYTORCH_", "CUBLAS_"))},
    }


def _traffic(rank: "Rank") -> dict[str, Any]:
    """What the reduction and the layers' own collectives sent."""
    found = rank.dp.traffic()
    layers = tensor.traffic(rank.model, rank.cfg, rank.dims, rank.dtype.itemsize)
    stages = rank.pipeline.traffic() if rank.pipeline is not None else {}
    return found | {"bytes": found["bytes"] | layers | stages}


def _pipeline(rank: "Rank", result: dict[str, Any]) -> dict[str, Any] | None:
    """Measured and theoretical bubble, this rank's own numbers into `result`; with profile=true the schedule as executed
    stays in the folder. Collective."""
    line = rank.pipeline
    if line is None or not (found := timeline.report(line.timeline, line.plan, rank.dims, rank.host_group)):
        return None
    executed = found.pop("executed")
    if rank.cfg.profile and rank.rank == 0:
        write_json(rank.folder / "schedule.json", {"schema": 1} | found | executed, sync=False)
    result["rank_stages"], result["rank_idle"] = (found.pop(key)[rank.rank] for key in ("rank_stages", "rank_idle"))
    return found
