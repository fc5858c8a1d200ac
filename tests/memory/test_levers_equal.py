"""Every lever against the plain run, alone and in pairs, on one rank and on two: bit for bit, or within a stated bound."""

from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from tests.memory import cases
from tests.memory.cases import Case, Outcome
from tests.parallel.ranks import Ranks

REDUCTIONS = ("ddp", "zero2", "zero2o", "zero2rs", "fsdp")
#: the same kernels on the same numbers: not a bit may differ
EXACT: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every_second": {"recompute": "full", "every": 2},
    "activation_offload": {"activation_offload": True, "max_inflight_activations": 2},
    "optimizer": {"optimizer_offload": "optimizer"},
    "host": {"optimizer_offload": "full"},
}
HEAD = {"lm_head_chunk": 7}
TIGHT = {
    "recompute": "full",
    "activation_offload": True,
    "max_inflight_activations": 1,
    **HEAD,
    "optimizer_offload": "optimizer",
}


@cache
def _one(reduction: str, dtype: str, accum: int, memory: tuple[tuple[str, Any], ...]) -> Outcome:
    return cases.train(0, 1, Case(reduction, dtype, dict(memory), grad_accum=accum))


def one(case: Case, memory: dict[str, Any]) -> Outcome:
    return _one(case.reduction, case.dtype, case.grad_accum, tuple(sorted(memory.items())))


def assert_same(got: Outcome, want: Outcome) -> None:
    assert got.losses == want.losses
    assert got.norms == pytest.approx(want.norms, rel=1e-6)  # on the host the squares are added by the CPU
    for which in ("weights", "state", "model"):
        a, b = getattr(got, which), getattr(want, which)
        assert a.keys() == b.keys()
        assert not [name for name in b if not torch.equal(a[name], b[name])]


def distance(got: Outcome, want: Outcome) -> float:
    return max(float((got.weights[n] - w).norm() / w.norm()) for n, w in want.weights.items())


def pairs() -> list[tuple[str, str]]:
    """All that can be: one recompute mode, one optimizer."""
    kinds = [{"full", "selective", "every_second"}, {"optimizer", "host"}]
    return [(a, b) for a, b in combinations(EXACT, 2) if not any({a, b} <= kind for kind in kinds)]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lever", EXACT)
def test_alone(lever: str, dtype: str) -> None:
    case = Case("ddp", dtype)
    assert_same(one(case, EXACT[lever]), one(case, {}))


@pytest.mark.parametrize(("a", "b"), pairs(), ids="+".join)
def test_in_pairs(a: str, b: str) -> None:
    case = Case("ddp")
    assert_same(one(case, EXACT[a] | EXACT[b]), one(case, {}))


@pytest.mark.parametrize("lever", EXACT)
def test_head_with_each_other_lever(lever: str) -> None:
    case = Case("ddp")
    assert_same(one(case, EXACT[lever] | HEAD), one(case, HEAD))


def test_head_alone_within_rounding() -> None:
    assert distance(one(Case("ddp", "fp64"), HEAD), one(Case("ddp", "fp64"), {})) < 1e-12


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "memory",
    [EXACT["selective"] | EXACT["activation_offload"] | EXACT["optimizer"], EXACT["host"]],
    ids=["device", "host"],
)
def test_each_reduction_on_two_ranks(two: Ranks, reduction: str, memory: dict[str, Any]) -> None:
    case = Case(reduction)
    for got, want in zip(two.run(cases.train, case.with_(memory)), two.run(cases.train, case), strict=True):
        assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accum", [1, 2])
def test_every_lever_with_every_reduction(two: Ranks, reduction: str, dtype: str, accum: int) -> None:
    case = Case(reduction, dtype, grad_accum=accum)
    plain = two.run(cases.train, case)
    for memory in EXACT.values():
        for got, want in zip(two.run(cases.train, case.with_(memory)), plain, strict=True):
            if memory.get("optimizer_offload") != "full" or dtype == "fp32" or accum == 1:
                assert_same(got, want)
            else:  # micro-batches add up in fp32 on the host, in bf16 on the device
                assert distance(got, want) < 0.02
    for head, all_on in zip(
        two.run(cases.train, case.with_(HEAD)), two.run(cases.train, case.with_(TIGHT)), strict=True
    ):
        assert_same(all_on, head)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["ddp", "zero2o", "fsdp"])
def test_compiled(two: Ranks, reduction: str) -> None:
    """Inductor's numbers with and without the levers that don't change a graph; recompute within fp32 rounding."""
    from dataclasses import replace

    case = replace(Case(reduction), compiled=True)
    plain = two.run(cases.train, case)
    for got, want in zip(
        two.run(cases.train, case.with_(EXACT["activation_offload"] | EXACT["optimizer"])), plain, strict=True
    ):
        assert_same(got, want)
    budget = {"recompute": "budget", "budget": 0.5}
    for memory in (EXACT["full"], EXACT["selective"], budget, TIGHT):
        assert (
            distance(two.run(cases.train, case.with_(memory))[0], plain[0]) < 1e-3
        )  # a step of AdamW magnifies rounding
