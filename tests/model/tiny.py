"""A model small enough for fp64 references."""

from collections.abc import Callable

import torch
import torch._dynamo

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


def saved_bytes(levers: Callable[[Transformer], object]) -> int:
    """What one compiled layer keeps for the backward of 256 tokens in fp32, parameters left out; `levers` makes the model
    what it is to be."""
    torch._dynamo.reset()
    model = build(torch.float32, "flash", layers=1, dim=64, heads=4, kv_heads=2, head_dim=16, ffn=192)
    levers(model)
    model.layers[0].compile(backend="aot_eager_decomp_partition", fullgraph=True)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    model.saving = lambda _: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    model(*tokens(4, 64)).backward()
    return sum(s.nbytes() for s in seen.values())
