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
RING_KERNELS = ("flash", "math")  # whose results of blocks parallelism.cp_method=ring merges
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
    want: dict[str, int] = {name: _degree(cfg, name) for name in DIMS}
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
    key = next((k for k in given if k.startswith("dp_")), next(iter(given)))
    must = "divide" if len(given) == 1 and nproc % given[key] else "multiply to"
    raise ConfigError(f"parallelism.{key}", want[key], f"{shown} must {must} nproc={nproc}")


def _check_reduction(cfg: Train, got: dict[str, int]) -> None:
    reduction = cfg.reduction.name
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
            raise ConfigError(
                "parallelism.ep", want, f"round={cfg.round.name} goes with data parallel only; it must be 1"
            )
        return 1
    fits = [d for d in range(1, island + 1) if island % d == 0 and experts % d == 0]
    if cfg.reduction.name in ZERO2:
        if want > 1:
            raise ConfigError(
                "parallelism.ep", want, f"{cfg.reduction.name} goes with cp only; ddp and fsdp go with ep"
            )
        return 1
    if want == OPEN:
        return max((d for d in fits if d <= MAX_AUTO_EP and d % got["cp"] == 0), default=1)
    if want not in fits:
        why = f"must divide dp_shard x cp x tp = {island} and model.experts={experts} (valid: {_list(fits)})"
        raise ConfigError("parallelism.ep", want, why)
    return want


def data_ranks(degrees: dict[str, int]) -> int:
    """Ranks, or groups of ranks, that have rows of their own."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def sequence_pieces(method: str, cp: int, index: int) -> tuple[int, tuple[int, ...]]:
    """(equal pieces that a sequence is cut into, those of them that cp rank `index` has, in order)."""
    return (cp, (index,)) if method == "ulysses" or cp == 1 else (2 * cp, (index, 2 * cp - 1 - index))


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
    if cfg.parallelism.async_tp:
        _check_async_tp(cfg, tp)
    _check_reshard(cfg, degrees)
    exchange = next((name for name in ("cp", "ep") if degrees[name] > 1), None)
    if exchange and cfg.memory.recompute == "selective" and cfg.compile.name != "none":
        why = f"torch can't keep parts of a layer that {exchange} has compiled in pieces; use full, or compile=none"
        raise ConfigError("memory.recompute", cfg.memory.recompute, why)
    if cp > 1 and cfg.parallelism.cp_method == "ulysses":
        _check_ulysses(m.heads // tp, m.kv_heads // tp, degrees)
    ring = cp > 1 and cfg.parallelism.cp_method == "ring"
    if ring and cfg.attention.name not in ("auto", *RING_KERNELS):
        raise ConfigError("attention", cfg.attention.name, f"cp_method=ring goes with {' or '.join(RING_KERNELS)}")
    unit = cp * tp * (2 if ring else 1)  # its ranks have two pieces of the sequence each
    if cfg.seq_len % unit:
        low = cfg.seq_len // unit * unit
        near = f"{low}, {low + unit}" if low else f"{unit}"
        what = "2 x cp x tp (cp_method=ring)" if ring else "cp x tp"
        raise ConfigError("seq_len", cfg.seq_len, f"must be a multiple of {what} = {unit} (nearest: {near})")


def _check_reshard(cfg: Train, degrees: dict[str, int]) -> None:
    """reshard_after_forward as a number: torch makes meshes of that size from one mesh of all ranks. Raises ConfigError."""
    keep, shards = cfg.reduction.reshard_after_forward, degrees["dp_shard"] * degrees["cp"]
    if keep is None or isinstance(keep, bool):
        return
    if degrees["tp"] * degrees["ep"] > 1 or cfg.round.name != "none":
        why = "a number goes with tp=1, ep=1 and round=none, where all ranks are one mesh; else true or false"
        raise ConfigError("reduction.reshard_after_forward", keep, why)
    if keep < 2 or keep >= shards or shards % keep:
        few = _list(d for d in range(2, shards) if shards % d == 0) or "none"
        why = f"must be true, false or a divisor between 1 and dp_shard x cp = {shards} (valid: {few})"
        raise ConfigError("reduction.reshard_after_forward", keep, why)


def _check_async_tp(cfg: Train, tp: int) -> None:
    """`cfg.device` is resolved. Raises ConfigError."""
    for wrong, why in (
        (tp == 1, "needs parallelism.tp above 1"),
        (cfg.compile.name == "none", "Inductor does it; needs compile=layer"),
        (cfg.device == "cpu", "needs GPUs, which read each other's memory; here is device=cpu"),
    ):
        if wrong:
            raise ConfigError("parallelism.async_tp", True, why)


def _check_ulysses(heads: int, kv_heads: int, degrees: dict[str, int]) -> None:
    """Whether cp ranks can share the heads of one tp rank. Raises ConfigError."""
    cp, per = degrees["cp"], f" / tp {degrees['tp']}" if degrees["tp"] > 1 else ""
    fits = [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)]
    hint = f"(valid: {_list(fits)}; or parallelism.cp_method=ring)"
    if heads % cp:
        raise ConfigError("parallelism.cp", cp, f"must divide model.heads{per} = {heads} {hint}")
    if cp not in fits:
        why = f"must divide model.kv_heads{per} = {kv_heads} or be a multiple of them {hint}"
        raise ConfigError("parallelism.cp", cp, why)


def _list(degrees: Iterable[int]) -> str:
    return ", ".join(str(d) for d in degrees)
