"""From compile.kernels to a model that runs them; the optimizer's is made in train.memory.optimizer."""

import torch

from train import config
from train.kernels import backend, input_grad, loss, norm, rope, swiglu
from train.model.transformer import Block, FeedForward, Transformer


def apply(model: Transformer, cfg: config.Train, device: torch.device) -> dict[str, str]:
    """After the levers, which choose the head that `loss` stands for, and before `compile_layers`.

    For the record: kernel → triton, or plain for its torch form, which runs where Triton can't.
    """
    used = backend.used(cfg, device)
    if "loss" in used:
        model.loss = loss.head(cfg.memory)
    for block in model.layers:
        assert isinstance(block, Block)
        if "rope" in used:
            block.attention.turn = rope.turn
        if "carry" in used:
            block.carry = True
        if "norm" in used:
            block.normed = norm.normed
        if "input_grad" in used:
            block.attention.project = input_grad.project
            if isinstance(block.ffn, FeedForward):
                block.ffn.project = input_grad.project
        if "swiglu" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.gated = swiglu.gated
        if "swiglu_down" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.down = swiglu.down
    return dict.fromkeys(used, "triton" if backend.triton_runs(device) else "plain")
