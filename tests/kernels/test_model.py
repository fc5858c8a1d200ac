"""A whole model on the kernels, eager and compiled, under every kind of recompute; what compiled layers keep."""

import pytest
import torch
import torch._dynamo

from tests.kernels import given
from tests.model.tiny import TINY, build, saved_bytes, tokens
from train import config
from train.kernels import apply, loss, norm, rope, swiglu
from train.memory import recompute
from train.model.transformer import gated


def configured(kernels: str, memory: config.Memory) -> config.Train:
    return config.Train(compile=config.Compile("layer", kernels), memory=memory, model=config.Model(**TINY))


def gradients(kernels: str, mode: str, backend: str | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = build(dtype, "math", layers=2)
    cfg = configured(kernels, config.Memory("m", mode))
    recompute.apply(model, cfg.memory)
    apply.apply(model, cfg, torch.device("cpu"))
    if backend is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in model.layers:
            block.compile(backend=backend, fullgraph=True)
    value = model(*tokens())
    value.backward()
    if backend is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
@pytest.mark.parametrize(
    ("mode", "kernels"),
    [("none", given.ALL), ("full", given.ALL), ("selective", given.ALL), ("none", "rope+swiglu_down")],
)
def test_equal_to_the_plain_model(kernels: str, mode: str, backend: str | None) -> None:
    want = gradients("inductor", "none", None, torch.float64)
    got = gradients(kernels, mode, backend, torch.float64)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() <= 1e-13 * tensor.norm(), name


def test_they_are_put_in() -> None:
    model = build()
    cfg = configured("loss+rope+swiglu_down+norm", config.Memory("m"))
    assert set(apply.apply(model, cfg, torch.device("cpu"))) == {"loss", "rope", "swiglu_down", "norm"}
    assert model.loss is loss.fused_loss
    for block in model.layers:
        assert block.attention.turn is rope.turn
        for normed, readers in ((block.attention_normed, 3), (block.ffn_normed, 2)):
            assert normed.func is norm.normed and normed.keywords == {"readers": readers}
        assert block.ffn.down is swiglu.down and block.ffn.gated is gated
    apply.apply(model, configured("swiglu", cfg.memory), torch.device("cpu"))
    assert all(block.ffn.gated is swiglu.gated for block in model.layers)


@pytest.mark.slow
def test_equal_under_inductor() -> None:
    want, got = (gradients(given.ALL, "none", backend, torch.float32) for backend in (None, "inductor"))
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def saved_elements(kernels: str) -> int:
    """A token, of what one compiled layer keeps for backward."""
    cfg = configured(kernels, config.Memory("m"))
    return saved_bytes(lambda model: apply.apply(model, cfg, torch.device("cpu"))) // 4 // 256


def test_compiled_layers_keep_no_more_than_inductors() -> None:
    plain = saved_elements("inductor")
    assert saved_elements("swiglu+rope") == plain
    assert saved_elements("norm") == plain - 2  # the norms' roots
    assert saved_elements("swiglu_down") == plain - 192  # the product, one for each of the ffn
