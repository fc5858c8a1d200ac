"""launch.* for SLURM: what is valid, and what one point asks for."""

import re
from dataclasses import dataclass
from typing import Any, Optional

from train.config import ConfigError, Launch, Train

#: keys of launch.* that mean nothing on one machine
SLURM_ONLY = (
    "nodes", "gpus_per_node", "cpus", "memory", "time", "partition", "account", "qos", "constraint", "exclude", "sbatch",
    "array_parallelism", "points_per_job", "wait", "dry_run", "template", "setup", "python", "signal_seconds", "requeues",
)  # fmt: skip
RANGES = {
    "nodes": (1, 10**5),
    "gpus_per_node": (1, 64),
    "cpus": (1, 4096),
    "array_parallelism": (1, 10**6),
    "points_per_job": (1, 10**5),
    "signal_seconds": (1, 65535),  # sbatch's own limit
    "requeues": (0, 10**4),
}
#: sbatch options that have a launch.* key of their own, or that the executor sets
TAKEN = (
    "array", "job-name", "comment", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "nodes",
    "ntasks-per-node", "ntasks", "gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account", "qos",
    "constraint", "exclude", "dependency", "wrap", "parsable", "test-only", "wait", "chdir",
)  # fmt: skip
MEMORY = re.compile(r"\d+[KMGT]?")
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class Shape:
    """What a point asks of the cluster: points of one shape become one array."""

    nodes: int
    gpus: int  # per node; 0: CPUs only


def seconds(limit: str) -> Optional[int]:
    """SLURM's time formats (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds; None when it is none of them."""
    match = TIME.fullmatch(limit.strip())
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(p) for p in parts if p is not None]
    if days is not None:
        h, m, s = (numbers + [0, 0])[:3]
        return ((int(days) * 24 + h) * 60 + m) * 60 + s
    if len(numbers) == 1:
        return numbers[0] * 60
    h, m, s = numbers if len(numbers) == 3 else (0, *numbers)
    return (h * 60 + m) * 60 + s


def check(cfg: Train) -> None:
    """Each launch.* key by itself. Raises ConfigError for the first that is wrong."""
    launch = cfg.launch
    if launch.name != "slurm":
        for key in SLURM_ONLY:
            if getattr(launch, key) != getattr(Launch(), key):
                raise ConfigError(f"launch.{key}", getattr(launch, key), "goes with launch=slurm only")
        if cfg.cancel:
            raise ConfigError("cancel", True, "goes with launch=slurm only")
        return
    for key, (low, high) in RANGES.items():
        value = getattr(launch, key)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"launch.{key}", value, f"must be between {low} and {high}")
    if launch.memory is not None and not MEMORY.fullmatch(launch.memory):
        raise ConfigError(
            "launch.memory", launch.memory, "must be a number with K, M, G or T, like 64G (none: megabytes)"
        )
    if launch.time is not None:
        limit = seconds(launch.time)
        if not limit:
            raise ConfigError("launch.time", launch.time, "must be minutes, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS")
        if launch.signal_seconds >= limit:
            raise ConfigError(
                "launch.signal_seconds", launch.signal_seconds, f"must be less than launch.time = {limit} s"
            )
    for key, text in {**{k: getattr(launch, k) for k in ("partition", "account", "qos", "constraint", "exclude", "python")},
                      **{f"sbatch.{k}": v for k, v in launch.sbatch.items()}}.items():  # fmt: skip
        if text is not None and (not text or "\n" in text):
            raise ConfigError(f"launch.{key}", text, "must be one line of text")
    for key in launch.sbatch:
        name = key.replace("_", "-")
        if name in TAKEN or not re.fullmatch(r"[a-z][a-z-]*", name):
            raise ConfigError(
                f"launch.sbatch.{key}", launch.sbatch[key], "is set by launch itself or is no long option of sbatch"
            )
    if cfg.cancel and cfg.name is None:
        raise ConfigError("cancel", True, "needs name=, the sweep whose jobs are to be cancelled")


def host(cfg: Train) -> tuple[dict[str, Any], int]:
    """(what probing a node would show, cores), from launch.* alone: a login node has no GPU and no say.

    The other things that a probe shows are checked in the job, by the ranks.
    """
    nodes = cfg.launch.nodes
    gpus = cfg.launch.gpus_per_node or 0
    count = gpus * (nodes or max(1, -(-(cfg.nproc or gpus) // gpus))) if gpus else 0
    return {"gpus": [{}] * count, "gpu_error": "launch.gpus_per_node is null"}, 2**16


def shape(cfg: Train) -> Shape:
    """Nodes, GPUs and ranks of a resolved point. Raises ConfigError when nproc does not spread evenly."""
    launch = cfg.launch
    assert cfg.nproc is not None
    nodes = launch.nodes or (
        -(-cfg.nproc // launch.gpus_per_node) if cfg.device == "cuda" and launch.gpus_per_node else 1
    )
    if cfg.nproc % nodes:
        raise ConfigError(
            "nproc", cfg.nproc, f"must be a multiple of the nodes ({nodes}): every node runs as many ranks"
        )
    ranks = cfg.nproc // nodes
    if cfg.device == "cuda" and launch.gpus_per_node and ranks > launch.gpus_per_node:
        raise ConfigError(
            "nproc",
            cfg.nproc,
            f"needs {ranks} GPUs on each of {nodes} nodes, launch.gpus_per_node={launch.gpus_per_node}",
        )
    return Shape(nodes, ranks if cfg.device == "cuda" else 0)


def impossible(cfg: Train) -> Optional[str]:
    """Why a resolved point can't be spread over the nodes, or None."""
    try:
        shape(cfg)
    except ConfigError as e:
        return str(e)
    return None
