"""Context parallel on real ranks against one process: losses, every gradient, the clipped norm, weights."""

from dataclasses import replace

import pytest

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, REDUCTIONS, assert_equal_runs, reference


def check(ranks: Ranks, case: Case, bounds: list[float] | None = None) -> None:
    expected = reference(replace(case, tp=1, cp=1, cp_method="ulysses"))
    assert_equal_runs(ranks.run(cases.train, case), expected, bounds or [FP64] * case.steps)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_alone(two: Ranks, reduction: str) -> None:
    check(two, Case(reduction, model="even", cp=2, qk_norm=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_data_parallel(four: Ranks, reduction: str) -> None:
    check(four, Case(reduction, model="even", cp=2, grad_accum=2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ring(two: Ranks, reduction: str) -> None:
    check(two, Case(reduction, model="even", cp=2, cp_method="ring", qk_norm=True))


def test_ring4(four: Ranks) -> None:
    check(four, Case("fsdp", model="even", cp=4, cp_method="ring", qk_norm=True))
