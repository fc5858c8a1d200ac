"""From memory.* to a model that obeys it: everything but the optimizer's part (see optimizer.py)."""

import torch

from train import config
from train.memory import recompute
from train.memory.offload import Offload
from train.model import loss
from train.model.transformer import Transformer


def apply(model: Transformer, cfg: config.Memory, device: torch.device) -> None:
    """Before `compile_layers` and before the reduction takes over. Raises ConfigError for values that can't be."""
    recompute.apply(model, cfg)
    model.loss = loss.build(cfg, model.shard)
    if cfg.activation_offload:
        kept = cfg.recompute in ("selective", "budget")
        model.saving = Offload(model, device, cfg.max_inflight_activations, inputs_only=kept).saving
