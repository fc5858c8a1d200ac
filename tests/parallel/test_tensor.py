"""Tensor parallel on real ranks against one process: losses, every gradient, the clipped norm, weights."""

import pytest

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, assert_equal_runs, reference


def check(ranks: Ranks, case: Case, bounds: list[float] | None = None) -> None:
    assert_equal_runs(ranks.run(cases.train, case), reference(case), bounds or [FP64] * case.steps)


@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("model", ("even", "even_tied"))
def test_alone(two: Ranks, reduction: str, model: str) -> None:
    check(two, Case(reduction, model=model, tp=2, qk_norm=True))


@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_with_data_parallel(four: Ranks, reduction: str) -> None:
    check(four, Case(reduction, model="even", tp=2, grad_accum=2))


def test_fp32(two: Ranks) -> None:
    check(two, Case("fsdp", model="even", dtype="fp32", tp=2), [1e-5, 1e-4, 1e-4])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_compiled(four: Ranks, reduction: str) -> None:
    check(four, Case(reduction, model="even", tp=2, compiled=True))


LEVERS = {
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective", "every": 2},
    "activation offload": {"activation_offload": True},
    "optimizer offload": {"optimizer_offload": "optimizer"},
    "chunked head": {"lm_head_chunk": 20},
}


@pytest.mark.parametrize(
    "lever", [pytest.param(k, marks=pytest.mark.slow if k != "chunked head" else ()) for k in LEVERS]
)
def test_with_memory_levers(two: Ranks, lever: str) -> None:
    check(two, Case("fsdp", model="even", tp=2, memory=tuple(LEVERS[lever].items())))
