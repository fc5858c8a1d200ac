"""zero2 = zero2o bit for bit, and what does not depend on the bucket size."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parallel import cases
from tests.parallel.cases import Case, Outcome
from tests.parallel.ranks import Ranks
from train.parallel.build import build
from train.parallel.dims import Dims

CASES = st.builds(
    Case,
    reduction=st.just("zero2"),
    dtype=st.sampled_from(["fp32", "bf16"]),
    bucket_mib=st.floats(2e-5, 0.02),
    accumulate=st.sampled_from(["once", "every"]),
    grad_accum=st.sampled_from([1, 2]),
    model=st.just("odd"),
    widths=st.lists(st.integers(1, 70), min_size=2, max_size=6).map(tuple),
    unused=st.booleans(),
    clip_norm=st.sampled_from([0.05, None]),
    beta1=st.just(0.9),
)


def assert_bitwise(a: Outcome, b: Outcome) -> None:
    assert a.losses == b.losses
    assert a.norms == b.norms
    for x, y in ((a.gradients, b.gradients), (a.weights, b.weights), ([a.model], [b.model])):
        for step, (left, right) in enumerate(zip(x, y, strict=True)):
            for name, tensor in left.items():
                assert torch.equal(tensor, right[name]), (step, name)


def check(ranks: Ranks, case: Case) -> None:
    first, second = ranks.run(cases.train, case), ranks.run(cases.train, replace(case, reduction="zero2o"))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_zero2o_equals_zero2(two: Ranks, case: Case) -> None:
    check(two, case)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_zero2o_equals_zero2_on_four_ranks(four: Ranks, case: Case) -> None:
    check(four, case)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_zero2o_equals_zero2_many(four: Ranks, case: Case) -> None:
    check(four, case)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_sums_do_not_depend_on_the_bucket_size(four: Ranks, dtype: str) -> None:
    """Before clipping, every summed gradient is the same bit for bit; so are norm and weights here (see adamw.norms)."""
    small, large = (
        four.run(cases.train, Case("zero2o", dtype, bucket_mib=mib, clip_norm=None, steps=1))[0] for mib in (0.002, 25)
    )
    for name, gradient in small.gradients[0].items():
        assert torch.equal(gradient, large.gradients[0][name]), name
    assert small.norms == large.norms


def test_the_sum_is_in_rank_order(four: Ranks) -> None:
    """1 + 2^-24 + 2^-24 + 2^-24 in fp32 is 1 from the left and more than 1 from the right: the owner adds rank 0 first."""
    for reduction in ("zero2", "zero2o"):
        for got in four.run(rank_order, reduction):
            assert got == 1.0
    assert torch.tensor(3 * 2.0**-24) + 1 > 1


def rank_order(rank: int, world: int, reduction: str) -> float:
    case = Case(reduction, dtype="fp32", clip_norm=None)
    model = torch.nn.Linear(1, 1, bias=False)
    cfg = cases.configuration(case)
    dp = build(model, cfg, Dims.of(cfg, world, rank, cases.CPU))
    with dp.micro_step(0, 1):
        dp.module(torch.full((1, 1), 1.0 if rank == 0 else 2.0**-24)).sum().backward()
    dp.step(0.0)
    gradient = float(dp.full("exp_avg")["weight"]) * world
    dp.close()
    return gradient


def test_a_gradient_that_comes_after_its_bucket_has_left_is_an_error(two: Ranks) -> None:
    for message in two.run(backward_twice):
        assert message == "a parameter got a second gradient after its bucket was issued: backward ran twice"


def backward_twice(rank: int, world: int) -> str:
    case = Case("zero2o", dtype="fp32")
    model = torch.nn.Linear(3, 2)
    cfg = cases.configuration(case)
    dp = build(model, cfg, Dims.of(cfg, world, rank, cases.CPU))
    try:
        with dp.micro_step(0, 1):
            for _ in range(2):
                dp.module(torch.ones(1, 3)).sum().backward()
    except RuntimeError as e:
        return str(e)
    finally:
        dp.close()
    return "nothing raised"
