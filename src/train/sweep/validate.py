"""What a point must satisfy before anything starts, without torch.

`values` raises ConfigError for a key that is wrong by itself: bad input, the command ends. `combination` returns why keys
that are each fine can't be combined: the point is `invalid`, the others run.
"""

import itertools
import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Optional

from train import faults, names
from train.config import ConfigError, Data, Train
from train.data import corpus
from train.kernels import names as kernels
from train.launch import environment
from train.memory import rules as memory_rules
from train.model import fp8_rules, moe_rules
from train.names import nearest
from train.parallel import graph_rules, mesh, stages

CHOICES = {
    "device": ("auto", "cuda", "cpu"),
    "compile.name": ("none", "layer"),
    "precision.name": ("auto", "bf16", "fp8", "fp32", "fp64"),
    "reduction.name": ("ddp", "zero2", "zero2o", "zero2rs", "fsdp"),
    "parallelism.cp_method": ("ulysses", "ring"),
    "round.name": ("none", "delta"),
    "attention.name": ("auto", "flash", "cudnn", "efficient", "math"),
    **memory_rules.CHOICES,
    **moe_rules.CHOICES,
}
#: key → (lowest, highest); the upper ends catch typos before they cost an hour
RANGES: dict[str, tuple[float, float]] = {
    "micro_batch": (1, 2**20),
    "grad_accum": (1, 2**20),
    "global_batch": (1, 2**30),
    "seq_len": (1, 2**24),
    "steps": (1, 10**7),
    "seed": (0, 2**63 - 1),
    "nproc": (1, 2**16),
    "repeats": (1, 1000),
    "timeout": (0.1, 10**7),
    "retries": (0, 10**6),
    "max_failures": (1, 10**6),
    "model.dim": (1, 2**20),
    "model.layers": (1, 10**5),
    "model.heads": (1, 2**16),
    "model.kv_heads": (1, 2**16),
    "model.head_dim": (2, 2**14),
    "model.ffn": (0, 2**22),
    "model.vocab": (1, 2**26),
    "model.norm_eps": (0, 1),
    "model.rope_theta": (1, 10**12),
    "model.rope_scaling.factor": (1, 10**4),
    "model.rope_scaling.low_freq_factor": (0.001, 10**4),
    "model.rope_scaling.high_freq_factor": (0.001, 10**4),
    "model.rope_scaling.original_max_position": (1, 10**9),
    "reduction.bucket_mib": (0.001, 2**16),
    "optim.lr": (0, 1e3),
    "optim.warmup_steps": (0, 10**9),
    "optim.beta1": (0, 0.999999999),
    "optim.beta2": (0, 0.999999999),
    "optim.eps": (0, 1),
    "optim.weight_decay": (0, 1e3),
    "optim.clip_norm": (1e-12, 1e12),
    "reduction.prefetch": (1, 10**5),
    "budget.hours": (1e-5, 10**5),
    "hardware.peak_tflops": (0.001, 1e6),
    "round.inner_steps": (1, 10**7),
    "round.topk": (1e-6, 1),
    "round.outer_lr": (0, 1e3),
    "round.outer_momentum": (0, 0.999999999),
    "checkpoint.every": (1, 10**7),
    "checkpoint.keep": (1, 10**6),
    "launch.first_step_timeout": (1, 10**7),
    "launch.hang_seconds": (1, 10**7),
    **memory_rules.RANGES,
    **moe_rules.RANGES,
}


def get(cfg: Train, key: str) -> object:
    """The value at a dotted key."""
    value: object = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def values(cfg: Train) -> None:
    """Check every key by itself. Raises ConfigError for the first one that is wrong."""
    for key, valid in CHOICES.items():
        value = get(cfg, key)
        if value not in valid:
            raise ConfigError(key, value, f"must be one of {', '.join(valid)}{nearest(str(value), list(valid))}")
    for key, (low, high) in RANGES.items():
        value = get(cfg, key)
        if value is None:
            continue
        assert isinstance(value, (int, float))
        if not math.isfinite(value) or not low <= value <= high:
            raise ConfigError(key, value, f"must be {accepts(key)}")
    scaling = cfg.model.rope_scaling
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            "model.rope_scaling.high_freq_factor", scaling.high_freq_factor,
            f"must be above model.rope_scaling.low_freq_factor={scaling.low_freq_factor:g}",
        )  # fmt: skip
    mesh.values(cfg)
    stages.values(cfg)
    memory_rules.values(cfg)
    fp8_rules.values(cfg)
    kernels.values(cfg)
    faults.parse(cfg.fault)
    if cfg.code not in (None, "new"):
        raise ConfigError("code", cfg.code, "must be `new` or left out")
    if cfg.reduction.accumulate not in (None, "once", "every"):
        raise ConfigError("reduction.accumulate", cfg.reduction.accumulate, "must be once or every")
    if cfg.reduction.transport not in (None, "collective", "peer"):
        raise ConfigError("reduction.transport", cfg.reduction.transport, "must be collective or peer")
    if cfg.round.bits not in (32, 8, 4):
        raise ConfigError("round.bits", cfg.round.bits, "must be 32, 8 or 4")
    for key in ("env", "nccl.env"):
        for name, value in dict(get(cfg, key)).items():  # type: ignore[call-overload]
            if environment.LAUNCHER.fullmatch(name):
                raise ConfigError(f"{key}.{name}", value, "is set for each rank by the launcher")
            if "=" in name or "\0" in f"{name}{value}" or not name:
                raise ConfigError(f"{key}.{name}", value, "is not an environment variable")
            if name in ALLOCATOR_NAMES:
                allocator(f"{key}.{name}", value)
    for name in ALLOCATOR_NAMES:
        allocator(name, environment.USER.get(name, ""))
    if cfg.name is not None:
        _check_name(cfg.name)
    if not cfg.out or "\0" in cfg.out:
        raise ConfigError("out", cfg.out, "must be a folder")
    _readable(cfg.data.path, cfg.data.tokenizer)


@cache
def _readable(path: Optional[str], tokenizer: Optional[str]) -> None:
    """Raises ConfigError for a text or tokenizer that can't be read; once for all points that share it."""
    if path == "":
        raise ConfigError("data.path", path, "must be a UTF-8 file, a folder or a glob, or null")
    data = Data(path=path, tokenizer=tokenizer)
    for file in corpus.files(data):
        if not os.access(file, os.R_OK):
            raise ConfigError("data.path", path, f"{file} can't be read: Permission denied")
    if tokenizer is not None:
        corpus.load_tokenizer(data)


def accepts(key: str) -> str:
    """What a key's value may be, in words: `an integer between 1 and 1048576`."""
    hint = names.hints()[key]
    null = " or null" if names.optional(hint) else ""
    if key in CHOICES:
        return f"one of {', '.join(CHOICES[key])}"
    if key in RANGES:
        shown = [f"{int(v)}" if names.plain(hint) is int else f"{v:g}" for v in RANGES[key]]
        return f"{names.words(hint)} between {shown[0]} and {shown[1]}{null}"
    return names.words(hint) + null


#: `name:value` pairs, as torch's allocator reads them; a value may be a list
ALLOCATOR = re.compile(r"[a-z_0-9]+:(\[[^]]*\]|[^,:\[\]]+)(,[a-z_0-9]+:(\[[^]]*\]|[^,:\[\]]+))*")
ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator(key: str, value: str) -> None:
    """Raises ConfigError for an allocator variable that torch would refuse with an assertion once it allocates."""
    if value and not ALLOCATOR.fullmatch(re.sub(r"\s", "", value)):
        raise ConfigError(key, value, "must be name:value pairs joined by commas, as in expandable_segments:True")


def visible_gpus(seen: int) -> None:
    """Raises ConfigError when CUDA_VISIBLE_DEVICES names a GPU that is not among the `seen` ones: CUDA drops it silently.

    Without any GPU on the host the variable means nothing: images for GPUs set it everywhere.
    """
    value = environment.USER.get("CUDA_VISIBLE_DEVICES")
    asked = list(itertools.takewhile(lambda v: v not in ("", "-1"), (value or "").replace(" ", "").split(",")))
    if len(asked) > seen and (seen or gpus_of_driver()):
        raise ConfigError("CUDA_VISIBLE_DEVICES", value, f"names {len(asked)} GPUs, {seen} of them can be used here")


def gpus_of_driver() -> int:
    """How many GPUs NVIDIA's kernel driver has, visible to this process or not."""
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _check_name(name: str) -> None:
    if (
        not name
        or name in (".", "..")
        or "/" in name
        or "\0" in name
        or name.startswith(".")
        or len(name.encode()) > 200
    ):
        raise ConfigError("name", name, "must be a folder name: no /, no leading dot, at most 200 bytes")


def batch(cfg: Train, data_ranks: int) -> tuple[int, int]:
    """(grad_accum, global_batch in rows) for `data_ranks` ranks with rows of their own. Raises ConfigError."""
    unit = cfg.micro_batch * data_ranks
    if cfg.global_batch is None:
        accum = cfg.grad_accum or 1
        return accum, accum * unit
    if cfg.global_batch % unit:
        low = max(unit, cfg.global_batch // unit * unit)
        raise ConfigError(
            "global_batch",
            cfg.global_batch,
            f"must be a multiple of micro_batch x data-parallel ranks = {cfg.micro_batch} x {data_ranks}"
            f" (nearest: {low}, {low + unit})",
        )
    accum = cfg.global_batch // unit
    if cfg.grad_accum not in (None, accum):
        raise ConfigError(
            "grad_accum", cfg.grad_accum, f"with global_batch={cfg.global_batch} it is {accum}; give one of them"
        )
    return accum, cfg.global_batch


def transport(cfg: Train, degrees: dict[str, int]) -> None:
    """Raises ConfigError where reduction.transport=peer can't be had."""
    if cfg.reduction.transport != "peer":
        return
    for refused, why in (
        (cfg.reduction.name not in ("zero2", "zero2o"), f"reduction={cfg.reduction.name}"),
        (cfg.device != "cuda", f"device={cfg.device}"),
        (mesh.data_ranks(degrees) * degrees["cp"] == 1, "one rank alone"),
        (cfg.round.name != "none", f"round={cfg.round.name}"),
        (cfg.optim.grad_dtype is not None, f"optim.grad_dtype={cfg.optim.grad_dtype}"),
    ):
        if refused:
            what = "copies zero2's and zero2o's gradients in the weights' dtype between GPUs of a node"
            raise ConfigError("reduction.transport", "peer", f"{what}, here {why}; set it to collective")


def combination(cfg: Train, nproc: int) -> Optional[str]:
    """Why this point can't exist, or None. `cfg.device` is resolved."""
    try:
        m = cfg.model
        if m.heads % m.kv_heads:
            raise ConfigError("model.kv_heads", m.kv_heads, f"must divide model.heads={m.heads}")
        if m.head_dim % 2:
            raise ConfigError("model.head_dim", m.head_dim, "must be even (rotary embedding)")
        if cfg.data.name == "text" and (need := corpus.vocab_size(cfg.data)) > m.vocab:
            raise ConfigError("model.vocab", m.vocab, f"must be at least {need}, the ids that the text uses")
        for key, users in (
            ("bucket_mib", ("ddp", "zero2", "zero2o", "zero2rs")),
            ("accumulate", ("zero2", "zero2o", "zero2rs", "fsdp")),
            ("reshard_after_forward", ("fsdp",)),
            ("prefetch", ("fsdp",)),
        ):
            if getattr(cfg.reduction, key) is not None and cfg.reduction.name not in users:
                raise ConfigError(
                    f"reduction.{key}", getattr(cfg.reduction, key), f"goes with reduction={'|'.join(users)} only"
                )
        if cfg.device == "cuda" and cfg.precision.name == "fp64" and cfg.attention.name not in ("auto", "math"):
            raise ConfigError("attention", cfg.attention.name, "precision=fp64 needs attention=math or auto")
        memory_rules.combination(cfg, nproc)
        moe_rules.combination(cfg)
        graph_rules.combination(cfg, nproc)
        if cfg.round.name != "none" and cfg.steps % cfg.round.inner_steps:
            raise ConfigError("steps", cfg.steps, f"must be a multiple of round.inner_steps={cfg.round.inner_steps}")
        if cfg.replay and cfg.checkpoint.every is not None:
            raise ConfigError("replay", True, "all passes start at step 0: leave checkpoint.every out")
        if cfg.replay and cfg.profile:
            raise ConfigError("profile", True, "would record the second pass of replay=true too; use one of them")
        faults.check(cfg.fault, nproc, cfg.steps)
        degrees = mesh.resolve(cfg, nproc)
        mesh.check_model(cfg, degrees)
        transport(cfg, degrees)
        fp8_rules.combination(cfg, degrees)
        memory_rules.layout(cfg, degrees)
        kernels.combination(cfg, degrees)
        stages.plan(cfg, degrees["pp"], batch(cfg, mesh.data_ranks(degrees))[0])
    except ConfigError as e:
        return str(e)
    return None
