"""What memory.* and the optimizer's memory keys must satisfy before anything starts, without torch."""

from typing import Optional

import psutil

from train.config import ConfigError, Train
from train.measure.flops import param_count

CHOICES: dict[str, tuple[str, ...]] = {
    "memory.recompute": ("none", "full", "selective", "budget"),
    "memory.optimizer_offload": ("none", "optimizer", "full"),
    "memory.lm_head_kernel": ("own", "torch"),
    "optim.name": ("adamw", "sign_sgd"),
}
DTYPES = ("fp32", "bf16")
RANGES: dict[str, tuple[float, float]] = {
    "memory.every": (1, 10**5),
    "memory.budget": (0, 1),
    "memory.max_inflight_activations": (1, 10**4),
    "memory.lm_head_chunk": (1, 2**24),
}


def values(cfg: Train) -> None:
    """What CHOICES and RANGES, which sweep/validate.py checks, can't say. Raises ConfigError."""
    for key in ("state_dtype", "grad_dtype"):
        value = getattr(cfg.optim, key)
        if value not in (None, *DTYPES):
            raise ConfigError(f"optim.{key}", value, "must be fp32, bf16 or null")
    for target in cfg.memory.targets or ():
        space, _, name = target.partition("::")
        if not space.isidentifier() or "::" in target and not name:
            raise ConfigError("memory.targets", target, "must be an operator such as aten::mm or a namespace")


def combination(cfg: Train, nproc: int) -> None:
    """Keys that don't go together. Raises ConfigError. `cfg.device` and cfg.precision are resolved."""
    m, o = cfg.memory, cfg.optim
    for key, unset, modes in (
        ("every", 1, ("full", "selective")),
        ("targets", None, ("selective",)),
        ("budget", None, ("budget",)),
    ):
        if getattr(m, key) != unset and m.recompute not in modes:
            raise ConfigError(f"memory.{key}", getattr(m, key), f"goes with memory.recompute={'|'.join(modes)} only")
    if m.recompute == "budget" and m.budget is None:
        raise ConfigError("memory.budget", None, "memory.recompute=budget needs a share between 0 and 1")
    if m.recompute == "budget" and cfg.compile.name == "none":
        raise ConfigError("memory.recompute", "budget", "torch's partitioner spends it; needs compile=layer")
    if m.lm_head_kernel == "torch" and m.lm_head_chunk is None:
        raise ConfigError("memory.lm_head_kernel", "torch", "needs memory.lm_head_chunk")
    if m.optimizer_offload == "full" and o.clip_norm is not None:
        why = "memory.optimizer_offload=full updates before the gradient's norm is known; set optim.clip_norm=null"
        raise ConfigError("optim.clip_norm", o.clip_norm, why)
    if m.optimizer_offload == "full" and o.state_dtype == "bf16":
        raise ConfigError("optim.state_dtype", "bf16", "memory.optimizer_offload=full keeps fp32 state on the host")
    if o.name == "sign_sgd" and m.optimizer_offload == "optimizer":
        raise ConfigError("memory.optimizer_offload", "optimizer", "optim=sign_sgd has no state to move")
    if o.name == "sign_sgd" and o.state_dtype is not None:
        raise ConfigError("optim.state_dtype", o.state_dtype, "optim=sign_sgd has no state")
    _grad_dtype(cfg, nproc)
    if m.snapshot and cfg.device == "cpu":
        raise ConfigError("memory.snapshot", True, "torch records allocations of GPUs only; needs device=cuda")


def _grad_dtype(cfg: Train, nproc: int) -> None:
    wanted, precision = cfg.optim.grad_dtype, cfg.precision.weights
    if wanted is None or wanted == precision:
        return
    if precision != "bf16":
        raise ConfigError("optim.grad_dtype", wanted, f"precision={precision} has gradients of its own dtype")
    if cfg.reduction.name == "ddp" and nproc > 1:
        raise ConfigError("optim.grad_dtype", wanted, "reduction=ddp reduces in the weights' dtype, bf16")


def layout(cfg: Train, degrees: dict[str, int]) -> None:
    """Levers that a mesh of these degrees can't have. Raises ConfigError."""
    m, tp = cfg.memory, degrees["tp"]
    if tp > 1 and m.lm_head_kernel == "torch":
        raise ConfigError("memory.lm_head_kernel", "torch", f"takes the whole vocabulary; with tp={tp} it must be own")


def too_large(cfg: Train) -> Optional[str]:
    """Why CPU ranks on this host can't hold a resolved point, or None. A lower bound: weights and gradients of one copy of the
    model, fp32 or bf16 with masters, whatever the ranks share; a point that needs more may still run out of memory."""
    if cfg.device != "cpu":
        return None
    need, have = 8 * param_count(cfg.model), psutil.virtual_memory().total
    if need <= have:
        return None
    why = f"needs {need / 2**30:.0f} GiB of this host's memory for weights and gradients alone; it has {have / 2**30:.0f} GiB"
    return str(ConfigError("model", cfg.model.name, why))
