"""Every reduction on 2 and 4 ranks against one process on the same global batch: losses, gradients, norms, weights."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.parallel import cases
from tests.parallel.cases import Case, Outcome
from tests.parallel.ranks import Ranks

REDUCTIONS = ("ddp", "zero2", "zero2o", "zero2rs", "fsdp")
FP64 = 1e-9


@cache
def one_process(case: Case) -> Outcome:
    return cases.train(0, 1, case)


def reference(case: Case) -> Outcome:
    """One process, plain AdamW on all gradients, same rows, micro-batches that hold all ranks' rows."""
    same = {
        "accumulate": None,
        "reshard": None,
        "prefetch": None,
        "dp_replicate": -1,
        "compiled": False,
        "backend": "",
        "memory": (),
    }
    same |= {"pp_schedule": None, "pp_virtual": None}
    return one_process(replace(case, reduction="ddp", tp=1, cp=1, pp=1, **same))


def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖; for b = 0, 0 if a is too."""
    difference, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    return difference if difference == 0 else difference / size if size else float("inf")


def assert_equal_runs(
    outcomes: list[Outcome], expected: Outcome, bounds: list[float], weight_bound: float = 0.0
) -> None:
    """Every tensor of every step within bounds[step] by norm, weights within `weight_bound` if that is more; all ranks hold
    the same."""
    for step, bound in enumerate(bounds):
        losses = [
            o.losses[step] for o in outcomes if not math.isnan(o.losses[step])
        ]  # a pipeline's last stage alone has it
        assert sum(losses) / len(losses) == pytest.approx(expected.losses[step], rel=bound)
        for out in outcomes:
            assert out.norms[step] == outcomes[0].norms[step]
            assert out.norms[step] == pytest.approx(expected.norms[step], rel=bound)
        for got, want, most in (
            (outcomes[0].gradients, expected.gradients, bound),
            (outcomes[0].weights, expected.weights, max(bound, weight_bound)),
        ):
            assert got[step].keys() == want[step].keys()
            for name, tensor in want[step].items():
                assert relative(got[step][name], tensor) <= most, (step, name)
    for out in outcomes[1:]:
        for name, tensor in out.model.items():
            assert torch.equal(tensor, outcomes[0].model[name]), name


def check_fp64(ranks: Ranks, case: Case) -> None:
    assert_equal_runs(ranks.run(cases.train, case), reference(case), [FP64] * case.steps)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_ranks_fp64(two: Ranks, reduction: str) -> None:
    check_fp64(two, Case(reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_four_ranks_fp64(four: Ranks, reduction: str) -> None:
    check_fp64(four, Case(reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_ranks_fp32(two: Ranks, reduction: str) -> None:
    # eps well above rounding noise would hide it, so the bounds are those of sums in another order (design.md)
    case = Case(reduction, dtype="fp32")
    assert_equal_runs(two.run(cases.train, case), reference(case), [1e-5, 1e-4, 1e-4])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_rank_needs_no_process_group(reduction: str) -> None:
    case = Case(reduction)
    assert not torch.distributed.is_initialized()
    assert_equal_runs([cases.train(0, 1, case)], reference(case), [FP64] * 3)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_accumulation(two: Ranks, reduction: str) -> None:
    check_fp64(two, Case(reduction, grad_accum=2))


@pytest.mark.parametrize("reduction", ("zero2", "zero2o", "zero2rs", "fsdp"))
@pytest.mark.parametrize("accumulate", ("once", "every"))
def test_accumulation_at_the_owner(two: Ranks, reduction: str, accumulate: str) -> None:
    check_fp64(two, Case(reduction, grad_accum=4, accumulate=accumulate))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tied_weights(two: Ranks, reduction: str) -> None:
    check_fp64(two, Case(reduction, model="tied"))


@pytest.mark.parametrize("reduction", ("zero2", "zero2o", "zero2rs", "fsdp"))
def test_parameters_without_a_gradient_count_as_zero_gradients(two: Ranks, reduction: str) -> None:
    case = Case(reduction, model="odd", unused=True, bucket_mib=1e-4)
    check_fp64(two, case)
    assert [float(g["sometimes"].norm()) > 0 for g in reference(case).gradients] == [True, False, True]


@pytest.mark.parametrize("reduction", ("zero2", "zero2o", "zero2rs", "fsdp"))
def test_shards_of_odd_and_tiny_tensors(four: Ranks, reduction: str) -> None:
    check_fp64(four, Case(reduction, model="odd", widths=(1, 131, 2, 3)))


@pytest.mark.parametrize("grad_accum", (1, 2))
def test_hsdp(four: Ranks, grad_accum: int) -> None:
    check_fp64(four, Case("fsdp", dp_replicate=2, grad_accum=grad_accum))


def test_fsdp_resharding_to_two_of_four_and_gathering_ahead(four: Ranks) -> None:
    check_fp64(four, Case("fsdp", reshard=2, prefetch=2, grad_accum=2))


@pytest.mark.parametrize("grad_accum", (1, 2))
def test_fsdp_that_keeps_gathered_weights(two: Ranks, grad_accum: int) -> None:
    check_fp64(two, Case("fsdp", reshard=False, grad_accum=grad_accum))


def test_no_clipping_still_gives_the_norm(two: Ranks) -> None:
    clipped, free = (two.run(cases.train, Case("zero2o", clip_norm=c, steps=1))[0] for c in (0.05, None))
    assert clipped.norms == free.norms
    total = torch.stack([g.norm() for g in free.gradients[0].values()]).norm()
    assert float(total) == pytest.approx(free.norms[0], rel=1e-12)
    total = torch.stack([g.norm() for g in clipped.gradients[0].values()]).norm()
    assert float(total) == pytest.approx(0.05, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_layers(two: Ranks, reduction: str) -> None:
    case = Case(reduction, dtype="fp32", compiled=True, backend="inductor")
    assert_equal_runs(two.run(cases.train, case), reference(case), [1e-5, 1e-4, 1e-4])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("model", ("transformer", "tied"))
@pytest.mark.parametrize("grad_accum", (1, 2))
def test_four_ranks_all(four: Ranks, reduction: str, model: str, grad_accum: int) -> None:
    check_fp64(four, Case(reduction, model=model, grad_accum=grad_accum))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bf16_follows_fp32(two: Ranks, reduction: str) -> None:
    """bf16 has 8 significant bits: a gradient within 2 % by norm, over all tensors, of the fp32 one in the first step."""
    out = two.run(cases.train, Case(reduction, dtype="bf16", steps=1, clip_norm=None))[0]
    want = reference(Case(reduction, dtype="fp32", steps=1, clip_norm=None)).gradients[0]
    flat = [torch.cat([g[name].double().flatten() for name in want]) for g in (out.gradients[0], want)]
    assert relative(*flat) < 0.02
    assert all(w.dtype == torch.float32 for w in out.weights[0].values())
    for name, weight in out.model.items():
        assert torch.equal(weight, out.weights[0][name].to(torch.bfloat16)), name
