"""FLOPs per token against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from train import config
from train.measure import flops
from train.memory import recompute
from train.model.transformer import Transformer

BASE = {"name": "m", "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 70}
ROWS, LENGTH = 2, 24


def counted(model: config.Model, mode: str) -> float:
    """What the counter sees in one forward and backward, per token. It counts matmuls, attention over the whole square
    (math path: two batched matmuls), and recompute."""
    built = Transformer(model, "math")
    built.init_weights(0)
    recompute.apply(built, config.Memory("m", mode))
    drawn = torch.randint(model.vocab, (ROWS, LENGTH + 1))
    with FlopCounterMode(display=False) as counter:
        built(drawn[:, :-1], drawn[:, 1:]).backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"kv_heads": 4}, {"qk_norm": True}, {"head_dim": 6}], ids=str)
def test_mfu_and_hfu_equal_torchs_counter(changes: dict) -> None:
    model = config.Model(**{**BASE, **changes})
    assert flops.flops_per_token(model, LENGTH)["mfu"] == counted(model, "none")
    assert flops.flops_per_token(model, LENGTH)["hfu"] == counted(model, "none")
    assert flops.flops_per_token(model, LENGTH, "full")["hfu"] == counted(model, "full")
    assert flops.flops_per_token(model, LENGTH, "full")["mfu"] == counted(model, "none")


def test_causal_credit_is_half_of_the_attention() -> None:
    model = config.Model(**BASE)
    with_attention, without = flops.flops_per_token(model, LENGTH), flops.flops_per_token(model, 0)
    attention = with_attention["mfu"] - without["mfu"]
    assert attention == 12 * 3 * 4 * 16 * LENGTH
    assert with_attention["mfu_causal"] == without["mfu"] + attention / 2


def test_dense_1b_by_hand() -> None:
    model = config.Model("dense_1b", 2048, 18, 16, 8, 128, 6144, 32768)
    assert flops.matmul_params(model) == 18 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144) + 2048 * 32768
    assert flops.flops_per_token(model, 2048)["mfu_causal"] == 6 * flops.matmul_params(model) + 6 * 18 * 2048 * 2048


def test_unknown_recompute_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="memory.recompute=half"):
        flops.flops_per_token(config.Model(**BASE), 8, "half")
