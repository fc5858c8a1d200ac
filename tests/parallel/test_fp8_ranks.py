"""fp8 on real ranks: every reduction and every dimension against one process in fp32, on the same weights and rows.

A part of a tensor has a scale of its own, so layouts agree within fp8's rounding, not bit for bit. A gradient that is not
reduced, or reduced twice, is off by half or by all of itself.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parallel import cases
from tests.parallel.cases import Case, Outcome
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import REDUCTIONS, reference, relative
from train.parallel import pipeline

BOUND = 0.1  # of all gradients of a step by norm, over two layers: see tests/model/test_fp8.py for that of one matmul


ZBV = {"pp": 2, "pp_schedule": "zbv", "layers": 4, "grad_accum": 4}  # takes dx and dw apart


def case(reduction: str, scaling: str = "tensorwise", **keys: object) -> Case:
    return Case(reduction, "fp8", scaling, model="even", steps=1, clip_norm=None, **keys)  # type: ignore[arg-type]


def flat(gradients: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in names])


def check(ranks: Ranks, which: Case) -> list[Outcome]:
    """Gradients, their norm and the loss of the first step."""
    outcomes = ranks.run(cases.train, which)
    plain = reference(replace(which, dtype="fp32", grad_accum=1))  # the scaling stays: it names the shape
    want, got = plain.gradients[0], outcomes[0].gradients[0]
    assert got.keys() == want.keys()
    assert 0.001 < relative(flat(got, list(want)), flat(want, list(want))) < BOUND
    losses = [out.losses[0] for out in outcomes if out.losses[0] == out.losses[0]]
    assert sum(losses) / len(losses) == pytest.approx(plain.losses[0], rel=2e-3)
    assert len({out.norms[0] for out in outcomes}) == 1
    assert outcomes[0].norms[0] == pytest.approx(plain.norms[0], rel=0.02)
    return outcomes


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(two: Ranks, reduction: str) -> None:
    check(two, case(reduction, grad_accum=2))


@pytest.mark.parametrize(
    "keys", [{"tp": 2}, {"cp": 2}, {"cp": 2, "cp_method": "ring"}, {"pp": 2, "grad_accum": 2}, ZBV], ids=str
)
@pytest.mark.parametrize("scaling", ("tensorwise", "rowwise"))
def test_dimensions(two: Ranks, scaling: str, keys: dict[str, object]) -> None:
    if keys is ZBV and not pipeline.splits_fp8():
        with pytest.raises(AssertionError, match="parallelism.pp_schedule=zbv: torch .* can't run the two backwards"):
            check(two, case("fsdp", scaling, **keys))
        return
    check(two, case("fsdp", scaling, **keys))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"tp": 2}, {"cp": 2}, {"memory": (("recompute", "full"),)}], ids=str)
def test_compiled(two: Ranks, keys: dict[str, object]) -> None:
    check(two, case("fsdp", compiled=True, **keys))


@pytest.mark.parametrize("scaling", ("tensorwise", "rowwise"))
def test_masters_stay_fp32_and_buckets_change_no_bit(two: Ranks, scaling: str) -> None:
    """zero2o equals zero2 as ever: all that they see are bf16 weights and gradients."""
    one, other = (two.run(cases.train, replace(case(r, scaling), steps=3)) for r in ("zero2", "zero2o"))
    for a, b in zip(one, other, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        for name, weight in a.weights[-1].items():
            assert weight.dtype == torch.float32 and torch.equal(weight, b.weights[-1][name]), name
            assert a.model[name].dtype == torch.bfloat16 and torch.equal(a.model[name], weight.bfloat16()), name


@pytest.mark.parametrize("lever", ["full", "selective"])
def test_recompute(two: Ranks, lever: str) -> None:
    """The same bits as without, over ranks as in one process."""
    kept, again = (two.run(cases.train, case("zero2o", memory=memory))[0]
                   for memory in ((), (("recompute", lever),)))  # fmt: skip
    assert all(torch.equal(again.gradients[0][name], g) for name, g in kept.gradients[0].items())
