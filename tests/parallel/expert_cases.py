"""What ranks run for the parts of expert parallel that a few training steps don't show."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import cases
from tests.parallel.cases import CPU, Case
from train import checkpoint, config
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
