"""What the keys of a mixture of experts must satisfy before anything starts, without torch."""

from importlib.util import find_spec

from train.config import ConfigError, Train

CHOICES: dict[str, tuple[str, ...]] = {
    "model.router_score": ("softmax", "sigmoid"),
    "model.balance": ("none", "aux_loss", "aux_loss_free"),
    "parallelism.dispatch": ("torch", "deepep"),
}
RANGES: dict[str, tuple[float, float]] = {
    "model.experts": (0, 2**16),
    "model.experts_per_token": (0, 2**10),
    "model.expert_ffn": (0, 2**22),
    "model.balance_coef": (0, 10),
}


def combination(cfg: Train) -> None:
    """Keys that don't go together. Raises ConfigError. The degrees are checked by parallel/mesh.py."""
    m = cfg.model
    if not m.experts:
        if not m.ffn:
            raise ConfigError("model.ffn", m.ffn, "must be at least 1 in a model without experts")
        for key, unset in (("experts_per_token", 0), ("expert_ffn", 0), ("balance", "none"), ("force_balance", False)):
            if getattr(m, key) != unset:
                raise ConfigError(f"model.{key}", getattr(m, key), "needs model.experts; this model has none")
    else:
        _experts(cfg)
    if cfg.parallelism.dispatch == "deepep":
        if not m.experts:
            raise ConfigError("parallelism.dispatch", "deepep", f"model={m.name} has no experts")
        missing = find_spec("deep_ep") is None
        why = "needs the package deep_ep, which isn't installed here" if missing else "is not built; use torch"
        raise ConfigError("parallelism.dispatch", "deepep", why)


def _experts(cfg: Train) -> None:
    m = cfg.model
    if m.ffn:
        raise ConfigError("model.ffn", m.ffn, "every layer has experts: must be 0; their width is model.expert_ffn")
    if not m.expert_ffn:
        raise ConfigError("model.expert_ffn", m.expert_ffn, "must be at least 1 in a model with experts")
    if not 1 <= m.experts_per_token <= m.experts:
        why = f"must be between 1 and model.experts={m.experts}"
        raise ConfigError("model.experts_per_token", m.experts_per_token, why)
    if cfg.memory.recompute == "budget":
        why = "torch's partitioner would choose a token's experts once more in backward, maybe others; use full or selective"
        raise ConfigError("memory.recompute", "budget", why)
    if m.force_balance and m.balance != "none":
        raise ConfigError(
            "model.force_balance", True, f"leaves model.balance={m.balance} nothing to do; set it to none"
        )
    if cfg.round.name != "none":  # loads are counted over all ranks in every step, and a bias is no weight to exchange
        raise ConfigError("round", cfg.round.name, f"goes with dense models; model={m.name} has experts")
