"""How much communication each reduction leaves exposed: the same model and rows, in turn, in the same ranks.

    python -m benchmarks.overlap                  # 2 gloo ranks on a CPU, all visible GPUs (NCCL) where there are some
    python -m benchmarks.overlap --reductions zero2,zero2o,zero2rs,ddp --bucket-mib 25 --rounds 12

Prints a line a reduction: median step time, exposed time a step by collective (medians), MiB sent by a rank. zero2o and
zero2 differ in when gradients leave, so these are compared: the exit code is 1 if zero2o waits as long for its all-to-alls
as zero2, or if the two end with different weights. (The norm's wait is the ranks' skew.)
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from train import config
from train.model.transformer import Transformer
from train.parallel.base import DataParallel
from train.parallel.build import build, compute_dtype
from train.parallel.dims import Dims

# large enough for gradients of tens of MiB, small enough for seconds on two cores; 1b is dense_1b
SIZES = {
    "small": (config.Model("small", 512, 6, 8, 4, 64, 1536, 4096), 1, 128),
    "1b": (config.Model("dense_1b", 2048, 18, 16, 8, 128, 6144, 32768), 8, 2048),
}
RUN = 4  # steps in a row: the last step's weights are gathered beside the next one's forward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reductions", default="zero2,zero2o")
    parser.add_argument("--size", choices=SIZES, default="1b" if torch.cuda.is_available() else "small")
    parser.add_argument("--bucket-mib", type=float, default=4.0 if not torch.cuda.is_available() else 25.0)
    parser.add_argument("--rounds", type=int, default=5, help=f"measured rounds of {RUN} steps, after one of warm-up")
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        mp.spawn(_rank, (args, str(Path(folder, "store")), str(results)), nprocs=args.nproc)
        rows, equal = torch.load(results, weights_only=False)
    _print(args, rows)
    if not {"zero2", "zero2o"} <= set(rows):
        return 0
    hidden, plain = (rows[name].exposed["all_to_all"] for name in ("zero2o", "zero2"))
    print(f"zero2 and zero2o end with {'the same' if equal else 'DIFFERENT'} weights, bit for bit")
    print(f"exposed in reducing gradients: zero2o {hidden * 1e3:.1f} ms, zero2 {plain * 1e3:.1f} ms")
    return 0 if equal and hidden < plain else 1


def _rank(rank: int, args: argparse.Namespace, store: str, results: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.nproc))
    group = dist.FileStore(store, args.nproc)
    dist.init_process_group("nccl" if cuda else "gloo", store=group, rank=rank, world_size=args.nproc)
    model_cfg, rows, seq = SIZES[args.size]
    names = args.reductions.split(",")
    lanes = {name: _build(name, args, model_cfg, device, rank) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    waits: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for r in range(args.rounds + 1):
        generator = torch.Generator().manual_seed(1000 * r + rank)
        tokens = torch.randint(0, model_cfg.vocab, (RUN, rows, seq + 1), generator=generator).to(device)
        for name in names:
            _settle(cuda)
            start = time.perf_counter()
            run_waits = [_step(lanes[name], tokens[i]) for i in range(RUN)]
            _settle(cuda)
            if r > 0:
                seconds[name].append((time.perf_counter() - start) / RUN)
                waits[name] += run_waits[1:]
    equal = True
    if {"zero2", "zero2o"} <= set(names):
        one, two = lanes["zero2"].full_weights(), lanes["zero2o"].full_weights()
        equal = all(torch.equal(one[k], two[k]) for k in one)
    if rank == 0:
        table = {n: _row(seconds[n], waits[n], lanes[n].traffic()["bytes"]) for n in names}
        torch.save((table, equal), results)
    dist.destroy_process_group()


def _build(
    name: str, args: argparse.Namespace, model_cfg: config.Model, device: torch.device, rank: int
) -> DataParallel:
    cfg = config.Train(
        reduction=config.Reduction(name, bucket_mib=args.bucket_mib),
        precision=config.Precision("auto"),
        optim=config.Optim("adamw"),
    )
    with torch.device("meta"):
        model = Transformer(model_cfg, "auto")
    model.to(compute_dtype(cfg, device))
    model.materialise(device, 0)
    if args.compile:
        model.compile_layers()
    return build(model, cfg, Dims.of(cfg, args.nproc, rank, device))


def _step(dp: DataParallel, tokens: Tensor) -> dict[str, float]:
    """The exposed seconds known after it: this step's on a CPU, on a GPU those of a step or two before."""
    with dp.micro_step(0, 1):
        dp.module(tokens[:, :-1], tokens[:, 1:]).backward()
    dp.step(3e-4)
    exposed: dict[str, float] = dp.traffic()["exposed_s"]
    return exposed


def _settle(cuda: bool) -> None:
    """Ranks start together; nothing is left on the GPU."""
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


@dataclass
class Row:
    step: float  # seconds
    exposed: dict[str, float]  # seconds a step by collective
    sent: int  # bytes a step


def _row(seconds: list[float], waits: list[dict[str, float]], sent: dict[str, int]) -> Row:
    collectives = sorted({c for w in waits for c in w})
    exposed = {c: statistics.median(w.get(c, 0.0) for w in waits) for c in collectives}
    return Row(statistics.median(seconds), exposed, sum(sent.values()))


def _print(args: argparse.Namespace, rows: dict[str, Row]) -> None:
    print(f"{args.size}, {args.nproc} ranks, buckets of {args.bucket_mib:g} MiB,", end=" ")
    print(f"medians of {args.rounds} rounds of {RUN} steps, rank 0")
    for name, row in rows.items():
        total, parts = sum(row.exposed.values()), ", ".join(f"{c} {s * 1e3:.1f}" for c, s in row.exposed.items())
        print(f"{name:8} step {row.step * 1e3:8.1f} ms  exposed {total * 1e3:7.1f} ms ({parts})", end="  ")
        print(f"sent {row.sent / 2**20:.0f} MiB")


if __name__ == "__main__":
    raise SystemExit(main())
