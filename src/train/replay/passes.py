"""The passes of a replayed run: two in the same processes, then each rank becomes a fresh interpreter for the third."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.base import DataParallel
from train.replay import compare
from train.replay.leaves import Hasher
from train.replay.prints import Prints
from train.sweep.freeze import write_json

PASSES = ("first", "second", "fresh")


def current() -> str:
    """The pass that this process starts with."""
    return os.environ.get("MFU_SWEEP_PASS", "first")


def become_fresh(folder: Path, scratch: Path) -> None:
    """Replace this process by a fresh interpreter that runs the third pass: nothing but files and environment is left.

    The process id stays, so whoever watches this rank goes on watching it. Does not return.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    env = os.environ | {"MFU_SWEEP_PASS": "fresh", "MFU_SWEEP_PARENT": str(os.getppid())}
    os.execve(sys.executable, [sys.executable, "-m", "train.worker", str(folder), str(scratch)], env)


class Replay:
    """Hashes every step of the pass under way; `end` hands the pass to rank 0."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Before the reduction takes over the model's parameters."""
        self._prints = Prints(model)
        self._hasher = Hasher(device, torch.get_num_threads())
        self._steps: list[compare.Step] = []

    def attach(self, dp: DataParallel) -> None:
        """See the reduced gradients too, and remember the start unless this process runs one pass alone.

        Weights wait on the host; optimizer state is zero at the start and takes no memory.
        """
        self._dp = dp
        self._prints.watch(dp.owners())
        self._start: dict[str, Tensor | None] = {}
        if current() == "first":
            for name, tensor in dp.shard_items():
                self._start[name] = tensor.to("cpu", copy=True) if tensor.any() else None

    @torch.no_grad()
    def rewind(self) -> None:
        """Back to the start, in place. Collective."""
        self._dp.settle()
        for name, tensor in self._dp.shard_items():
            start = self._start[name]
            tensor.zero_() if start is None else tensor.copy_(start)
        self._dp.publish()

    def due(self, _: int) -> bool:
        """Every step has a leaf."""
        return True

    def after(self, _: int) -> None:
        """Hash what this rank holds now."""
        self._steps.append({**self._prints.take(), "state": self._hasher.digests(self._dp.shard_items())})

    def end(self, name: str, scratch: Path, rank: int, world: int, group: Any) -> None:
        """The pass is over: rank 0 keeps it in the scratch folder. Collective."""
        every: list[Any] = [None] * world
        if world > 1:
            dist.gather_object(self._steps, every if rank == 0 else None, group=group)
        else:
            every = [self._steps]
        if rank == 0:
            (scratch / f"pass-{name}.json").write_text(json.dumps(every))
        self._steps = []


def conclude(folder: Path, scratch: Path, seconds: float) -> None:
    """Rank 0, after the third pass: the verdict goes into its result, the first pass's leaves into leaves.jsonl.

    `seconds`: since the rank was started.
    """
    passes = {name: json.loads((scratch / f"pass-{name}.json").read_text()) for name in PASSES}
    with open(folder / "leaves.jsonl", "w", encoding="utf-8") as f:
        for step, leaves in enumerate(compare.leaves(passes["first"])):
            f.write(json.dumps({"step": step, "leaves": [each.hex() for each in leaves]}) + "\n")
    verdict = compare.conclude(passes)
    print(f"replay: {verdict['replay_difference'] or 'all passes are equal'}", flush=True)
    result = json.loads((scratch / "result-0.json").read_text())
    spent = result["summary"]["seconds"]
    spent["fresh"] = seconds - sum(spent.values())
    result["summary"] |= verdict
    write_json(scratch / "result-0.json", result, sync=False)
