"""Combinations of degrees at large: what can't be is refused before anything starts, the rest starts and is right."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, assert_equal_runs, reference
from tests.parallel.test_expert import MARGIN, alone
from train.parallel import mesh
from train.sweep import validate

ZERO2 = ("zero2", "zero2o", "zero2rs")
DEGREES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
KEYS = ("parallelism.", "seq_len=", "grad_accum=", "model.", "reduction.", "attention=")

combinations = st.tuples(
    st.sampled_from([1, 2, 2, 4, 4, 4, 6, 8, 8, 16]),
    st.builds(
        Case,
        reduction=st.sampled_from(["ddp", "fsdp", "zero2", "zero2o", "zero2rs"]),
        dp_replicate=st.sampled_from([-1, -1, -1, 1, 2, 4]),
        tp=DEGREES,
        cp=DEGREES,
        cp_method=st.sampled_from(["ulysses", "ring"]),
        pp=DEGREES,
        layers=st.sampled_from([2, 3, 4]),
        grad_accum=st.sampled_from([1, 2, 4]),
        reshard=st.sampled_from([None, None, True, False, 2]),
        ep=st.sampled_from([1, 1, 1, 2, 4, 16]),
        model=st.sampled_from(["even", "even", "even_tied", "even_moe", "even_moe"]),
        attention=st.just("flash"),
    ),
)


def verdict(nproc: int, case: Case) -> str | None:
    cfg = cases.configuration(case)
    cfg.device, cfg.micro_batch, cfg.reduction.bucket_mib = "cpu", 1, None
    return validate.combination(cfg, nproc)


def possible(nproc: int, c: Case) -> bool:
    """The rules said once more, in another way: heads 8, KV heads 4, FFN 40, vocabulary 64, 16 positions, 8 experts."""
    if nproc % (c.pp * c.tp * c.cp):
        return False
    data = nproc // (c.pp * c.tp * c.cp)
    if c.reduction in ZERO2:
        layout = c.tp == c.pp == 1 and c.dp_replicate in (-1, 1)
    elif c.reduction == "ddp":
        layout = c.dp_replicate in (-1, data)
    else:
        layout = c.dp_replicate == -1 or data % c.dp_replicate == 0
    copies = 1 if c.dp_replicate == -1 else c.dp_replicate
    shards = 1 if c.reduction == "ddp" else data // copies if data >= copies else 0
    heads, kv_heads = 8 // c.tp, 4 // c.tp
    cut = c.tp in (1, 2, 4) and 16 % (c.cp * c.tp * (2 if c.cp_method == "ring" and c.cp > 1 else 1)) == 0
    if cut and c.cp > 1 and c.cp_method == "ulysses":
        cut = heads % c.cp == 0 and (kv_heads % c.cp == 0 or c.cp % kv_heads == 0)
    stages = c.pp == 1 or (
        c.layers >= c.pp and c.grad_accum >= c.pp and c.model != "even_tied" and c.reshard in (None, False)
    )
    reshard = c.reshard is None or c.reduction == "fsdp"
    if reshard and c.reshard == 2:
        reshard = c.tp == c.ep == 1 and shards * c.cp > 2 and shards * c.cp % 2 == 0
    experts = c.ep == 1 or (
        c.model == "even_moe" and c.reduction not in ZERO2 and 8 % c.ep == 0 and (shards * c.cp * c.tp) % c.ep == 0
    )
    return layout and cut and stages and reshard and experts


@settings(max_examples=500, deadline=None)
@given(combinations)
def test_the_impossible_is_refused_with_its_key_and_nothing_else_is(combination: tuple[int, Case]) -> None:
    nproc, case = combination
    why = verdict(nproc, case)
    assert (why is None) == possible(nproc, case), why
    if why is not None:
        assert why.startswith(KEYS) and ": " in why, why
    else:
        degrees = mesh.resolve(cases.configuration(case), nproc)
        assert nproc == degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]


def drawn(count: int, world: int) -> list[Case]:
    """Cases of `world` ranks that may be, with at least two dimensions, always the same ones."""
    draw = random.Random(world)
    found: list[Case] = []
    while len(found) < count:
        case = Case(
            draw.choice(("ddp", "fsdp", "zero2", "zero2o", "zero2rs")),
            dp_replicate=draw.choice((-1, -1, 1, 2)), tp=draw.choice((1, 2, 4)), cp=draw.choice((1, 2, 4)),
            cp_method=draw.choice(("ulysses", "ring")), pp=draw.choice((1, 2, 4)), layers=4,
            grad_accum=draw.choice((1, 2, 4)), model="even", attention="flash", qk_norm=draw.random() < 0.5,
        )  # fmt: skip
        fits = (
            verdict(world, case) is None
            and cases.ROWS % (world * case.grad_accum // (case.tp * case.cp * case.pp)) == 0
        )
        if fits and (case.tp > 1) + (case.cp > 1) + (case.pp > 1) >= min(2, world // 2 - 1) and case not in found:
            found.append(case)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(10, 4), ids=lambda c: f"{c.reduction}-tp{c.tp}-cp{c.cp}-pp{c.pp}-{c.cp_method}")
def test_four_ranks_start_and_are_right(four: Ranks, case: Case) -> None:
    assert_equal_runs(four.run(cases.train, case), reference(case), [FP64] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(12, 8), ids=lambda c: f"{c.reduction}-tp{c.tp}-cp{c.cp}-pp{c.pp}-{c.cp_method}")
def test_eight_ranks_start_and_are_right(eight: Ranks, case: Case) -> None:
    assert_equal_runs(eight.run(cases.train, case), reference(case), [FP64] * 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"reduction": "fsdp", "ep": 4, "tp": 2, "dp_replicate": 2},
        {"reduction": "fsdp", "ep": 2, "cp": 2, "tp": 2},
        {"reduction": "fsdp", "ep": 8, "cp": 2},
        {"reduction": "fsdp", "ep": 2, "tp": 2, "pp": 2, "grad_accum": 2},
        {"reduction": "ddp", "ep": 4, "cp": 2, "tp": 2},
    ],
    ids=str,
)
def test_eight_ranks_with_experts(eight: Ranks, layout: dict[str, Any]) -> None:
    case = Case(model="even_moe", balance="aux_loss_free", **layout)
    assert verdict(8, case) is None
    expected = alone(case)
    assert expected.margin > MARGIN
    assert_equal_runs(eight.run(cases.train, case), expected, [FP64] * 3)
