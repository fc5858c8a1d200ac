"""Which layers and operators run again, and that nothing else changes."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.model.tiny import TINY, build, saved_bytes, tokens
from train import config
from train.measure import flops
from train.memory import recompute
from train.model.transformer import Transformer

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
SQUARE = {"head_dim": 6}  # heads x head_dim = dim, as in Llama: wq and wo are square


class Count(TorchDispatchMode):
    """Runs of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ran[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def run(memory: config.Memory, layers: int = 4) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    model = build(torch.float32, "flash", layers=layers, **SQUARE)
    recompute.apply(model, memory)
    loss = model(*tokens())
    with Count() as count:
        loss.backward()
    return count.ran, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def memory(mode: str, **keys: object) -> config.Memory:
    return config.Memory("m", mode, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_full_in_every_nth_layer(every: int) -> None:
    plain, expected = run(memory("none"))
    again, got = run(memory("full", every=every))
    layers = -(-4 // every)
    assert again["aten::mm"] - plain["aten::mm"] == 6 * layers  # seven matmuls without w_down
    assert again[ATTENTION] - plain[ATTENTION] == layers
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_selective_runs_square_matmuls_again_and_keeps_attention() -> None:
    plain, expected = run(memory("none"))
    again, got = run(memory("selective"))
    assert again["aten::mm"] - plain["aten::mm"] == 4 * 2  # wq, wo
    assert again[ATTENTION] == plain[ATTENTION]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("targets", "matmuls", "attentions"),
    [(["aten::mm"], 0, 1), ([ATTENTION], 6, 0), (["aten::mm", ATTENTION], 0, 0), (["aten::silu"], 6, 1)],
)
def test_targets_replace_the_list(targets: list[str], matmuls: int, attentions: int) -> None:
    plain, expected = run(memory("none"))
    again, got = run(memory("selective", targets=targets, every=2))
    assert again["aten::mm"] - plain["aten::mm"] == 2 * matmuls
    assert again[ATTENTION] - plain[ATTENTION] == 2 * attentions
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("target", ["aten::matmull", "nothing", "nothing::mm", "aten"])
def test_unknown_targets_are_refused(target: str) -> None:
    with pytest.raises(
        config.ConfigError, match=f"memory.targets={target}: (must be an operator such as aten::mm|keeps everything)"
    ):
        recompute.apply(build(), memory("selective", targets=["aten::mm", target]))


def test_random_numbers_and_collectives_are_kept_whatever_the_targets() -> None:
    keep = recompute.Keep(["aten::mm"])
    kept = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    x = torch.ones(2, 3)
    assert keep(None, torch.ops.aten.native_dropout.default, x, 0.5, True) == kept
    assert keep(None, torch.ops._c10d_functional.all_reduce.default, x, "sum", "0") == kept
    assert keep(None, torch.ops._c10d_functional.wait_tensor.default, x) == kept
    assert keep(None, torch.ops.aten.silu.default, x) != kept


@pytest.mark.parametrize("keys", [{}, {"every": 2}, {"targets": ["aten::mm"]}, {"targets": ["aten::silu"]}], ids=str)
@pytest.mark.parametrize("changes", [{}, SQUARE, {"kv_heads": 4, "head_dim": 6}], ids=str)
def test_hfu_counts_what_runs_again(keys: dict, changes: dict) -> None:
    model = config.Model(**{**TINY, "layers": 3, **changes})
    with torch.device("meta"):
        built = Transformer(model, "math")
    built.materialise(torch.device("cpu"), 0)
    recompute.apply(built, memory("selective", **keys))
    with FlopCounterMode(display=False) as counter:
        built(*tokens(2, 12)).backward()
    said = flops.flops_per_token(model, 12, "selective", memory("selective", **keys), "math")
    assert said["hfu"] == counter.get_total_flops() / 24


def test_budget_has_no_hfu() -> None:
    assert set(flops.flops_per_token(config.Model(**TINY), 8, "budget")) == {"mfu", "mfu_causal"}


def kept(mode: config.Memory) -> int:
    return saved_bytes(lambda model: recompute.apply(model, mode))


def test_compiled_layers_keep_what_the_mode_says() -> None:
    plain, full, selective = (kept(memory(m)) for m in ("none", "full", "selective"))
    budget = kept(memory("budget", budget=0.5))
    all_matmuls = kept(memory("selective", targets=["aten::mm", ATTENTION]))
    assert full < 0.15 * plain < selective < 0.65 * plain
    assert selective < all_matmuls < plain
    assert full < budget < 0.6 * plain
    assert kept(memory("none")) == plain  # the budget does not outlive its model
