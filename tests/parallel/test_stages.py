"""Pipelines by rule, without ranks: splits, who has what, what is refused, and the bubble of an order."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from tests.parallel.nobody import fake_group
from train import config
from train.parallel import stages
from train.parallel.pipeline import schedule_class
from train.parallel.stages import SCHEDULES, Action, Plan, balanced, idle
from train.sweep import validate


def make(layers: int = 8, **keys: Any) -> config.Train:
    names = config.Parallelism.__dataclass_fields__
    parallelism = config.Parallelism("test", **{k: keys.pop(k) for k in list(keys) if k in names})
    model = config.Model("test", 64, layers, 4, 2, 16, 128, 2048, tied=keys.pop("tied", False))
    named = {
        "reduction": config.Reduction("ddp"), "memory": config.Memory("none"), "compile": config.Compile("none"),
        "attention": config.Attention("auto"), "precision": config.Precision("fp32"), "optim": config.Optim("adamw"),
        "data": config.Data("fake"), "device": "cpu",
    }  # fmt: skip
    return config.Train(model=model, parallelism=parallelism, **named | keys)


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        (
            "grad_accum=3: parallelism.pp=4 with pp_schedule=1f1b needs at least 4 micro-batches a step",
            {"pp": 4, "grad_accum": 3},
        ),
        (
            "grad_accum=7: parallelism.pp=4 with pp_schedule=dualpipev needs at least 8 micro-batches a step",
            {"pp": 4, "pp_schedule": "dualpipev", "grad_accum": 7},
        ),
        (
            "grad_accum=9: pp_schedule=interleaved_1f1b takes them in 2 rounds of equal size; pp=4 (nearest: 8, 10)",
            {"pp": 4, "pp_virtual": 2, "grad_accum": 9},
        ),
        (
            "parallelism.pp_virtual=2: pp_schedule=gpipe has 1 stages a rank",
            {"pp": 2, "pp_schedule": "gpipe", "pp_virtual": 2, "grad_accum": 4},
        ),
        (
            "parallelism.pp_virtual=1: pp_schedule=interleaved_1f1b has 2 or more stages a rank",
            {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_virtual": 1, "grad_accum": 4},
        ),
        (
            "parallelism.pp_virtual=3: pp_schedule=zbv has 2 stages a rank",
            {"pp": 2, "pp_schedule": "zbv", "pp_virtual": 3, "grad_accum": 4},
        ),
        (
            "parallelism.pp=4: pp=4 x pp_virtual=3 makes 12 stages of at least one layer; model.layers=8",
            {"pp": 4, "pp_virtual": 3, "grad_accum": 4},
        ),
        (
            "parallelism.pp_split=[8,0]: must be pp x pp_virtual = 2 numbers, each at least 1, that add up to model.layers=8",
            {"pp": 2, "pp_split": [8, 0], "grad_accum": 4},
        ),
        (
            "parallelism.pp_split=[3,3,2]: must be pp x pp_virtual = 2 numbers, each at least 1, that add up to model.layers=8",
            {"pp": 2, "pp_split": [3, 3, 2], "grad_accum": 4},
        ),
        ("parallelism.pp_virtual=2: goes with parallelism.pp above 1 only", {"pp": 1, "pp_virtual": 2}),
        (
            "model.tied=true: embedding and head lie on different stages; parallelism.pp=2 needs false",
            {"pp": 2, "grad_accum": 4, "tied": True},
        ),
        (
            "parallelism.pp=2: zero2o goes with cp only; ddp and fsdp go with tp, pp, cp and ep",
            {"pp": 2, "grad_accum": 4, "reduction": config.Reduction("zero2o")},
        ),
        (
            "reduction.reshard_after_forward=true: with parallelism.pp=2 gathered weights stay and gradients are reduced "
            "once a step; leave it out",
            {"pp": 2, "grad_accum": 4, "reduction": config.Reduction("fsdp", reshard_after_forward=True)},
        ),
        (
            "compile=layer: pp_schedule=zbv runs backward in two parts, each of which would start over; goes with gpipe, "
            "1f1b, interleaved_1f1b, looped_bfs",
            {"pp": 2, "grad_accum": 4, "pp_schedule": "zbv", "compile": config.Compile("layer")},
        ),
        (
            "memory.recompute=full: pp_schedule=interleaved_zero_bubble runs backward in two parts, each of which would "
            "start over; goes with gpipe, 1f1b, interleaved_1f1b, looped_bfs",
            {
                "pp": 2, "grad_accum": 4, "pp_schedule": "interleaved_zero_bubble",
                "memory": config.Memory("x", "full"),
            },
        ),
    ],
)  # fmt: skip
def test_refused(message: str, keys: dict[str, Any]) -> None:
    assert validate.combination(make(**keys), 4) == message


def test_an_unknown_schedule_is_bad_input() -> None:
    with pytest.raises(config.ConfigError, match=r"parallelism.pp_schedule=1b1f: must be one of gpipe, .*1f1b"):
        stages.values(make(pp=2, pp_schedule="1b1f"))


def test_equal_configurations_become_equal() -> None:
    spelled = make(pp=2, pp_schedule="1f1b", pp_virtual=1, pp_split=[5, 3], grad_accum=4)
    short = make(pp=2, grad_accum=4)
    for cfg in (spelled, short):
        stages.settle(cfg)
    assert spelled == short and short.parallelism.pp_split == [5, 3], "the head weighs about two of these small layers"
    without = make(pp=1, pp_schedule="gpipe", grad_accum=1)
    stages.settle(without)
    assert without == make(pp=1, grad_accum=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=8), st.floats(0, 9), st.floats(0, 9), st.integers(1, 5))
def test_no_other_split_has_a_cheaper_largest_stage(
    layers: list[float], embedding: float, head: float, count: int
) -> None:
    if count > len(layers):
        return

    def largest(split: Any) -> float:
        ends = list(itertools.accumulate(split))
        cost = [sum(layers[end - n : end]) for n, end in zip(split, ends, strict=True)]
        cost[0] += embedding
        cost[-1] += head
        return max(cost)

    found = balanced(layers, embedding, head, count)
    every = (s for s in itertools.product(range(1, len(layers) + 1), repeat=count) if sum(s) == len(layers))
    assert sum(found) == len(layers) and min(found) >= 1
    assert largest(found) == pytest.approx(min(map(largest, every)))


def test_who_has_what() -> None:
    loop, v = Plan("looped_bfs", 2, (2, 1, 1, 2)), Plan("zbv", 2, (2, 1, 1, 2))
    assert [loop.of_rank(r) for r in range(2)] == [[0, 2], [1, 3]]
    assert [v.of_rank(r) for r in range(2)] == [[0, 3], [1, 2]]
    assert [list(v.layers(s)) for s in range(4)] == [[0, 1], [2], [3], [4, 5]]


def theirs_order(name: str, pp: int, virtual: int, count: int) -> tuple[Plan, list[list[Action]]]:
    """What torch's schedule lets each rank compute; its communication is simulated by torch itself."""
    plan, kind = Plan(name, pp, (1,) * (pp * virtual)), schedule_class(name)
    like = {"input_args": torch.empty(1, device="meta"), "output_args": torch.empty(1, device="meta")}
    module, cpu = torch.nn.Identity(), torch.device("cpu")
    mine = [PipelineStage(module, stage, plan.stages, cpu, **like) for stage in plan.of_rank(0)]
    multi = issubclass(kind, theirs.PipelineScheduleMulti)
    schedule = kind(mine if multi else mine[0], count, loss_fn=lambda a, _: a)
    if not multi:
        return plan, [_ours(schedule.pipeline_order[rank]) for rank in range(pp)]
    assert schedule.stage_index_to_group_rank == {stage: plan.rank_of(stage) for stage in range(plan.stages)}
    if name != "dualpipev":  # torch's simulation doesn't know its double actions
        skip = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        lowered = schedule.pipeline_order_with_comms
        kept = {r: [a for a in acts if a.computation_type.name not in skip] for r, acts in lowered.items()}
        theirs._simulate_comms_compute(kept, plan.rank_of, plan.stages)
    return plan, [_ours(schedule.pipeline_order_with_comms[rank]) for rank in range(pp)]


def _ours(order: Any) -> list[Action]:
    names = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    flat = [part for action in order if action is not None for part in action.sub_actions or [action]]
    kinds = [(a.stage_index, a.microbatch_index, names.get(a.computation_type.name)) for a in flat]
    return [Action(*each) for each in kinds if each[2] is not None]


@pytest.mark.parametrize("pp", (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)))
def test_whatever_is_accepted_comes_to_an_end(pp: int) -> None:
    """Every accepted number of micro-batches and stages: all of the work is in torch's order, and no rank waits for ever."""
    seen = 0
    with fake_group(pp):
        for name, schedule in SCHEDULES.items():
            if name == "1f1b":  # torch doesn't run by the order that it shows for this one
                continue
            for virtual, count in itertools.product(range(schedule.least, min(3, schedule.most) + 1), range(1, 4 * pp)):
                try:
                    stages.plan(make(layers=16, pp=pp, pp_schedule=name, pp_virtual=virtual), pp, count)
                except config.ConfigError:
                    continue
                plan, orders = theirs_order(name, pp, virtual, count)
                kinds = [action.kind for order in orders for action in order]
                passes = kinds.count("F"), kinds.count("B") + kinds.count("I"), kinds.count("B") + kinds.count("W")
                assert passes == (plan.stages * count,) * 3
                share = sum(idle(orders, plan.stages)) / pp
                if name in ("gpipe", "interleaved_1f1b", "looped_bfs") and count % pp == 0:
                    assert share == pytest.approx((pp - 1) / (virtual * count + pp - 1)), (name, virtual, count)
                if name in ("zbv", "interleaved_zero_bubble", "dualpipev") and count >= 2 * pp and count % pp == 0:
                    assert share == pytest.approx((pp - 1) / (3 * virtual * count + pp - 1)), (name, virtual, count)
                seen += 1
    assert seen > 40


def test_idle_of_an_order_by_hand() -> None:
    def f(stage: int, micro_batch: int) -> Action:
        return Action(stage, micro_batch, "F")

    def b(stage: int, micro_batch: int) -> Action:
        return Action(stage, micro_batch, "B")

    one_f_one_b = [
        [f(0, 0), f(0, 1), b(0, 0), f(0, 2), b(0, 1), b(0, 2)],
        [f(1, 0), b(1, 0), f(1, 1), b(1, 1), f(1, 2), b(1, 2)],
    ]
    assert idle(one_f_one_b, 2) == pytest.approx([1 / 4, 1 / 4])
    with pytest.raises(ValueError, match="without end"):
        idle([[b(0, 0), f(0, 0)], [f(1, 0), b(1, 0)]], 2)
