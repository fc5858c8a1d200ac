"""checkpoint.every=N: plain checkpoints. Synchronous, one shard a rank, through torch.distributed.checkpoint.

    <point>/checkpoints/step-00000020/    weights, optimizer, random states and position after 20 steps

A folder gets its name once all ranks have written and the metadata is there, so what has the name is complete. A rerun of
the point goes on from the newest one, bit for bit as if nothing had happened.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.config import Train
from train.parallel.balance import Balance
from train.parallel.base import DataParallel
from train.parallel.round import Round
from train.saved import complete


class Checkpoints:
    """Saves and restores one rank's share. `group`: for host tensors, of all ranks; None with one rank."""

    def __init__(
        self, cfg: Train, folder: Path, dp: DataParallel, rounds: Round | None, rank: int, world: int, group: Any,
        balance: Balance | None = None,
    ) -> None:  # fmt: skip
        self._cfg, self._folder, self._dp, self._rounds = cfg, folder, dp, rounds
        self._rank, self._world, self._group, self._balance = rank, world, group, balance
        self._cuda = cfg.device == "cuda"
        # equal on all ranks: torch.distributed.checkpoint then writes each tensor once, sharing the work
        whole = cfg.reduction.name == "ddp" and cfg.parallelism.dp_replicate == world and rounds is None
        self._prefix = "" if whole else f"rank{rank}/"
        self.seconds = 0.0
        self.resumed_from: int | None = None

    def due(self, step: int) -> bool:
        """Whether one is written after `step`."""
        every = self._cfg.checkpoint.every
        return every is not None and (step + 1) % every == 0

    def _state(self) -> dict[str, Tensor]:
        """Live tensors of this rank, by names that are unique over ranks unless the tensors are equal."""
        state = {f"{self._prefix}{name}": tensor for name, tensor in self._dp.state_dict().items()}
        if self._rounds is not None:
            state |= {f"{self._prefix}round/{name}": t for name, t in self._rounds.state_dict().items()}
        if self._balance is not None:
            state |= {f"{self._prefix}{name}": t for name, t in self._balance.state_dict().items()}
        return state

    def _random(self) -> dict[str, Tensor]:
        states = {f"rank{self._rank}/random/cpu": torch.get_rng_state()}
        if self._cuda:
            states[f"rank{self._rank}/random/cuda"] = torch.cuda.get_rng_state()
        return states

    def after(self, step: int) -> None:
        """Write the state after `step`. Collective."""
        import torch.distributed.checkpoint as dcp  # here, for it takes a third of a rank's imports

        began = time.monotonic()
        done = step + 1
        final = self._folder / "checkpoints" / f"step-{done:08d}"
        temp = final.with_name(f".{final.name}")
        if self._rank == 0:
            shutil.rmtree(temp, ignore_errors=True)  # what an attempt that broke off left
            temp.mkdir(parents=True)
        self._barrier()
        state = self._state() | self._random() | {"steps": torch.tensor(done)}  # rows follow from the step alone
        dcp.save(state, checkpoint_id=temp, process_group=self._group, no_dist=self._world == 1)
        if self._rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            temp.rename(final)
            for _, old in complete(self._folder)[: -self._cfg.checkpoint.keep]:
                shutil.rmtree(old)
        self._barrier()
        self.seconds += time.monotonic() - began

    def restore(self) -> int:
        """Load the newest complete checkpoint, if any; the step to go on with. Collective."""
        if self._cfg.checkpoint.every is None:
            return 0
        import torch.distributed.checkpoint as dcp

        newest: list[Any] = [next(iter(complete(self._folder)[::-1]), None) if self._rank == 0 else None]
        if self._world > 1:
            dist.broadcast_object_list(newest, 0, group=self._group)
        if newest[0] is None:
            return 0
        done, path = newest[0]
        random = self._random()
        self._dp.settle()
        with torch.no_grad():
            dcp.load(self._state() | random, checkpoint_id=path, process_group=self._group, no_dist=self._world == 1)
        self._dp.publish()
        torch.set_rng_state(random[f"rank{self._rank}/random/cpu"])
        if self._cuda:
            torch.cuda.set_rng_state(random[f"rank{self._rank}/random/cuda"])
        self.resumed_from = done
        return int(done)

    def report(self) -> dict[str, Any] | None:
        """The step that this attempt went on with, and the seconds spent on writing; None where no checkpoint is asked for."""
        if self._cfg.checkpoint.every is None:
            return None
        return {"resumed_from": self.resumed_from, "seconds": self.seconds}

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier(group=self._group)
