"""Checkpoints that the real command line leaves."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.helpers import environment
from train import checkpoint


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    loaded = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def interrupted(arguments: list[str], sweep: Path, how: signal.Signals) -> None:
    """`python -m train ARGUMENTS` beside outputs/, ended by `how` once a point of `sweep` has a checkpoint."""
    command = [sys.executable, "-m", "train", *arguments]
    process = subprocess.Popen(command, cwd=sweep.parents[1], env=environment(), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not any(checkpoint.complete(p) for p in sweep.glob("*-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=60)
