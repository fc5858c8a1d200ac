"""Mixtures of experts on one rank: against a plain loop over tokens, and what happens at the edges."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.tiny import build, tokens
from tests.parallel.cases import no_host_synchronisation
from tests.parallel.expert_cases import Undecided
from train import config
from train.memory import recompute
from train.model.grouped import grouped_mm, kernel_takes, loop_mm
from train.model.moe import MoE, collect, spread
from train.model.transformer import Transformer
from train.parallel.balance import Balance
from train.parallel.dims import Dims

EXPERTS = {"ffn": 0, "experts": 6, "experts_per_token": 2, "expert_ffn": 16}
ONE = Dims({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, 0, torch.device("cpu"))


def moe_model(**changes: Any) -> Transformer:
    return build(**{**EXPERTS, **changes})


def layer(**changes: Any) -> MoE:
    found = moe_model(**changes).layers[0].ffn
    assert isinstance(found, MoE)
    return found


def by_token(moe: MoE, x: Tensor) -> Tensor:
    """What the layer must compute, one token and one expert at a time."""
    rows = []
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        scores = logits.softmax(-1) if moe.cfg.router_score == "softmax" else logits.sigmoid()
        biased = scores + moe.raises * moe.cfg.balance_coef if moe.cfg.balance == "aux_loss_free" else scores
        chosen = biased.argsort(descending=True)[: moe.cfg.experts_per_token]
        weights = scores[chosen]
        if moe.cfg.norm_topk:
            weights = weights / weights.sum()
        e = moe.experts
        outs = [e.w_down[i] @ (F.silu(e.w_gate[i] @ token) * (e.w_up[i] @ token)) for i in chosen.tolist()]
        rows.append(sum(w * out for w, out in zip(weights, outs, strict=True)))
    return torch.stack(rows).view_as(x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk": False}, {"router_score": "sigmoid"}, {"balance": "aux_loss_free", "balance_coef": 0.1}],
    ids=str,
)
def test_equals_a_loop_over_tokens(changes: dict[str, Any]) -> None:
    moe = layer(**changes)
    moe.raises.copy_(torch.tensor([1, -2, 0, 3, 0, -1]))
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 7, 24, dtype=torch.float64)
    parameters = [x, *moe.parameters()]
    out, counts = moe(x)
    want = by_token(moe, x)
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-14)
    for got, expected in zip(
        torch.autograd.grad(out, parameters, up), torch.autograd.grad(want, parameters, up), strict=True
    ):
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-14)
    assert counts.sum() == 2 * 7 * 2


def test_all_tokens_to_one_pair_of_experts() -> None:
    moe = layer(balance="aux_loss_free", balance_coef=10.0)
    moe.raises[1], moe.raises[4] = 1, 2
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    out, counts = moe(x)
    assert counts.tolist() == [0, 14, 0, 0, 14, 0]
    assert torch.allclose(out, by_token(moe, x), rtol=1e-12, atol=1e-14)
    out.square().sum().backward()
    used = moe.experts.w_up.grad.flatten(1).norm(dim=1) > 0  # type: ignore[union-attr]
    assert used.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("ends", ([3, 3, 11, 16], [0, 0, 0, 16], [16, 16, 16, 16]), ids=str)
def test_grouped_equals_loop(dtype: torch.dtype, ends: list[int]) -> None:
    x = torch.randn(16, 24).to(dtype).requires_grad_()
    w = torch.randn(4, 40, 24).to(dtype).requires_grad_()
    up, last = torch.randn(16, 40).to(dtype), torch.tensor(ends, dtype=torch.int32)
    assert kernel_takes(x, w) == hasattr(torch, "_grouped_mm")
    a, b = grouped_mm(x, w, last), loop_mm(x, w, last)
    bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    assert torch.allclose(a, b, **bound)
    for got, want in zip(torch.autograd.grad(a, (x, w), up), torch.autograd.grad(b, (x, w), up), strict=True):
        assert torch.allclose(got, want, **bound)


def test_widths_that_the_kernel_refuses_are_looped() -> None:
    x, w = torch.randn(5, 5), torch.randn(2, 3, 5)
    assert not kernel_takes(x, w)
    assert grouped_mm(x, w, torch.tensor([2, 5], dtype=torch.int32)).shape == (5, 3)


def test_spread_and_collect_are_each_other_s_adjoint() -> None:
    order = torch.randperm(12)
    inverse = order.argsort()
    x, rows = torch.randn(4, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    inner = (spread(x, order, inverse, 3) * rows).sum()
    assert torch.allclose(inner, (x * collect(rows, order, inverse, 3)).sum())
    for f, value in ((spread, x), (collect, rows)):
        assert torch.autograd.gradcheck(lambda v, f=f: f(v, order, inverse, 3), (value.requires_grad_(),))


def test_auxiliary_loss_reaches_the_router_and_not_the_reported_loss() -> None:
    plain, taxed = moe_model(), moe_model(balance="aux_loss", balance_coef=0.5)
    data = tokens()
    losses = [model(*data) for model in (plain, taxed)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    seen: list[Tensor] = []  # the last layer's input, so that no other layer's tax comes through
    moe = taxed.layers[1].ffn
    moe.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1)))
    taxed(*data)
    router = moe.router.weight.detach().requires_grad_()
    scores = (seen[0] @ router.t()).softmax(-1)
    share = F.one_hot(scores.topk(2).indices, 6).double().sum((0, 1)) / (2 * len(seen[0]))
    (0.5 * 6 * (share * scores.mean(0)).sum()).backward()
    difference = moe.router.weight.grad - plain.layers[1].ffn.router.weight.grad  # type: ignore[union-attr,operator]
    assert torch.allclose(difference, router.grad, rtol=1e-9, atol=1e-15)  # type: ignore[arg-type]


def test_the_bias_moves_one_unit_against_the_load() -> None:
    model = moe_model(balance="aux_loss_free")
    balance = Balance(model, model.cfg, ONE)
    model(*tokens())
    counts = [block.ffn.tokens.clone() for block in model.layers]
    mean, worst = balance.step().tolist()
    for block, each in zip(model.layers, counts, strict=True):
        assert block.ffn.raises.tolist() == [(6 * c < 44) - (6 * c > 44) for c in each.tolist()]
        assert not block.ffn.tokens.any()
    ratios = [float(each.max()) * 6 / 44 for each in counts]
    assert mean == pytest.approx(sum(ratios) / 2) and worst == pytest.approx(max(ratios))
    shares = balance.report()["load"]
    assert shares["layers.0"] == pytest.approx((counts[0] / 44).tolist())
    balance.restart()
    assert not any(t.any() for t in balance.state_dict().values())


def test_forced_balance_is_even() -> None:
    model = moe_model(force_balance=True)
    balance = Balance(model, model.cfg, ONE)
    model(*tokens(rows=3, length=12)).backward()
    assert balance.step().tolist() == [1.0, 1.0]
    assert model.layers[0].ffn.router.weight.grad.norm() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ("full", "selective"))
def test_routing_is_kept_under_recompute(mode: str) -> None:
    gradients = []
    for memory in ("none", mode):
        model = moe_model()
        for block in model.layers:
            block.ffn.__class__ = Undecided
        recompute.apply(model, config.Memory("test", memory))
        torch.manual_seed(0)
        model(*tokens()).backward()
        assert all(int(block.ffn.tokens.sum()) == 44 for block in model.layers)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "balance"), [("none", "aux_loss"), ("full", "aux_loss_free")])
def test_compiled_layers(mode: str, balance: str) -> None:
    results = []
    for compiled in (False, True):
        model = moe_model(balance=balance)
        recompute.apply(model, config.Memory("test", mode))
        if compiled:
            torch._dynamo.reset()
            model.compile_layers()
        model(*tokens()).backward()
        results.append([p.grad for p in model.parameters()] + [block.ffn.tokens for block in model.layers])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)


@pytest.mark.gpu
def test_the_host_waits_for_nothing_on_a_gpu() -> None:
    """bf16, one rank: sorting, grouped matmuls, auxiliary loss, counting."""
    model = moe_model(dtype=torch.bfloat16, balance="aux_loss", path="auto").to("cuda")
    balance = Balance(model, model.cfg, Dims(ONE.degrees, 0, torch.device("cuda", 0)))
    data = [part.cuda() for part in tokens()]
    model(*data).backward()  # kernels are built, the allocator warms up
    with no_host_synchronisation(torch.device("cuda", 0)):
        model(*data).backward()
        load = balance.step()
    assert float(load[0]) >= 1
