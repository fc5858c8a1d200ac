"""The mesh of ranks: its dimensions' degrees, resolved and checked here alone, without torch.

Ranks are laid out [pp, dp_replicate, dp_shard, cp, tp], tp innermost: the ranks that talk most are neighbours, on one node
where it has enough GPUs. Experts have a mesh of their own over the same ranks: dp_shard x cp x tp = expert_shard x ep, ep
innermost.
"""

import math
from collections.abc import Iterable

from train.config import ConfigError, Train

DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
ZERO2 = ("zero2", "zero2o", "zero2rs")
OPEN = -1
MAX_AUTO_EP = 8  # GPUs of the usual node: beyond, every token crosses the network


def values(cfg: Train) -> None:
    """Every degree by itself. Raises ConfigError."""
    for name in (*DIMS, "ep"):
        _degree(cfg, name)


def _degree(cfg: Train, name: str) -> int:
    value = getattr(cfg.parallelism, name)
    if value == "auto":
        return OPEN
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 and value != OPEN or value > 2**16:
        raise ConfigError(f"parallelism.{name}", value, "must be a degree between 1 and 65536, or auto (-1)")
    return value


def resolve(cfg: Train, nproc: int) -> dict[str, int]:
    """Every degree by its name, `DIMS` and ep; those of DIMS multiply to nproc.

    Raises ConfigError for degrees that don't multiply to nproc or that the reduction can't have.
    """
    want = {name: _degree(cfg, name) for name in DIMS}
    got = dict(want)
    open_ = [name for name in ("pp", "cp", "tp") if want[name] == OPEN]
    if len(open_) > 1:
        raise ConfigError(f"parallelism.{open_[1]}", OPEN, f"{open_[0]} is auto too; give all but one of pp, cp and tp")
    if open_:
        got |= {name: 1 for name in ("dp_replicate", "dp_shard") if want[name] == OPEN}
        got[open_[0]] = max(1, nproc // math.prod(got[name] for name in DIMS if name != open_[0]))
    left = nproc // math.prod(got[name] for name in ("pp", "cp", "tp"))
    got |= _data(cfg, want if not open_ else got, left)
    if math.prod(got.values()) != nproc:
        _refuse_product(want, nproc)
    _check_reduction(cfg, got)
    return got | {"ep": _experts(cfg, got)}


def _data(cfg: Train, want: dict[str, int], left: int) -> dict[str, int]:
    """The data-parallel degrees of `left` ranks; what doesn't multiply is left to the caller."""
    reduction, rounds = cfg.reduction.name, cfg.round.name != "none"  # islands, whatever the reduction inside them
    replicate, shard = want["dp_replicate"], want["dp_shard"]
    if not rounds and reduction == "ddp" and shard not in (1, OPEN):
        raise ConfigError("parallelism.dp_shard", shard, "ddp shards nothing; it must be 1 or -1")
    if not rounds and reduction in ZERO2 and replicate not in (1, OPEN):
        raise ConfigError("parallelism.dp_replicate", replicate, f"{reduction} keeps one copy; it must be 1 or -1")
    if not rounds and reduction == "ddp":
        shard = 1
    elif not rounds and (reduction in ZERO2 or replicate == shard == OPEN):
        replicate = 1
    if replicate == OPEN:
        replicate = left // max(1, shard)
    if shard == OPEN:
        shard = left // replicate if replicate else 0
    return {"dp_replicate": replicate, "dp_shard": shard}


def _refuse_product(want: dict[str, int], nproc: int) -> None:
    given = {k: v for k, v in want.items() if v not in (OPEN, 1)} or {k: v for k, v in want.items() if v != OPEN}
    shown = " x ".join(f"{k} {v}" for k, v in given.items())
    key = next(iter(given))
    raise ConfigError(f"parallelism.{key}", want[key], f"{shown} must multiply to nproc={nproc}")


def _check_reduction(cfg: Train, got: dict[str, int]) -> None:
    reduction = cfg.reduction.name
    for name in ("pp", "cp"):
        if got[name] > 1:
            raise ConfigError(f"parallelism.{name}", got[name], "is not built yet; must be 1")
    refused = ("pp", "cp", "tp") if cfg.round.name != "none" else ("pp", "tp") if reduction in ZERO2 else ()
    who = f"round={cfg.round.name} goes with data parallel only" if cfg.round.name != "none" else (
        f"{reduction} goes with cp only; ddp and fsdp go with tp, pp, cp and ep"
    )  # fmt: skip
    for name in refused:
        if got[name] > 1:
            raise ConfigError(f"parallelism.{name}", got[name], who)


def _experts(cfg: Train, got: dict[str, int]) -> int:
    """ep: given, or the largest degree up to MAX_AUTO_EP that divides the island and the experts and is a multiple of cp."""
    want, island = _degree(cfg, "ep"), got["dp_shard"] * got["cp"] * got["tp"]
    experts = cfg.model.experts
    if not experts:
        if want > 1:
            raise ConfigError("parallelism.ep", want, f"model={cfg.model.name} has no experts; it must be 1 or auto")
        return 1
    if cfg.round.name != "none":
        if want > 1:
            raise ConfigError("parallelism.ep", want, f"round={cfg.round.name} goes with data parallel only; it must be 1")
        return 1
    fits = [d for d in range(1, island + 1) if island % d == 0 and experts % d == 0]
    if want == OPEN:
        return max((d for d in fits if d <= MAX_AUTO_EP and d % got["cp"] == 0), default=1)
    if want not in fits:
        why = f"must divide dp_shard x cp x tp = {island} and model.experts={experts} (valid: {_list(fits)})"
        raise ConfigError("parallelism.ep", want, why)
    if want > 1 and cfg.reduction.name in ZERO2:
        raise ConfigError("parallelism.ep", want, f"{cfg.reduction.name} goes with cp only; ddp and fsdp go with ep")
    return want


def data_ranks(degrees: dict[str, int]) -> int:
    """Ranks, or groups of ranks, that have rows of their own."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def check_model(cfg: Train, degrees: dict[str, int]) -> None:
    """Whether the model's shape and the sequence can be cut that way. Raises ConfigError."""
    m, tp, cp = cfg.model, degrees["tp"], degrees["cp"]
    for key in ("heads", "kv_heads", "ffn", "vocab"):
        size = getattr(m, key)
        if size % tp:
            common = math.gcd(m.heads, m.kv_heads, m.ffn, m.vocab)
            valid = _list(d for d in range(1, common + 1) if common % d == 0)
            raise ConfigError("parallelism.tp", tp, f"must divide model.{key}={size} (valid: {valid})")
    if cfg.memory.optimizer_offload == "full":
        for name in ("tp", "ep") if cfg.reduction.name == "ddp" else ("tp",):
            if degrees[name] > 1:
                why = "hands gradients to the host as backward makes them, before other ranks' parts are added up; must be 1"
                raise ConfigError(f"parallelism.{name}", degrees[name], f"memory.optimizer_offload=full {why}")
    if cfg.seq_len % (cp * tp):
        low = cfg.seq_len // (cp * tp) * cp * tp
        near = f"{low}, {low + cp * tp}" if low else f"{cp * tp}"
        raise ConfigError("seq_len", cfg.seq_len, f"must be a multiple of cp x tp = {cp * tp} (nearest: {near})")


def _list(degrees: Iterable[int]) -> str:
    return ", ".join(str(d) for d in degrees)
