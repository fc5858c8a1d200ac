"""memory.recompute: which activations backward computes again instead of keeping.

Checkpointing sits inside the layer and compilation outside (`Transformer.compile_layers`): the compiled backward then
holds the recomputation and leaves out what it doesn't need. Eager or compiled, w_down's matmul is not run again.
"""

from train import config
from train.model.transformer import Block, Transformer


def apply(model: Transformer, cfg: config.Memory) -> None:
    """Set every layer up for cfg.recompute: none, or full (only each layer's input is kept).

    Raises ConfigError for another value.
    """
    if cfg.recompute not in ("none", "full"):
        raise config.ConfigError("memory.recompute", cfg.recompute, "valid: none, full")
    for block in model.layers:
        assert isinstance(block, Block)
        block.recompute = cfg.recompute == "full"
