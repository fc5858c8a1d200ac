"""Shards: what a rank saves is what it needs to go on as if nothing had happened."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from train.parallel.build import build
from train.parallel.dims import Dims

CPU = torch.device("cpu")


def resumed(rank: int, world: int, case: Case) -> tuple[list[str], bool]:
    """Four steps at once against two, a state dict, a new model and two more: (names that differ, anything compared)."""
    cfg = cases.configuration(case)
    runs = []
    for stop_at in (4, 2):
        model = cases.make_model(case, cfg)
        dp = build(model, cfg, Dims.of(cfg, world, rank, CPU))
        for step in range(4):
            if step == stop_at:
                saved = {k: v.clone() for k, v in dp.state_dict().items()}
                dp.close()
                model = cases.make_model(case, cfg)
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                dp = build(model, cfg, Dims.of(cfg, world, rank, CPU))
                dp.load_state_dict(saved)
            cases.one_step(dp, cases.all_data(rank, world), case, step)
            dp.step(case.lr)
        runs.append({k: v.clone() for k, v in dp.state_dict().items()})
        dp.close()
    one, two = runs
    return [k for k in one if not torch.equal(one[k], two[k])] + sorted(set(one) ^ set(two)), bool(one)


@pytest.mark.parametrize(("dtype", "kernels"), [("fp32", "inductor"), ("bf16", "inductor"), ("bf16", "fused")])
@pytest.mark.parametrize("reduction", ("ddp", "zero2o", "zero2rs", "fsdp"))
def test_resumed_equals_uninterrupted(two: Ranks, reduction: str, dtype: str, kernels: str) -> None:
    for differ, compared in two.run(resumed, Case(reduction, dtype, beta1=0.9, kernels=kernels)):
        assert compared
        assert differ == []


def shards(rank: int, world: int, case: Case) -> tuple[dict[str, int], list[str]]:
    """(elements of every item, names in order) of this rank's shard."""
    cfg = cases.configuration(case)
    dp = build(cases.make_model(case, cfg), cfg, Dims.of(cfg, world, rank, CPU))
    items = list(dp.shard_items())
    dp.close()
    return {k: v.numel() for k, v in items}, [k for k, _ in items]


@pytest.mark.parametrize("reduction", ("zero2", "zero2o", "zero2rs", "fsdp"))
def test_shards_partition_every_parameter(four: Ranks, reduction: str) -> None:
    case = Case(reduction)
    sizes = {n: p.numel() for n, p in cases.make_model(case, cases.configuration(case)).named_parameters()}
    got = four.run(shards, case)
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for name, size in sizes.items():
            assert sum(elements.get(f"{name}.{kind}", 0) for elements, _ in got) == size
    assert got == four.run(shards, case), "the order is stable"


def test_a_checkpoint_of_another_layout_is_refused() -> None:
    dps = []
    for model in ("transformer", "tied"):
        case = Case("ddp", model=model)
        cfg = cases.configuration(case)
        dps.append(build(cases.make_model(case, cfg), cfg, Dims.of(cfg, 1, 0, CPU)))
    with pytest.raises(ValueError, match=r"another layout: head\.weight\.exp_avg is on one side only"):
        dps[1].load_state_dict(dps[0].state_dict())
    state = dps[0].state_dict()
    state["norm.weight.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"norm\.weight\.weight has shape \[3\], not \[24\]"):
        dps[0].load_state_dict(state)


def most_at_once(rank: int, world: int, case: Case) -> tuple[int, int, int]:
    """fsdp from the meta device: the most bytes of parameters that a rank had at any time of the build, those of the whole
    model, and those of one layer and of what is outside the layers."""
    cfg = cases.configuration(case)
    model = cases.make_model(case, cfg, Dims.of(cfg, world, rank, CPU))
    sizes = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
    seen = []
    make = model.materialise

    def watched(*args: object) -> None:
        make(*args)
        parameters = [p for p in model.parameters() if not p.is_meta]
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        seen.append(sum(t.untyped_storage().nbytes() for t in local))

    model.materialise = watched
    build(model, cfg, Dims.of(cfg, world, rank, CPU)).close()
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    return max(seen), sum(sizes.values()), layer + sum(s for n, s in sizes.items() if not n.startswith("layers."))


def test_fsdp_never_holds_the_whole_model(four: Ranks) -> None:
    for most, whole, piece in four.run(most_at_once, Case("fsdp", model="even", layers=16)):
        assert most <= piece + 0.3 * whole  # a quarter of it is here to stay, with padding
        assert most < 0.7 * whole
