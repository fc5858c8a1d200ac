"""From compile.kernels to a model that runs them; the optimizer's is made in train.memory.optimizer."""

from train import config
from train.kernels import loss, names, rope, swiglu
from train.model.transformer import Block, FeedForward, Transformer


def apply(model: Transformer, cfg: config.Train) -> None:
    """After the levers, which choose the head that `loss` stands for, and before `compile_layers`."""
    used = names.chosen(cfg.compile.kernels)
    if "loss" in used:
        model.loss = loss.head(cfg.memory)
    for block in model.layers:
        assert isinstance(block, Block)
        if "rope" in used:
            block.attention.turn = rope.turn
        if "swiglu" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.gated = swiglu.gated
        if "swiglu_down" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.down = swiglu.down
