"""compile.kernels under every reduction and mesh: the plain model's run, in fp64."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo

from tests.kernels import given
from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_bitwise import assert_bitwise
from tests.parallel.test_equality import FP64, assert_equal_runs, reference
from train.kernels import loss
from train.kernels.adamw import FusedAdamW
from train.model.transformer import Transformer
from train.parallel.build import build
from train.parallel.dims import Dims


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(replace(case, kernels="inductor"))
    assert_equal_runs(ranks.run(cases.train, case), expected, [FP64] * case.steps)


def test_the_cases_have_them() -> None:
    case = Case("ddp", kernels=given.ALL)
    cfg = cases.configuration(case)
    model = cases.make_model(case, cfg)
    assert isinstance(model, Transformer) and model.loss is loss.fused_loss
    dp = build(model, cfg, Dims.of(cfg, 1, 0, torch.device("cpu")))
    assert all(isinstance(owner, FusedAdamW) for owner in dp.owners())


@pytest.mark.parametrize("reduction", ["ddp", "zero2", "zero2o", "zero2rs", "fsdp"])
def test_two_ranks(two: Ranks, reduction: str) -> None:
    check(two, Case(reduction, kernels=given.ALL, grad_accum=2))


@pytest.mark.parametrize("reduction", ["zero2o", "fsdp"])
def test_parameters_without_a_gradient(two: Ranks, reduction: str) -> None:
    check(two, Case(reduction, model="odd", unused=True, bucket_mib=1e-4, kernels="adamw"))


@pytest.mark.parametrize(
    "case",
    [
        Case("fsdp", model="even", tp=2, kernels="adamw+swiglu+rope+norm"),
        Case("fsdp", model="even", cp=2, kernels=given.ALL, memory=(("recompute", "full"),)),
        Case("ddp", model="even", cp=2, compiled=True, kernels="norm"),  # in pieces: see train.kernels.norm.normed
        Case("ddp", model="even", pp=2, grad_accum=2, kernels=given.ALL),
        Case("zero2o", kernels=given.ALL, memory=(("recompute", "selective"), ("lm_head_chunk", 7))),
        Case("ddp", kernels=given.ALL, memory=(("activation_offload", True),)),
        Case("ddp", model="even_moe", layers=1, kernels="norm", memory=(("recompute", "full"),)),
        Case("ddp", kernels=given.STACKED, grad_accum=2),
        Case("zero2", kernels=given.STACKED, bucket_mib=1e-4),
        Case("zero2o", kernels=given.STACKED, grad_accum=2),
        Case("zero2rs", kernels=given.STACKED + "+carry", compiled=True, bucket_mib=25),
        Case("ddp", model="even", tp=2, kernels="adamw+norm+stacked"),
        Case("ddp", model="even", pp=2, grad_accum=2, kernels=given.STACKED),
        pytest.param(
            Case("ddp", model="even", tp=2, compiled=True, kernels="adamw+norm+stacked+carry"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda c: f"{c.reduction}-tp{c.tp}-cp{c.cp}-pp{c.pp}-{c.kernels.rpartition('+')[2]}{'-compiled' * c.compiled}",
)
def test_meshes_and_levers(two: Ranks, case: Case) -> None:
    check(two, case)


@pytest.mark.parametrize(
    "case",
    [
        Case("zero2o", "bf16", layers=3, grad_accum=2),
        Case("fsdp", "bf16", layers=3),
        pytest.param(Case("ddp", model="even", tp=2), marks=pytest.mark.slow),
    ],
    ids=lambda c: f"{c.reduction}-tp{c.tp}",
)
def test_layers_that_carry_their_sum_on(two: Ranks, case: Case) -> None:
    """The same bits, from graphs that round as eager layers do."""
    for plain, carried in two.run(with_and_without_carry, replace(case, compiled=True)):
        assert_bitwise(plain, carried)


def with_and_without_carry(rank: int, world: int, case: Case) -> list[cases.Outcome]:
    outcomes = []
    for kernels in ("adamw", "adamw+carry"):
        torch._dynamo.reset()  # compiled code has limits a process
        outcomes.append(cases.train(rank, world, replace(case, kernels=kernels)))
    return outcomes


def test_stacked_zero2o_is_zero2_bit_for_bit(two: Ranks) -> None:
    case = Case("zero2", "bf16", kernels=given.STACKED, grad_accum=2, bucket_mib=0.002)
    for a, b in zip(two.run(cases.train, case), two.run(cases.train, replace(case, reduction="zero2o")), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("reduction", ["ddp", "zero2o"])
def test_bf16_weights_are_their_masters_rounded(two: Ranks, reduction: str) -> None:
    for out in two.run(cases.train, Case(reduction, dtype="bf16", kernels=given.ALL)):
        assert all(torch.equal(w, out.weights[-1][name].bfloat16()) for name, w in out.model.items())


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize(
    "case",
    [
        *(Case(reduction, grad_accum=2, kernels=given.ALL) for reduction in ("ddp", "zero2", "zero2o", "fsdp")),
        *(Case(reduction, grad_accum=2, kernels=given.STACKED) for reduction in ("ddp", "zero2", "zero2o")),
        Case("zero2o", grad_accum=2, kernels=given.STACKED, transport="peer"),
    ],
    ids=lambda c: f"{c.reduction}-{c.kernels.rpartition('+')[2]}-{c.transport}",
)
def test_two_gpus(nccl: Ranks, case: Case) -> None:
    expected = reference(replace(case, kernels="inductor", transport=None))
    assert_equal_runs(nccl.run(cases.train, replace(case, device="cuda")), expected, [FP64] * 3)
