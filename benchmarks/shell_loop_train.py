"""What one would write without this project: a script that torchrun starts once per point, with the same trainer work.

    torchrun --nproc-per-node 2 benchmarks/shell_loop_train.py FOLDER

FOLDER holds a frozen config.yaml; model, reduction, data and loop are the sweep's own, so only the launching differs.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from train import data
from train.config import load
from train.model.transformer import Transformer
from train.parallel.build import build, param_dtype
from train.parallel.dims import Dims
from train.worker import DTYPES


def main() -> None:
    import torch

    folder = Path(sys.argv[1])
    cfg = load(folder / "config.yaml")
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if cfg.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with torch.device("meta"):
        model = Transformer(cfg.model, "math" if device.type == "cpu" else "flash")
    model.to(param_dtype(cfg, DTYPES[cfg.precision.name]))
    if cfg.reduction.name != "fsdp":
        model.materialise(device, cfg.seed)
    dp = build(model, cfg, Dims.of(cfg, world, rank, device))
    assert cfg.global_batch is not None and cfg.grad_accum is not None
    source = data.build(cfg.data, cfg.model.vocab, cfg.seq_len, cfg.global_batch, cfg.seed, device)
    for step in range(cfg.steps):
        for index in range(cfg.grad_accum):
            start = (rank * cfg.grad_accum + index) * cfg.micro_batch
            rows = source.batch(step, start, cfg.micro_batch).to(device)
            with dp.micro_step(index, cfg.grad_accum):
                loss = dp.module(rows[:, :-1], rows[:, 1:])
                (loss / cfg.grad_accum).backward()
        dp.step(cfg.optim.lr)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dp.close()  # weights may still be on their way: a group destroyed under a collective aborts the process
    dist.barrier()  # and a rank that leaves early looks like a failure to its peer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # gloo's threads outlive the group while a cycle (hooks) refers to it; one that lets go of a tensor while the interpreter
    # winds down ends in "terminate called without an active exception", once in 14 runs here. So leave as train.worker does.
    sys.stdout.flush()
    os._exit(0)
