"""compile.kernels=carry: the plain layers' numbers from layers that leave their last sum to the next one; two graphs, as much
memory, no work more in backward."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from tests.kernels.test_model import configured
from tests.memory.test_head import errors
from tests.model.tiny import build, tokens
from tests.parallel import one_rank
from tests.parallel.one_rank import configuration
from train import config
from train.kernels import apply
from train.model.transformer import Transformer

SIZES = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 96}


def make(kernels: str, dtype: torch.dtype, backend: Any) -> Transformer:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(torch.float32, "flash", **SIZES).to(dtype)
    apply.apply(model, configured(kernels, config.Memory("m")), torch.device("cpu"))
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True)
    return model


def steps(model: Transformer, count: int = 3) -> list[Tensor]:
    """Loss and gradients of steps of plain descent, fast enough that every step differs."""
    found = []
    for _ in range(count):
        loss = model(*tokens(4, 64))
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                found.append(p.grad)
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return found


@pytest.mark.parametrize(
    ("dtype", "others"),
    [
        (torch.float32, ""),
        (torch.bfloat16, "+rope+swiglu+norm"),
        pytest.param(torch.bfloat16, "+swiglu_down", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_bits_from_two_graphs(dtype: torch.dtype, others: str) -> None:
    plain = steps(make(others[1:] or "inductor", dtype, "aot_eager_decomp_partition"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    carried = steps(make("carry" + others, dtype, "aot_eager_decomp_partition"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "the first layer's, and one for all others"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(plain) == len(carried)
    assert all(torch.equal(a, b) for a, b in zip(plain, carried, strict=True))


@pytest.mark.slow
def test_under_inductor() -> None:
    """fp32: the same bits. bf16: as close to the exact gradients as eager layers, which round the same sums; a plain layer's
    last kernel adds x, attention's and the FFN's output up and rounds once."""
    plain, carried = (steps(make(kernels, torch.float32, "inductor")) for kernels in ("inductor", "carry"))
    assert all(torch.equal(a, b) for a, b in zip(plain, carried, strict=True))
    exact = steps(build(torch.float32, "math", **SIZES).to(torch.bfloat16).to(torch.float64), 1)
    eager, carried = (
        errors([t.double() for t in steps(make("carry", torch.bfloat16, backend), 1)], exact)
        for backend in ("aot_eager", "inductor")
    )
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(carried, eager, strict=True)), list(zip(carried, eager, strict=True))


def saved_sizes(kernels: str) -> list[int]:
    """Bytes of every storage that the layers keep for backward, parameters left out."""
    model = make(kernels, torch.bfloat16, "aot_eager_decomp_partition")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    assert model.embed is not None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.run(model.layers, model.embed(tokens(4, 64)[0]), 64)
    assert out.shape == (4, 64, 32)
    return sorted(storage.nbytes() for storage in kept.values())


def test_layers_keep_as_much() -> None:
    assert saved_sizes("carry") == saved_sizes("inductor")


def graphs(kernels: str) -> tuple[list[fx.Graph], list[fx.Graph]]:
    """Forward and backward of compiled layers, each graph once, in the order in which they run first."""
    found: tuple[list[fx.Graph], list[fx.Graph]] = ([], [])

    def keep(into: list[fx.Graph], module: fx.GraphModule, _: object) -> Callable[..., Any]:
        into.append(module.graph)
        return make_boxed_func(module.forward)

    forward, backward = (functools.partial(keep, into) for into in found)
    cut = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=cut, decompositions={})
    steps(make(kernels, torch.bfloat16, backend), 1)
    return found


def test_forward_keeps_the_sum_and_backward_hands_one_gradient_to_both() -> None:
    (_, (plain,)), (forward, backward) = graphs("inductor"), graphs("carry")
    assert len(forward) == len(backward) == 2

    given = [n for n in forward[1].nodes if n.op == "placeholder" and n.meta["val"].shape == (4, 64, 32)]
    assert len(given) == 2 and not set(given) & set(forward[1].output_node().all_input_nodes)

    def count(graph: fx.Graph) -> int:
        """Sums and copies."""
        return sum(n.target in (torch.ops.aten.add.Tensor, torch.ops.aten.clone.default) for n in graph.nodes)

    assert all(count(graph) <= count(plain) for graph in backward)
    gradients = backward[0].output_node().args[0]  # of the last layer, whose backward is the first
    assert isinstance(gradients, (tuple, list)) and gradients[0] is gradients[1]


def test_a_rank_with_other_levers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms, masters and moments of the real rank's steps, bit for bit."""
    monkeypatch.setattr(Transformer, "compile_layers", compile_layers)
    keys = {
        "precision__name": "fp8",
        "precision__scaling": "tensorwise",
        "memory__lm_head_chunk": 7,
        "model__tied": True,
    }
    runs = []
    for kernels in ("inductor", "carry"):
        cfg = configuration(compile__name="layer", compile__kernels=kernels, steps=3, optim__clip_norm=0.05, **keys)
        runs.append(one_rank.train(tmp_path / kernels, cfg))
    (lines, state), (carried_lines, carried_state) = runs
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == [line[key] for line in carried_lines]
    assert [name for name in state if not torch.equal(state[name], carried_state[name])] == []


def compile_layers(model: Transformer) -> None:
    """The graphs that Inductor would get, without its compiler's time."""
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Of two layers as wide as dense_1b's. fp32: close to plain layers, since a norm's kernel that has the sum in it may add a
    row up in another order. bf16: as close as eager layers, as above. Memory: no step's peak is above."""
    sizes = {"dim": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 6144, "vocab": 1000, "layers": 2}
    data = torch.randint(1000, (2, 2, 512), generator=torch.Generator().manual_seed(1)).cuda()

    def gradients(kernels: str, dtype: torch.dtype, backend: str | None) -> tuple[list[Tensor], int]:
        """Loss and gradients of a second step, and its peak in bytes over what was there before it."""
        torch._dynamo.reset()
        model = build(torch.float32, "math", **sizes).to("cuda", torch.bfloat16).to(dtype)
        apply.apply(model, configured(kernels, config.Memory("m")), torch.device("cuda"))
        for block in model.layers if backend else ():
            block.compile(backend=backend, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(data[0], data[1])
            loss.backward()
        grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
        return [loss.detach().double(), *grads], torch.cuda.max_memory_allocated() - before

    exact, _ = gradients("inductor", torch.float64, None)
    (plain, _), (carried, _) = (gradients(kernels, torch.float32, "inductor") for kernels in ("inductor", "carry"))
    assert max(errors(carried, plain)) <= 1e-4, errors(carried, plain)
    eager, _ = gradients("inductor", torch.bfloat16, None)
    (plain, most), (carried, peak) = (
        gradients(kernels, torch.bfloat16, "inductor") for kernels in ("inductor", "carry")
    )
    ours, theirs = errors(carried, exact), errors(eager, exact)
    print("errors, of plain compiled layers' errors:", [a / b for a, b in zip(ours, errors(plain, exact), strict=True)])
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(ours, theirs, strict=True)), list(zip(ours, theirs, strict=True))
    assert peak <= 1.001 * most, (peak, most)
