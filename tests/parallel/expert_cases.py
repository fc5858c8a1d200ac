"""What ranks run for the parts of expert parallel that a few training steps don't show."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import cases
from tests.parallel.cases import CPU, Case
from train import checkpoint, config
from train.model.moe import MoE
from train.parallel.balance import Balance
from train.parallel.build import build
from train.parallel.dims import Dims


def resumed(rank: int, world: int, case: Case, folder: Path) -> list[str]:
    """Six steps at once, against four, a loss of everything, and two more from the checkpoint: names that differ in the end."""
    whole = _run(rank, world, case, folder / "whole", 6)
    _run(rank, world, case, folder / "parts", 4)
    parts = _run(rank, world, case, folder / "parts", 6)
    return sorted(set(whole) ^ set(parts)) + [name for name in whole if not torch.equal(whole[name], parts[name])]


def _run(rank: int, world: int, case: Case, folder: Path, steps: int) -> dict[str, Tensor]:
    cfg = cases.configuration(case)
    cfg.checkpoint = config.Checkpoint(every=2)
    dims = Dims.of(cfg, world, rank, CPU)
    model: Any = cases.make_model(case, cfg, dims)
    balance = Balance(model, cfg.model, dims)
    dp = build(model, cfg, dims)
    saves = checkpoint.Checkpoints(cfg, folder, dp, None, rank, world, None, balance)
    for step in range(saves.restore(), steps):
        cases.one_step(dp, dims, case, step)
        dp.step(case.lr)
        balance.step()
        if saves.due(step):
            saves.after(step)
    end = {name: t.clone() for name, t in {**dp.state_dict(), **balance.state_dict()}.items()}
    assert any(t.any() for name, t in end.items() if name.endswith("raises"))
    dp.close()
    dist.barrier()
    return end


class Undecided(MoE):
    """Scores that change by chance from call to call, as a near tie's do by rounding."""

    def biased(self, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape, dtype=scores.dtype)


def undecided(rank: int, world: int, case: Case) -> list[str]:
    """A step without and a step with full recompute, by experts chosen at random: gradients that differ."""
    runs: list[dict[str, Tensor]] = []
    for memory in ((), (("recompute", "full"),)):
        again = replace(case, memory=memory)
        cfg = cases.configuration(again)
        dims = Dims.of(cfg, world, rank, CPU)
        model: Any = cases.make_model(again, cfg, dims)
        for block in model.layers:
            block.ffn.__class__ = Undecided
        dp = build(model, cfg, dims)
        torch.manual_seed(rank)
        cases.one_step(dp, dims, again, 0)
        dp.step(case.lr)
        runs.append({name: t.clone() for name, t in dp.full("exp_avg").items()})
        dp.close()
    without, kept = runs
    return [name for name, t in without.items() if not torch.equal(t, kept[name])]


def experts_run(rank: int, world: int, case: Case) -> tuple[int, int]:
    """How often a step begins and how often it ends the experts' matmuls: recompute may stop before the last of them."""
    began, ended = [], []
    cfg = cases.configuration(case)
    dims = Dims.of(cfg, world, rank, CPU)
    model: Any = cases.make_model(case, cfg, dims)
    for block in model.layers:
        block.ffn.experts.register_forward_pre_hook(lambda *_: began.append(1))
        block.ffn.experts.register_forward_hook(lambda *_: ended.append(1))
    dp = build(model, cfg, dims)
    cases.one_step(dp, dims, case, 0)
    dp.close()
    return len(began), len(ended)
