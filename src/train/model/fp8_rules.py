"""What precision=fp8 asks of a configuration and of GPUs, without torch. The arithmetic is in model/fp8.py."""

from typing import Any

from train.config import ConfigError, Train

SCALINGS = ("tensorwise", "rowwise")
MULTIPLE = 16  # what cuBLASLt asks of every width of an fp8 matmul, and the sum over tokens of dw is one: 16 bytes
CAPABILITY = (8, 9)  # fp8 tensor cores: Ada; Hopper has 9.0


def values(cfg: Train) -> None:
    """precision.scaling by itself. Raises ConfigError."""
    value = cfg.precision.scaling
    if value not in (None, *SCALINGS):
        raise ConfigError("precision.scaling", value, f"must be one of {', '.join(SCALINGS)}, or null without fp8")


def combination(cfg: Train, degrees: dict[str, int]) -> None:
    """Keys that don't go with fp8 on a mesh of these degrees. Raises ConfigError."""
    p, m = cfg.precision, cfg.model
    if p.name != "fp8":
        if p.scaling is not None:
            raise ConfigError("precision.scaling", p.scaling, f"goes with precision=fp8 only; here it is {p.name}")
        return
    if p.scaling is None:
        raise ConfigError("precision.scaling", None, f"precision=fp8 needs one of {', '.join(SCALINGS)}")
    if m.experts:
        why = f"model={m.name} has experts, whose grouped matmuls have no fp8 path here; use bf16"
        raise ConfigError("precision", "fp8", why)
    if cfg.parallelism.async_tp:
        raise ConfigError("parallelism.async_tp", True, "splits bf16 matmuls; with precision=fp8 it must be false")
    tp = degrees["tp"]
    for key, width, shared in (
        ("model.dim", m.dim, 1),
        ("model.heads", m.heads * m.head_dim, tp),
        ("model.kv_heads", m.kv_heads * m.head_dim, tp),
        ("model.ffn", m.ffn, tp),
    ):
        if width // shared % MULTIPLE:
            what = f" x model.head_dim {m.head_dim}" if key.endswith("heads") else ""
            per = f" / tp {tp}" if shared > 1 else ""
            shown = f"{what}{per} = {width // shared} ".lstrip() if what or per else ""
            raise ConfigError(key, getattr(m, key[6:]), _why(shown))
    tokens = cfg.micro_batch * cfg.seq_len // degrees["cp"]  # between the matrices of a layer tp ranks have all of them
    if tokens % MULTIPLE:
        per = f"/ cp {degrees['cp']} " if degrees["cp"] > 1 else ""
        raise ConfigError("micro_batch", cfg.micro_batch, _why(f"x seq_len {per}= {tokens} tokens "))


def _why(product: str) -> str:
    return f"{product}must be a multiple of {MULTIPLE} with precision=fp8"


def impossible(cfg: Train, host: dict[str, Any]) -> str | None:
    """Why a resolved point can't run on the GPUs that `host` shows (launch/probe.py), or None."""
    if cfg.precision.name != "fp8" or cfg.device != "cuda":
        return None
    for gpu in host.get("gpus", []):
        capability = tuple(gpu.get("capability", CAPABILITY))  # unknown on a login node: there the ranks try it
        if capability < CAPABILITY:
            shown, need = (".".join(map(str, c)) for c in (capability, CAPABILITY))
            return str(ConfigError("precision", "fp8", f"needs GPU capability {need}; {gpu['name']} has {shown}"))
    return None
