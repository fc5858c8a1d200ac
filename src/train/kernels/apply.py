"""From compile.kernels to a model that runs them; the optimizer's is made in train.memory.optimizer."""

import functools

import torch

from train import config
from train.kernels import backend, loss, norm, rope, swiglu
from train.model.transformer import Block, FeedForward, Transformer


def apply(model: Transformer, cfg: config.Train, device: torch.device) -> dict[str, str]:
    """After the levers, which choose the head that `loss` stands for, and before `compile_layers`.

    For the record: kernel → triton, or plain for its torch form, which runs where Triton can't.
    """
    used = backend.used(cfg, device)
    if "loss" in used:
        model.loss = loss.head(cfg.memory)
    one, two, three = (functools.partial(norm.normed, readers=n) for n in (1, 2, 3))
    for block in model.layers:
        assert isinstance(block, Block)
        if "rope" in used:
            block.attention.turn = rope.turn
        if "norm" in used:
            # one reader where ranks gather what the norm returns, or where its graph ends: compiled layers in pieces
            gathered = int(cfg.parallelism.tp) > 1
            block.attention_normed = one if gathered or block.attention.across is not None else three
            block.ffn_normed = two if isinstance(block.ffn, FeedForward) and not gathered else one
        if "swiglu" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.gated = swiglu.gated
        if "swiglu_down" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.down = swiglu.down
    return dict.fromkeys(used, "triton" if backend.triton_runs(device) else "plain")
