"""Every pipeline schedule on real ranks against one process: losses, every gradient, the clipped norm, weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, assert_equal_runs, reference
from train.measure.metrics import Meter
from train.parallel.stages import SCHEDULES

WHOLE = [name for name, s in SCHEDULES.items() if not s.split]
ONE = Case("ddp", layers=4, grad_accum=4, pp=2, steps=2)


def check(ranks: Ranks, case: Case, bounds: list[float] | None = None) -> None:
    assert_equal_runs(ranks.run(cases.train, case), reference(case), bounds or [FP64] * case.steps)


@pytest.mark.parametrize("name", SCHEDULES)
def test_alone(two: Ranks, name: str) -> None:
    check(two, replace(ONE, pp_schedule=name))


@pytest.mark.parametrize("name", ("1f1b", "zbv"))
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_with_data_parallel(four: Ranks, reduction: str, name: str) -> None:
    check(four, replace(ONE, reduction=reduction, pp_schedule=name))


def test_with_tensor_parallel(four: Ranks) -> None:
    check(four, replace(ONE, pp_schedule="1f1b", model="even", tp=2))


def measured(rank: int, world: int, folder: Path) -> float:
    """One step through the meter: ranks 1 and 3 have the last stage; the loss that rank 0 wrote."""
    last = rank % 2 == 1
    meter = Meter(
        torch.device("cpu"), rank, world, 1, {}, None, folder / "metrics.jsonl" if rank == 0 else None,
        loss_weight=float(last),
    )  # fmt: skip
    meter.start(0)
    meter.results(torch.tensor(float(rank) if last else 0.0), torch.tensor(1.0), 0.0)
    meter.finish(meter.start(1), last=True)
    return meter.last.get("loss", 0.0)


def test_the_loss_is_the_mean_over_the_ranks_that_have_one(four: Ranks, tmp_path: Path) -> None:
    assert four.run(measured, tmp_path)[0] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("grad_accum", (2, 4, 8))
def test_two_ranks(two: Ranks, reduction: str, name: str, grad_accum: int) -> None:
    """One pipeline of two ranks; under fsdp every rank shards with itself alone."""
    if name == "dualpipev" and grad_accum < 4:
        return
    check(two, replace(ONE, reduction=reduction, pp_schedule=name, grad_accum=grad_accum, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("grad_accum", (4, 8))
def test_four_ranks(four: Ranks, name: str, grad_accum: int) -> None:
    """Four stages, and eight where a rank has two."""
    if name == "dualpipev" and grad_accum < 8:
        return
    check(four, replace(ONE, pp=4, pp_schedule=name, layers=9, grad_accum=grad_accum))


@pytest.mark.slow
@pytest.mark.parametrize("virtual", (1, 2, 3))
def test_zero_bubble_with_stages(two: Ranks, virtual: int) -> None:
    check(two, replace(ONE, pp_schedule="interleaved_zero_bubble", pp_virtual=virtual, layers=7))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("name", SCHEDULES)
def test_pairs_with_data_parallel(four: Ranks, reduction: str, name: str) -> None:
    check(four, replace(ONE, reduction=reduction, pp_schedule=name, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("name", SCHEDULES)
def test_pairs_with_tensor_parallel(four: Ranks, reduction: str, name: str) -> None:
    check(four, replace(ONE, reduction=reduction, pp_schedule=name, model="even", tp=2, qk_norm=True))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("name", SCHEDULES)
def test_pairs_with_context_parallel(four: Ranks, reduction: str, name: str) -> None:
    check(four, replace(ONE, reduction=reduction, pp_schedule=name, model="even", cp=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("1f1b", "zbv"))
@pytest.mark.parametrize("tp", (1, 2))
def test_hsdp_and_triples(eight: Ranks, name: str, tp: int) -> None:
    """pp 2 x dp_replicate 2 x dp_shard 2, and pp 2 x dp_shard 2 x tp 2."""
    check(
        eight,
        replace(ONE, reduction="fsdp", pp_schedule=name, dp_replicate=2 // tp, model="even", tp=tp, grad_accum=2 * tp),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_chunked_head(two: Ranks, name: str) -> None:
    check(two, replace(ONE, pp_schedule=name, memory=(("lm_head_chunk", 5),)))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("recompute", ("full", "selective"))
def test_recompute(two: Ranks, reduction: str, name: str, recompute: str) -> None:
    check(two, replace(ONE, reduction=reduction, pp_schedule=name, memory=(("recompute", recompute),)))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_compiled(two: Ranks, name: str) -> None:
    check(two, replace(ONE, pp_schedule=name, compiled=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("1f1b", "zbv"))
def test_fp32(two: Ranks, name: str) -> None:
    check(two, replace(ONE, reduction="fsdp", dtype="fp32", pp_schedule=name, steps=3), [1e-5, 1e-4, 1e-4])
