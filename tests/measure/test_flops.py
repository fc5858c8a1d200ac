"""FLOPs per token against torch's own counter."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from train import config
from train.measure import flops
from train.memory import recompute
from train.model.transformer import Transformer

BASE = {"name": "m", "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 70}
ROWS, LENGTH = 2, 24
CONF = Path(__file__).parents[2] / "conf"


MOE = {**BASE, "ffn": 0, "experts": 5, "experts_per_token": 2, "expert_ffn": 20}


def grouped_flops(x: tuple, w: tuple, *_: object, **__: object) -> int:
    """Of a grouped matmul, which torch's counter has no formula for: rows by experts' matrices, or rows by rows."""
    return 2 * x[0] * x[1] * w[-1]


def counted(model: config.Model, mode: str) -> float:
    """What the counter sees in one forward and backward, per token. It counts matmuls, attention over the whole square
    (math path: two batched matmuls), and recompute."""
    with torch.device("meta"):
        built = Transformer(model, "math")
    built.materialise(torch.device("cpu"), 0)
    recompute.apply(built, config.Memory("m", mode))
    drawn = torch.randint(model.vocab, (ROWS, LENGTH + 1))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        built(drawn[:, :-1], drawn[:, 1:]).backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"kv_heads": 4}, {"qk_norm": True}, {"head_dim": 6}], ids=str)
def test_mfu_and_hfu_equal_torchs_counter(changes: dict) -> None:
    model = config.Model(**{**BASE, **changes})
    assert flops.flops_per_token(model, LENGTH)["mfu"] == counted(model, "none")
    assert flops.flops_per_token(model, LENGTH)["hfu"] == counted(model, "none")
    assert flops.flops_per_token(model, LENGTH, "full")["hfu"] == counted(model, "full")
    assert flops.flops_per_token(model, LENGTH, "full")["mfu"] == counted(model, "none")


@pytest.mark.parametrize("mode", ("full", "selective"))
def test_experts_equal_torchs_counter(mode: str) -> None:
    model = config.Model(**MOE)
    assert flops.flops_per_token(model, LENGTH)["mfu"] == counted(model, "none")
    assert flops.flops_per_token(model, LENGTH, mode, attention="math")["hfu"] == counted(model, mode)


def test_experts_by_hand() -> None:
    """moe_3b: 20 layers of 1024, 8 heads and 4 of keys and values of 128, 64 experts 704 wide of which 8 a token, 32k words."""
    model = config.from_dict(config.Model, yaml.safe_load((CONF / "model" / "moe_3b.yaml").read_text()))
    attention = 1024 * 1024 + 2 * 1024 * 512 + 1024 * 1024
    expert, router = 3 * 1024 * 704, 1024 * 64
    assert flops.matmul_params(model) == 20 * (attention + 8 * expert + router) + 1024 * 32768
    assert flops.flops_per_token(model, 2048)["mfu"] == 6 * flops.matmul_params(model) + 12 * 20 * 8 * 128 * 2048
    norms = 20 * (2 * 1024 + 2 * 128) + 1024
    whole = 20 * (attention + 64 * expert + router) + 2 * 1024 * 32768 + norms
    assert flops.param_count(model) == whole == 2_899_621_888
    assert flops.param_count(model, active=True) == whole - 20 * 56 * expert


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
