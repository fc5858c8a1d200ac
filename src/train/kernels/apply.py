"""From compile.kernels to a model that runs them; the optimizer's is made in train.memory.optimizer."""

import functools

import torch

from train import config
from train.kernels import backend, loss, norm, rope, stacked, swiglu
from train.model.transformer import Block, FeedForward, Transformer


def apply(model: Transformer, cfg: config.Train, device: torch.device) -> dict[str, str]:
    """After the levers, which choose the head that `loss` stands for, and before `compile_layers` and the reduction; for
    `stacked` weights have memory.

    For the record: kernel → triton, or plain for its torch form, which runs where Triton can't; carry, which only cuts the
    layers' graphs elsewhere → graph.
    """
    used = backend.used(cfg, device)
    if "loss" in used:
        model.loss = loss.head(cfg.memory)
    one, two, three = (functools.partial(norm.normed, readers=n) for n in (1, 2, 3))
    for block in model.layers:
        assert isinstance(block, Block)
        if "rope" in used:
            block.attention.turn = rope.turn
        if "carry" in used:
            block.carry = True
        if "norm" in used:
            # one reader where tp gathers the norm's result, where aliases could leave a graph (see `normed`), of one matmul
            apart = block.one_graph and int(cfg.parallelism.tp) == 1 and "stacked" not in used
            block.attention_normed = three if apart else one
            block.ffn_normed = two if apart and isinstance(block.ffn, FeedForward) else one
        if "stacked" in used:
            stacked.apply(block)
        if "swiglu" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.gated = swiglu.gated
        if "swiglu_down" in used:
            assert isinstance(block.ffn, FeedForward)
            block.ffn.down = swiglu.down
    runs = "triton" if backend.triton_runs(device) else "plain"
    return {name: "graph" if name == "carry" else runs for name in used}
