"""From overrides to frozen points: compose, check, resolve device, ranks and batch, merge equal ones."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from train import config
from train.config import ConfigError, Train
from train.data import corpus
from train.kernels import names
from train.launch import environment
from train.launch.slurm import options as slurm
from train.memory import rules as memory_rules
from train.model import fp8_rules
from train.parallel import mesh, stages
from train.sweep import freeze, validate
from train.sweep.grid import Composer, Point


@dataclass
class Frozen:
    """A point with everything resolved."""

    cfg: Train
    identity: str
    overrides: list[str]
    slug: str
    invalid: Optional[str] = None  # why it can't exist
    folder: str = ""
    merged: list[list[str]] = field(default_factory=list)  # overrides of equal points


def resolve_host(cfg: Train, host: dict[str, Any], cores: int) -> None:
    """Fill in device, nproc and precision from what this host has. Raises ConfigError for what it doesn't have."""
    gpus = len(host.get("gpus", []))
    if cfg.device != "cpu":
        validate.visible_gpus(gpus)
    if cfg.device == "auto":
        cfg.device = "cuda" if gpus else "cpu"
    if cfg.device == "cuda" and not gpus:
        hidden = environment.USER.get("CUDA_VISIBLE_DEVICES")
        why = f" ({host['gpu_error']})" if host.get("gpu_error") else ""
        why += f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
        raise ConfigError("device", "cuda", f"no CUDA device is visible here{why}; use device=cpu or auto")
    limit = gpus if cfg.device == "cuda" else max(8, 4 * cores)
    what = "visible GPUs" if cfg.device == "cuda" else f"ranks for {cores} cores"
    if cfg.nproc is None:
        cfg.nproc = gpus if cfg.device == "cuda" else 2
    if cfg.nproc > limit:
        raise ConfigError("nproc", cfg.nproc, f"must be at most {limit} ({limit} {what})")
    if cfg.precision.name == "auto":
        cfg.precision.name = "bf16" if cfg.device == "cuda" else "fp32"


def resolve(cfg: Train, contents: dict[tuple[Any, ...], str]) -> Optional[str]:
    """Check the combination; fill in degrees, batch and the data's content. The reason when the point can't exist.

    `contents` holds hashes of data already read for this command.
    """
    assert cfg.nproc is not None
    if reason := validate.combination(cfg, cfg.nproc):
        return reason
    if cfg.deterministic is None:
        cfg.deterministic = cfg.replay
    cfg.compile.kernels = names.spelled(cfg.compile.kernels)
    degrees = mesh.resolve(cfg, cfg.nproc)
    for dimension, degree in degrees.items():
        setattr(cfg.parallelism, dimension, degree)
    if degrees["cp"] == 1:
        cfg.parallelism.cp_method = "ulysses"  # without ranks to reach: one point, not two
    cfg.grad_accum, cfg.global_batch = validate.batch(cfg, mesh.data_ranks(degrees))
    stages.settle(cfg)
    source = (cfg.data.name, cfg.data.path, cfg.data.tokenizer)
    if source not in contents:
        contents[source] = corpus.content_hash(cfg.data)
    cfg.data.content = contents[source]
    return None


def checked(composer: Composer, points: Iterator[Point]) -> list[tuple[Point, Train]]:
    """Compose every point and check each key by itself. Raises ConfigError and Hydra's errors: bad input."""
    out = []
    for point in points:
        cfg = config.from_dict(Train, composer.compose(point.overrides))
        validate.values(cfg)
        slurm.check(cfg)
        out.append((point, cfg))
    return out


def freeze_all(checked_points: list[tuple[Point, Train]], host: dict[str, Any], cores: int) -> list[Frozen]:
    """Resolved points in grid order, equal ones merged, repeats expanded. Raises ConfigError."""
    out: dict[str, Frozen] = {}
    contents: dict[tuple[Any, ...], str] = {}
    for point, original in checked_points:
        for repeat in range(original.repeats):
            cfg = copy.deepcopy(original) if original.repeats > 1 else original
            cfg.repeat = repeat
            if cfg.launch.name == "slurm":
                resolve_host(cfg, *slurm.host(cfg))
                invalid = resolve(cfg, contents) or slurm.impossible(cfg)
            else:
                resolve_host(cfg, host, cores)
                invalid = resolve(cfg, contents) or fp8_rules.impossible(cfg, host)
                if not cfg.plan:  # a plan for GPUs may be made on a laptop
                    invalid = invalid or memory_rules.too_large(cfg)
            identity = freeze.identity(cfg)
            if identity in out:
                out[identity].merged.append(point.overrides)
            else:
                out[identity] = Frozen(cfg, identity, point.overrides, freeze.slug(point.swept, cfg), invalid)
    frozen = list(out.values())
    short = {p.identity[:8] for p in frozen}
    for p in frozen:
        p.folder = f"{p.slug}-{p.identity[: 8 if len(short) == len(frozen) else 16]}"
    return frozen
