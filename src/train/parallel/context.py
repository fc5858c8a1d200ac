"""Context parallel: the cp ranks share every sequence, each has T/cp of its positions.

Only attention looks across positions; everything else works on the local ones, and cp ranks count as data-parallel ranks for
gradients. `parallelism.cp_method` says how attention gets across: ulysses.py exchanges positions for heads, ring.py sends keys
and values round. Both stay out of compiled graphs: a compiled layer is in pieces around them.
"""

from collections.abc import Mapping

import torch

from train import config
from train.model import attention
from train.model.transformer import Across, Attention, Transformer
from train.parallel import line, mesh, ring
from train.parallel.dims import Dims
from train.parallel.ulysses import Ulysses


def local_heads(cfg: config.Model, degrees: dict[str, int], method: str) -> tuple[int, int]:
    """(query heads, KV heads) that one rank's attention works on."""
    tp, cp = degrees["tp"], degrees["cp"] if method == "ulysses" else 1
    return cfg.heads // tp // cp, max(1, cfg.kv_heads // tp // cp)


def probe(
    cfg: config.Train, degrees: dict[str, int], device: torch.device, dtype: torch.dtype
) -> Mapping[str, str | None]:
    """`attention.probe` with the heads and the kernels of one rank's attention."""
    method = cfg.parallelism.cp_method
    shape = *local_heads(cfg.model, degrees, method), cfg.model.head_dim
    if degrees["cp"] > 1 and method == "ring":
        return ring.probe(device, dtype, *shape, attention.PATHS)
    return attention.probe(device, dtype, *shape)


def apply(model: Transformer, dims: Dims, method: str) -> None:
    """Make `model` work on one cp rank's positions. Before compile and reduction; collective."""
    cp = dims.size("cp")
    if cp == 1:
        return
    _, model.mine = mesh.sequence_pieces(method, cp, dims.index("cp"))
    name = line.join(dims)
    across: Across = Ulysses(name, cp) if method == "ulysses" else ring.Ring(name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.across = across
