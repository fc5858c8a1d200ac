"""Compiled layers: one graph for all of them, the eager model's numbers, recompute inside."""

import pytest
import torch
import torch._dynamo

from tests.model.tiny import build, tokens
from train import config
from train.memory import recompute


def gradients(mode: str, backend: str | None) -> dict[str, torch.Tensor]:
    model = build(torch.float32, "flash", layers=3)
    recompute.apply(model, config.Memory("m", mode))
    if backend == "inductor":
        model.compile_layers()
    elif backend is not None:
        for block in model.layers:
            block.compile(backend=backend, fullgraph=True)
    loss = model(*tokens())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_share_one_graph_without_breaks(mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gradients(mode, "aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_inductor_equals_eager_and_recompute_is_bitwise_under_it() -> None:
    torch._dynamo.reset()
    eager, plain, full = gradients("none", None), gradients("none", "inductor"), gradients("full", "inductor")
    assert eager.keys() == plain.keys() == full.keys()
    for name, value in eager.items():
        assert (plain[name] - value).norm() <= 1e-5 * value.norm(), name
        assert torch.equal(plain[name], full[name]), name
