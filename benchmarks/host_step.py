"""What a step costs the host: the real rank on model=debug with rows so short that operators cost their calls.

    python -m benchmarks.host_step                              # this checkout
    python -m benchmarks.host_step --before ../other/checkout   # another one beside it, in turn

A step's figure is the CPU time of its process, not the wall's; a run's is its shortest step, since other work on the machine
makes steps longer (shared caches and cores) and never shorter; a checkout's is the median of its runs. One thread, eager, one
rank. The optimizer's share is measured inside the same steps.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 20  # steps at the start


def one(steps: int) -> dict[str, list[float]]:
    """CPU seconds of each step of one run, and of the optimizer in it, in this process."""
    from train import config
    from train.worker import Rank

    model = yaml.safe_load((ROOT / "conf" / "model" / "debug.yaml").read_text())
    cfg = config.Train(
        model=dataclasses.replace(config.Model(**model), dim=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=64),
        data=config.Data("fake"), parallelism=config.Parallelism("data", 1, 1, 1), reduction=config.Reduction("zero2"),
        memory=config.Memory("none"), compile=config.Compile("none"), nccl=config.Nccl("default"),
        attention=config.Attention("flash"), precision=config.Precision("fp32"), optim=config.Optim("adamw"),
        hardware=config.Hardware("auto", peak_tflops=1.0), launch=config.Launch("local"), micro_batch=1, grad_accum=1,
        global_batch=1, seq_len=8, steps=steps, device="cpu", nproc=1, deterministic=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        point = Path(folder, "point")
        point.mkdir()
        (point / "config.yaml").write_text(yaml.safe_dump(config.to_dict(cfg)))
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MFU_SWEEP_CORES": "1",
        }
        rank = Rank(point, Path(folder))
        rank.set_device()
        rank.build()
        meter = rank.make_meter()
        at: list[float] = []
        beat = rank.heart.beat
        (owner,) = rank.dp.owners()
        update, spent = owner.step, []

        def timed_beat(phase: str | None = None, step: int | None = None) -> None:
            if phase == "train":
                at.append(time.process_time())
            beat(phase, step)

        def timed_update(*args: Any) -> None:
            began = time.process_time()
            update(*args)
            spent.append(time.process_time() - began)

        rank.heart.beat, owner.step = timed_beat, timed_update  # type: ignore[assignment, method-assign]
        rank.train(meter)
    return {"step": [b - a for a, b in zip(at, at[1:], strict=False)], "optimizer": spent}


def run(checkout: Path, steps: int) -> dict[str, float]:
    """CPU microseconds of the shortest step, and of the shortest update, of a fresh process on a checkout's trainer."""
    path = os.pathsep.join([str(checkout / "src"), str(ROOT)])
    command = [sys.executable, "-m", "benchmarks.host_step", "--one", "--steps", str(steps)]
    env = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {part: 1e6 * min(seconds[SKIPPED:]) for part, seconds in found.items()}


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", type=Path, help="another checkout, measured in turn with this one")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.repeats < 1 or args.steps <= SKIPPED:
        p.error(f"--repeats {args.repeats} --steps {args.steps}: at least 1, and {SKIPPED + 1}")
    if args.before and not (args.before / "src" / "train").is_dir():
        p.error(f"--before {args.before}: no checkout of this project")
    if args.one:
        print(json.dumps(one(args.steps)))
        return
    checkouts = {"before": args.before, "here": ROOT} if args.before else {"here": ROOT}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, checkout in checkouts.items():
            found[name].append(run(checkout.resolve(), args.steps))
    for part in ("step", "optimizer"):
        middle = {}
        for name, runs in found.items():
            values = [each[part] for each in runs]
            middle[name] = statistics.median(values)
            print(f"{part}, {name}: {middle[name]:.0f} µs of CPU ({min(values):.0f} to {max(values):.0f})")
        if args.before:
            print(f"{part}, here / before: {middle['here'] / middle['before']:.3f}")
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {args.repeats} runs of {args.steps} steps each"
    )


if __name__ == "__main__":
    main()
