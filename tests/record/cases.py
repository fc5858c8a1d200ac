"""What gloo ranks run for the tests of replay, checkpoints and rounds: a few steps, then what there is to compare."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel import cases
from tests.parallel.cases import Case
from train import checkpoint, config
from train.memory import recompute
from train.model import rope
from train.parallel.base import DataParallel
from train.parallel.build import build
from train.parallel.dims import Dims
from train.parallel.round import Islands, Round
from train.replay import compare
from train.replay.passes import Replay

CPU = torch.device("cpu")


def make(
    rank: int, world: int, case: Case, full_recompute: bool = False, rope_cache: bool = True
) -> tuple[DataParallel, Replay]:
    """A replayed reduction over all ranks."""
    cfg = cases.configuration(case)
    cfg.model.rope_cache = rope_cache
    model = cases.make_model(case, cfg)
    if full_recompute:
        recompute.apply(model, config.Memory("full", "full"))
    replay = Replay(model, CPU)
    dp = build(model, cfg, Dims.of(cfg, world, rank, CPU))
    replay.attach(dp)
    return dp, replay


def steps(dp: DataParallel, replay: Replay, rank: int, world: int, case: Case, spoil: Any = None) -> list[compare.Step]:
    """One pass; `spoil(step)` runs before each step."""
    for step in range(case.steps):
        if spoil is not None:
            spoil(step)
        cases.one_step(dp, cases.all_data(rank, world), case, step)
        dp.step(case.lr)
        replay.after(step)
    taken, replay._steps = replay._steps, []
    return taken


def one_pass(
    rank: int, world: int, case: Case, full_recompute: bool = False, rope_cache: bool = True
) -> list[compare.Step]:
    """All steps of a run, hashed."""
    rope._cached.cache_clear()
    dp, replay = make(rank, world, case, full_recompute, rope_cache)
    taken = steps(dp, replay, rank, world, case)
    dp.close()
    return taken


def two_passes(rank: int, world: int, case: Case) -> tuple[list[compare.Step], list[compare.Step]]:
    """The same steps twice in one process."""
    dp, replay = make(rank, world, case)
    first = steps(dp, replay, rank, world, case)
    replay.rewind()
    second = steps(dp, replay, rank, world, case)
    dp.close()
    return first, second


def flipped(
    rank: int, world: int, case: Case, bad_rank: int, bad_step: int, number: int, bit: int
) -> tuple[list[compare.Step], list[compare.Step], str]:
    """Two passes, in the second of which one bit of one element of parameter `number`'s gradient flips."""
    from train.faults import flip

    dp, replay = make(rank, world, case)
    first = steps(dp, replay, rank, world, case)
    replay.rewind()
    module: nn.Module = dp.module
    name, parameter = [(n, p) for n, p in module.named_parameters()][number]
    armed = {"step": -1}

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        if rank == bad_rank and armed["step"] == bad_step:
            grad = grad.clone()
            flip(grad, bit, index=7)
        return grad

    parameter.register_hook(spoil)
    second = steps(dp, replay, rank, world, case, lambda step: armed.update(step=step))
    dp.close()
    return first, second, name.removeprefix("module.")


def local_training(
    rank: int, world: int, case: Case, rounds: config.Round, islands: int, stops: tuple[int, ...]
) -> dict[int, dict[str, torch.Tensor]]:
    """Steps of an island without any exchange: {step: the own shard of weights after it}."""
    dp, _ = _island(rank, world, case, rounds, islands)
    kept = {}
    for step in range(max(stops) + 1):
        cases.one_step(dp, cases.all_data(rank, world), case, step)
        dp.step(case.lr)
        if step in stops:
            kept[step] = _weights(dp)
    dp.close()
    return kept


def rounds_training(rank: int, world: int, case: Case, rounds: config.Round, islands: int) -> dict[str, Any]:
    """Steps in rounds: the own shard and the model's weights after the last one, and what is kept of each round."""
    dp, outer = _island(rank, world, case, rounds, islands)
    kept = []
    for step in range(case.steps):
        cases.one_step(dp, cases.all_data(rank, world), case, step)
        dp.step(case.lr)
        if outer.due(step):
            before = _weights(dp)
            state = {k: v.clone() for k, v in outer.state_dict().items()}
            outer.after(step)
            after = {k: v.clone() for k, v in outer.state_dict().items()}
            kept.append({"before": before, "state": state, "after": after, "weights": _weights(dp)})
    dp.settle()
    model = {k: v.detach().clone() for k, v in dp.module.named_parameters()} if case.reduction != "fsdp" else {}
    report = outer.report()
    dp.close()
    return {"rounds": kept, "model": model, "report": report}


def _island(rank: int, world: int, case: Case, rounds: config.Round, islands: int) -> tuple[DataParallel, Round]:
    cfg = cases.configuration(case)
    cfg.round = rounds
    cfg.parallelism.dp_replicate, cfg.parallelism.dp_shard = islands, world // islands
    places = Islands.of(cfg, rank)
    inner = places.inner_config(cfg)
    place = Dims.of(inner, places.size, rank % places.size, CPU, places.inner)
    dp = build(cases.make_model(case, cfg), inner, place)
    return dp, Round(rounds, dp, places, CPU)


def _weights(dp: DataParallel) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in dp.shard_items() if n.endswith(".weight")}


def resumed(rank: int, world: int, case: Case, folder: Path, rounds: config.Round | None) -> list[str]:
    """Six steps at once, against a checkpoint every two, a loss of everything after four and a run that goes on: names that
    differ at the end."""
    ends = []
    for stop in (case.steps, 4):
        cfg, dp, outer, saves = _with_checkpoints(rank, world, case, folder / str(stop), rounds)
        for step in range(stop):
            _step(dp, outer, saves, rank, world, case, step)
        if stop < case.steps:
            torch.rand(3)  # generators that moved on meanwhile must not matter
            dp.close()
            cfg, dp, outer, saves = _with_checkpoints(rank, world, case, folder / str(stop), rounds)
            first = saves.restore()
            assert first == saves.resumed_from == 4
            for step in range(first, case.steps):
                _step(dp, outer, saves, rank, world, case, step)
        dp.settle()
        extra = outer.state_dict() if outer is not None else {}
        ends.append({k: v.clone() for k, v in {**dp.state_dict(), **extra, "random": torch.get_rng_state()}.items()})
        dp.close()
        dist.barrier()
    one, two = ends
    return [k for k in one if not torch.equal(one[k], two[k])] + sorted(set(one) ^ set(two))


def _with_checkpoints(
    rank: int, world: int, case: Case, folder: Path, rounds: config.Round | None
) -> tuple[config.Train, DataParallel, Round | None, checkpoint.Checkpoints]:
    torch.manual_seed(1)
    cfg = cases.configuration(case)
    cfg.checkpoint = config.Checkpoint(every=2, keep=2)
    cfg.parallelism.dp_replicate = world if case.reduction == "ddp" else 1
    outer = None
    if rounds is None:
        dp = build(cases.make_model(case, cfg), cfg, Dims.of(cfg, world, rank, CPU))
    else:
        dp, outer = _island(rank, world, case, rounds, world)
    return cfg, dp, outer, checkpoint.Checkpoints(cfg, folder, dp, outer, rank, world, None)


def _step(
    dp: DataParallel, outer: Round | None, saves: checkpoint.Checkpoints, rank: int, world: int, case: Case, step: int
) -> None:
    torch.rand(5)  # something that moves the generator
    cases.one_step(dp, cases.all_data(rank, world), case, step)
    dp.step(case.lr)
    if outer is not None and outer.due(step):
        outer.after(step)
    if saves.due(step):
        saves.after(step)
