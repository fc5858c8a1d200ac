"""A whole model on the kernels, eager and compiled, under every kind of recompute; what compiled layers keep."""

from collections import Counter

import pytest
import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.kernels import given
from tests.model.tiny import TINY, build, saved_bytes, tokens
from train import config
from train.kernels import apply, loss, names, norm, rope, swiglu
from train.memory import recompute
from train.model.transformer import Block, Transformer, gated
from train.parallel import mesh


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
    [
        ("none", given.ALL),
        ("full", given.ALL),
        ("selective", given.ALL),
        ("none", "rope+swiglu_down"),
        ("none", "stacked"),
        ("none", given.STACKED),
        ("full", given.STACKED),
    ],  # fmt: skip
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
        assert block.attention_normed.func is block.ffn_normed.func is norm.normed and readers(block) == (3, 2)
        assert block.ffn.down is swiglu.down and block.ffn.gated is gated
    apply.apply(model, configured("swiglu", cfg.memory), torch.device("cpu"))
    assert all(block.ffn.gated is swiglu.gated for block in model.layers)


def readers(block: Block) -> tuple[int, int]:
    """Of the norms before attention and FFN."""
    return tuple(normed.keywords["readers"] for normed in (block.attention_normed, block.ffn_normed))  # type: ignore[attr-defined]


def test_aliases_only_where_they_stay_in_one_graph() -> None:
    tp = configured("norm", config.Memory("m"))
    tp.parallelism.tp = 2
    for cfg, across, experts, want in (
        (tp, None, 0, (1, 1)),
        (configured("norm", tp.memory), lambda q, k, v, path: q, 0, (1, 1)),
        (configured("norm", tp.memory), None, 4, (3, 1)),
    ):
        model = build(
            layers=1, **({"ffn": 0, "experts": 4, "expert_ffn": 8, "experts_per_token": 2} if experts else {})
        )
        model.layers[0].attention.across = across
        apply.apply(model, cfg, torch.device("cpu"))
        assert readers(model.layers[0]) == want


def graphs(kernels: str) -> list[fx.Graph]:
    """[forward, backward] of a layer as Inductor would get them."""
    torch._dynamo.reset()
    found: list[fx.Graph] = []
    model = build(layers=1)
    apply.apply(model, configured(kernels, config.Memory("m")), torch.device("cpu"))

    def keep(module: fx.GraphModule, _: object) -> object:
        found.append(module.graph)
        return make_boxed_func(module)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    model.layers[0].compile(backend=backend, fullgraph=True)
    model(*tokens()).backward()
    return found


def test_each_readers_gradient_comes_from_its_matmul_to_the_norm_and_nothing_is_copied() -> None:
    views = ("aten.view.default", "aten.t.default")

    def work(graph: fx.Graph) -> Counter[str]:
        return Counter(str(n.target) for n in graph.nodes if n.op == "call_function" and str(n.target) not in views)

    (plain, _), (forward, backward) = graphs("inductor"), graphs("norm")
    assert work(forward) == work(plain), "no clone, nothing twice"
    norms = [n for n in backward.nodes if "rms_norm_backward" in str(n.target)]
    assert [len(n.args[1]) for n in norms] == [2, 3]
    for grad in (g for n in norms for g in n.args[1]):
        assert (str(grad.target), str(grad.args[0].target)) == ("aten.view.default", "aten.mm.default")


def test_stacked_makes_one_matmul_of_two_and_three_and_copies_nothing() -> None:
    """As Inductor gets it: a view of the weights, whole gradients of them, and no concatenation."""

    def count(graph: fx.Graph, name: str) -> int:
        return sum(n.target == getattr(torch.ops.aten, name).default for n in graph.nodes)

    (plain_forward, plain_backward), (forward, backward) = graphs("norm"), graphs("norm+stacked")
    assert [count(g, "mm") for g in (plain_forward, plain_backward)] == [7, 14]
    assert [count(g, "mm") for g in (forward, backward)] == [4, 8]
    for graph, plain in ((forward, plain_forward), (backward, plain_backward)):
        assert count(graph, "cat") == 0  # inductor's rotation has them
        assert count(graph, "clone") <= count(plain, "clone")  # attention's


def test_stacked_weights_are_one_tensor_that_updates_reach() -> None:
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    apply.apply(model, configured("stacked", config.Memory("m")), torch.device("cpu"))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    attention, ffn = model.layers[0].attention, model.layers[0].ffn
    for stack, parts in ((attention.stack, ("wq", "wk", "wv")), (ffn.stack, ("w_gate", "w_up"))):
        owner = attention if "wq" in parts else ffn
        with torch.no_grad():
            for part in parts:
                getattr(owner, part).weight.add_(1)
        assert torch.equal(stack, torch.cat([getattr(owner, part).weight for part in parts]))
    model(*tokens()).backward()
    grads = [getattr(attention, part).weight.grad for part in ("wq", "wk", "wv")]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1, "one tensor, no copies"


@pytest.mark.slow
def test_equal_under_inductor() -> None:
    want, got = (gradients(given.ALL, "none", backend, torch.float32) for backend in (None, "inductor"))
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def saved_elements(kernels: str, mode: str = "none") -> int:
    """A token, of what one compiled layer keeps for backward."""
    cfg = configured(kernels, config.Memory("m", mode))

    def prepare(model: Transformer) -> None:
        recompute.apply(model, cfg.memory)
        apply.apply(model, cfg, torch.device("cpu"))

    return saved_bytes(prepare) // 4 // 256


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_keep_no_more_with_what_auto_takes(mode: str) -> None:
    """On torch 2.11 they would with others."""
    cfg = configured("auto", config.Memory("m", mode))
    taken = names.fitting(cfg, dict.fromkeys(mesh.DIMS, 1))
    assert taken and saved_elements("+".join(taken), mode) <= saved_elements("inductor", mode)


def test_compiled_layers_keep_no_more_than_inductors() -> None:
    plain = saved_elements("inductor")
    assert saved_elements("swiglu+rope") == plain
    assert saved_elements("norm") == plain - 2  # the norms' roots
    assert saved_elements("norm+stacked") == plain - 2
    assert saved_elements("swiglu_down") == plain - 192  # the product, one for each of the ffn
