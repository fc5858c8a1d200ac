"""Mixtures of experts on real ranks against one process: losses, every gradient, the clipped norm, weights, biases.

Routing is discontinuous: a case in which two experts' scores nearly tie is a bad test, and fails as one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel import cases, expert_cases
from tests.parallel.cases import Case, Outcome
from tests.parallel.nobody import fake_group
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, assert_equal_runs, reference
from train import config
from train.model.transformer import Transformer
from train.parallel import expert, mesh
from train.parallel.build import build
from train.parallel.dims import Dims

MARGIN = 1e-7  # of scores between 0 and 1, in fp64: far above rounding, and met by thousands of tokens


def moe(reduction: str, **changes: object) -> Case:
    return Case(reduction, model="even_moe", **changes)  # type: ignore[arg-type]


def alone(case: Case) -> Outcome:
    """The same in one process, eager, nothing recomputed."""
    return reference(replace(case, tp=1, cp=1, pp=1, ep=1, memory=()))


def check(ranks: Ranks, case: Case) -> None:
    expected = alone(case)
    assert MARGIN < expected.margin < 0.1, f"a bad test: two experts' scores are {expected.margin:.1e} apart"
    outcomes = ranks.run(cases.train, case)
    assert_equal_runs(outcomes, expected, [FP64] * case.steps)
    for out in outcomes:
        assert out.imbalance == expected.imbalance
        assert out.routing.keys() == expected.routing.keys()
        for name, tensor in expected.routing.items():
            assert torch.equal(out.routing[name], tensor), name


def test_ep_alone(two: Ranks) -> None:
    check(two, moe("fsdp", ep=2, balance="aux_loss_free"))


@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_over_tp(two: Ranks, reduction: str) -> None:
    check(two, moe(reduction, tp=2, ep=2, balance="aux_loss"))


def test_with_fsdp(four: Ranks) -> None:
    check(four, moe("fsdp", ep=2, grad_accum=2, balance="aux_loss_free"))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "zero2", "zero2o", "zero2rs", "fsdp"))
@pytest.mark.parametrize("balance", ("aux_loss", "aux_loss_free"))
def test_every_reduction_without_ep(four: Ranks, reduction: str, balance: str) -> None:
    check(four, moe(reduction, balance=balance))


@pytest.mark.slow
@pytest.mark.parametrize("balance", ("aux_loss", "aux_loss_free"))
@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 4},
        {"ep": 2, "dp_replicate": 2},  # hsdp
        {"ep": 2, "dp_replicate": 2, "reshard": False},
        {"ep": 1, "tp": 2},
        {"ep": 2, "tp": 2},
        {"ep": 4, "tp": 2},
        {"ep": 2, "tp": 2, "dp_replicate": 2},
        {"ep": 4, "tp": 4},
    ],
    ids=str,
)
def test_layouts_of_fsdp(four: Ranks, layout: dict[str, int], balance: str) -> None:
    check(four, moe("fsdp", balance=balance, **layout))


@pytest.mark.slow
@pytest.mark.parametrize("balance", ("aux_loss", "aux_loss_free"))
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}], ids=str)
def test_layouts_of_ddp(four: Ranks, layout: dict[str, int], balance: str) -> None:
    check(four, moe("ddp", balance=balance, **layout))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_accumulation(four: Ranks, reduction: str) -> None:
    check(four, moe(reduction, tp=2, ep=2, grad_accum=2, balance="aux_loss_free"))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ("full", "selective"))
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_recompute(four: Ranks, recompute: str, layout: dict[str, int]) -> None:
    """The same routing and the same gradients; and tokens are counted once."""
    check(four, moe("fsdp", memory=(("recompute", recompute),), balance="aux_loss_free", **layout))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("layout", [{"cp": 2, "ep": 2}, {"cp": 2, "tp": 2, "ep": 4}, {"cp": 4, "ep": 4}], ids=str)
def test_with_cp(four: Ranks, reduction: str, layout: dict[str, int]) -> None:
    check(four, moe(reduction, balance="aux_loss", **layout))


RECOMPUTED = {"ep": 2, "grad_accum": 4, "compiled": True, "memory": (("recompute", "full"),)}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"ep": 2}, {"tp": 2, "ep": 2}, RECOMPUTED], ids=str)
def test_with_pp(four: Ranks, changes: dict[str, Any]) -> None:
    """A stage knows the load of its own layers; under recompute of several micro-batches each has its own choice."""
    reduction = "fsdp" if "ep" in changes and "tp" not in changes else "ddp"
    case = moe(reduction, pp=2, balance="aux_loss_free", **{"grad_accum": 2, **changes})
    expected = alone(case)
    outcomes = four.run(cases.train, case)
    assert_equal_runs(outcomes, expected, [FP64] * case.steps)
    seen = [out.routing for out in outcomes]
    assert {name for routing in seen for name in routing} == set(expected.routing)
    for name, tensor in ((name, t) for routing in seen for name, t in routing.items()):
        assert torch.equal(tensor, expected.routing[name]), name


@pytest.mark.slow
def test_ranks_without_tokens(four: Ranks) -> None:
    """Two choices of 8 experts by bias alone: six experts, and so at least two ranks, have nothing to do."""
    check(four, moe("fsdp", ep=4, balance="aux_loss_free", balance_coef=50.0))


def test_resumed_equals_uninterrupted(two: Ranks, tmp_path: Path) -> None:
    """Biases and counts too."""
    assert two.run(expert_cases.resumed, moe("fsdp", ep=2, balance="aux_loss_free"), tmp_path) == [[], []]


def test_bytes_sent(two: Ranks) -> None:
    """A row that leaves its rank goes there with a weight and comes back, in forward and in backward; others aren't sent."""
    outcomes = two.run(cases.train, moe("fsdp", ep=2, steps=1))
    sent = sum(out.traffic["bytes"]["ep_all_to_all"] for out in outcomes)
    of_a_row = 2 * (24 + 1 + 24) * 8  # dim 24, fp64
    rows = 2 * cases.ROWS * cases.SEQ[True] * 2  # layers, tokens, experts of a token
    assert sent % of_a_row == 0 and 0.3 * rows < sent / of_a_row < 0.7 * rows


@pytest.mark.slow
def test_fp32(two: Ranks) -> None:
    case = moe("fsdp", ep=2, dtype="fp32")
    expected = alone(case)
    assert expected.margin > 1e-6
    assert_equal_runs(two.run(cases.train, case), expected, [1e-5, 1e-4, 1e-4])


@pytest.mark.slow
def test_compiled(two: Ranks) -> None:
    """The exchange stays out of the graph, which breaks there."""
    check(two, moe("fsdp", ep=2, compiled=True, balance="aux_loss_free"))


@pytest.mark.parametrize(
    "layout", [{"ep": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"tp": 2, "ep": 2}, {"cp": 2}))], ids=str
)
def test_compiled_layers_that_recompute(two: Ranks, layout: dict[str, int]) -> None:
    """In pieces, recompute around them: the same routing, and tokens are counted once."""
    check(two, moe("fsdp", compiled=True, memory=(("recompute", "full"),), balance="aux_loss_free", **layout))


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_what_runs_again(two: Ranks, compiled: bool) -> None:
    """As HFU counts it: of two layers all but w_down's matmuls, and all that is sent but the results on their way home."""
    case = moe("fsdp", ep=2, steps=1, compiled=compiled, memory=(("recompute", "full"),))
    assert two.run(expert_cases.experts_run, case) == [(4, 2)] * 2
    once, again = (
        sum(out.traffic["bytes"]["ep_all_to_all"] for out in two.run(cases.train, c))
        for c in (replace(case, memory=()), case)
    )
    rows = once / (2 * (24 + 1 + 24))  # dim 24, and a weight
    assert again - once == rows * (24 + 1)


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_the_choice_is_kept_where_scores_tie(two: Ranks, compiled: bool) -> None:
    """Scores that change by chance from call to call: the gradients of a run without recompute."""
    assert two.run(expert_cases.undecided, moe("fsdp", ep=2, compiled=compiled)) == [[], []]


def test_compiled_layers_that_keep_operators_are_refused() -> None:
    cfg = cases.configuration(moe("fsdp", ep=2, compiled=True, memory=(("recompute", "selective"),)))
    why = "memory.recompute=selective: torch can't keep parts of a layer that ep has compiled in pieces; use full, or"
    with pytest.raises(config.ConfigError, match=why):
        mesh.check_model(cfg, mesh.resolve(cfg, 2))


@pytest.mark.parametrize("reduction", ("none", "fsdp"))
def test_fake_tensors_travel_in_equal_parts(reduction: str) -> None:
    """Rank 5 of 64, experts over 8, on tensors without contents: counts can't be read."""
    cfg = cases.configuration(Case("fsdp", model="even_moe", ep=8, dtype="fp32", balance="aux_loss"))
    with fake_group(64, 5):
        dims = Dims.of(cfg, 64, 5, torch.device("cpu"))
        assert [dims.group("ep").size(), dims.expert_shard_mesh.size(), dims.shard_mesh.size()] == [8, 8, 64]
        _steps_on_fake_tensors(cfg, dims, reduction)


def _steps_on_fake_tensors(cfg: config.Train, dims: Dims, reduction: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Transformer(cfg.model, "math")
        expert.apply(model, cfg, dims)
        assert model.layers[0].ffn.experts.w_up.shape == (1, 24, 24)  # type: ignore[union-attr]
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        if reduction == "none":
            model(tokens, tokens).backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        else:
            dp = build(model, cfg, dims)
            with dp.micro_step(0, 1):
                dp.module(tokens, tokens).backward()
            assert dp.step(1e-3).shape == ()
            sent = dp.traffic()["bytes"]["ep_all_to_all"]
            assert sent == 2 * (64 - 8) * 2 * (24 + 1 + 24) * 4  # layers, rows but an eighth, a row's numbers, fp32
            dp.close()
