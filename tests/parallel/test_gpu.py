"""The same equalities on GPUs: one alone, and two over NCCL. No step may make the host wait (cases.no_host_synchronisation)."""

from dataclasses import replace

import pytest
import torch

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_bitwise import assert_bitwise
from tests.parallel.test_equality import FP64, REDUCTIONS, assert_equal_runs, reference, relative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("grad_accum", (1, 2))
def test_one_gpu(reduction: str, grad_accum: int) -> None:
    case = Case(reduction, grad_accum=grad_accum)
    assert_equal_runs([cases.train(0, 1, replace(case, device="cuda"))], reference(case), [FP64] * 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_gpu_bf16_twice_the_same(reduction: str) -> None:
    first, second = (cases.train(0, 1, Case(reduction, "bf16", device="cuda", model="odd")) for _ in range(2))
    assert_bitwise(first, second)


@pytest.mark.two_gpus
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("grad_accum", (1, 2))
def test_two_gpus(nccl: Ranks, reduction: str, grad_accum: int) -> None:
    case = Case(reduction, grad_accum=grad_accum)
    assert_equal_runs(nccl.run(cases.train, replace(case, device="cuda")), reference(case), [FP64] * 3)


@pytest.mark.two_gpus
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("accumulate", ("once", "every"))
@pytest.mark.parametrize("bucket_mib", (0.0005, 0.01, 25))
def test_zero2o_equals_zero2_over_nccl(nccl: Ranks, dtype: str, accumulate: str, bucket_mib: float) -> None:
    case = Case(
        "zero2", dtype, bucket_mib, accumulate, grad_accum=2, device="cuda", model="odd", widths=(33, 190, 7, 64)
    )
    for a, b in zip(nccl.run(cases.train, case), nccl.run(cases.train, replace(case, reduction="zero2o")), strict=True):
        assert_bitwise(a, b)
        assert b.traffic["steps"] >= 1
        assert all(seconds >= 0 for seconds in b.traffic["exposed_s"].values())


@pytest.mark.two_gpus
@pytest.mark.parametrize("reduction", ("zero2", "zero2o"))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("accumulate", ("once", "every"))
@pytest.mark.parametrize("bucket_mib", (0.0005, 25))
def test_peer_copies_change_no_bit(nccl: Ranks, reduction: str, dtype: str, accumulate: str, bucket_mib: float) -> None:
    """Many small buckets go round the slots often."""
    widths = (33, 190, 7, 64)
    case = Case(
        reduction, dtype, bucket_mib, accumulate, grad_accum=2, device="cuda", model="odd", widths=widths, steps=8
    )
    for a, b in zip(nccl.run(cases.train, case), nccl.run(cases.train, replace(case, transport="peer")), strict=True):
        assert_bitwise(a, b)
        assert a.traffic["bytes"] == b.traffic["bytes"]


@pytest.mark.two_gpus
@pytest.mark.parametrize("method", ("ulysses", "ring"))
@pytest.mark.parametrize("reduction", ("ddp", "zero2o", "fsdp"))
def test_context_parallel_over_nccl(nccl: Ranks, reduction: str, method: str) -> None:
    case = Case(reduction, model="even", cp=2, cp_method=method)
    expected = reference(replace(case, cp=1, cp_method="ulysses"))
    assert_equal_runs(nccl.run(cases.train, replace(case, device="cuda")), expected, [FP64] * 3)


@pytest.mark.two_gpus
@pytest.mark.parametrize("method", ("ulysses", "ring"))
def test_context_parallel_on_flash_in_bf16(nccl: Ranks, method: str) -> None:
    """As in test_equality: within 2 % of fp32 by norm over all gradients of the first step."""
    case = Case("fsdp", "bf16", model="even", cp=2, cp_method=method, steps=1, clip_norm=None, attention="flash")
    out = nccl.run(cases.train, replace(case, device="cuda"))[0]
    want = reference(replace(case, dtype="fp32", cp=1, cp_method="ulysses", attention="math")).gradients[0]
    flat = [torch.cat([g[name].double().flatten() for name in want]) for g in (out.gradients[0], want)]
    assert relative(*flat) < 0.02
