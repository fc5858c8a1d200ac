"""A model small enough for fp64 references."""

import torch

from train import config
from train.model.transformer import Transformer

TINY = {"name": "tiny", "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 40, "vocab": 50}


def build(dtype: torch.dtype = torch.float64, path: str = "math", seed: int = 0, **changes: object) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config.Model(**{**TINY, **changes}), path).to(dtype)
    model.materialise(torch.device("cpu"), seed)
    return model


def tokens(rows: int = 2, length: int = 11, vocab: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]
