"""The degrees of data parallelism: resolved and checked here alone, without torch.

Ranks are laid out [dp_replicate, dp_shard], dp_shard innermost, so that the ranks that share one copy of the state (and talk
most) are neighbours, on one node where it has enough GPUs.
"""

from train.config import ConfigError, Train

ZERO2 = ("zero2", "zero2o", "zero2rs")


def resolve(cfg: Train, nproc: int) -> dict[str, int]:
    """{"dp_replicate": r, "dp_shard": s} with r * s == nproc; -1 in the configuration stands for what is left of nproc.

    Raises ConfigError for degrees that don't multiply to nproc or that the reduction can't have.
    """
    p, reduction = cfg.parallelism, cfg.reduction.name
    for key, value in (("dp_replicate", p.dp_replicate), ("dp_shard", p.dp_shard)):
        if value < 1 and value != -1:
            raise ConfigError(
                f"parallelism.{key}", value, "must be a degree of at least 1, or -1 for what is left of nproc"
            )
    rounds = cfg.round.name != "none"  # dp_replicate islands of dp_shard ranks, whatever the reduction inside them
    if not rounds and reduction == "ddp" and p.dp_shard not in (1, -1):
        raise ConfigError("parallelism.dp_shard", p.dp_shard, "ddp shards nothing; it must be 1 or -1")
    if not rounds and reduction in ZERO2 and p.dp_replicate not in (1, -1):
        raise ConfigError("parallelism.dp_replicate", p.dp_replicate, f"{reduction} keeps one copy; it must be 1 or -1")
    if not rounds and reduction == "ddp":
        replicate, shard = _rest(p.dp_replicate, nproc), 1
    elif not rounds and (reduction in ZERO2 or p.dp_replicate == p.dp_shard == -1):
        replicate, shard = 1, _rest(p.dp_shard, nproc)
    else:
        replicate = _rest(p.dp_replicate, nproc // max(1, p.dp_shard))
        shard = _rest(p.dp_shard, nproc // replicate if replicate else 0)
    if replicate * shard != nproc:
        shown = " x ".join(
            f"{key} {value}"
            for key, value in (("dp_replicate", p.dp_replicate), ("dp_shard", p.dp_shard))
            if value != -1
        )
        key = "dp_replicate" if p.dp_replicate != -1 else "dp_shard"
        raise ConfigError(f"parallelism.{key}", getattr(p, key), f"{shown} must multiply to nproc={nproc}")
    return {"dp_replicate": replicate, "dp_shard": shard}


def _rest(degree: int, left: int) -> int:
    return left if degree == -1 else degree
