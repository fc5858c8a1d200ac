"""What a sweep costs beside the training: `python benchmarks/sweep_overhead.py [--device cuda]` from the checkout.

1. Twelve points of at most a second of training each, as one sweep and as the shell loop over torchrun that a user would
   write (benchmarks/shell_loop_train.py: same model, reduction, data and steps), in one run on one machine.
2. Points a second over 200 points whose training is next to nothing.
3. Compose, validate and resume 1,000 and 10,000 points that are all finished.

Prints a table in Markdown and, with --json FILE, writes the numbers. Exit code 1 when a target is missed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENV = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONSAFEPATH": "1"}
TINY = [
    "model.dim=32", "model.layers=1", "model.ffn=64", "model.heads=2", "model.kv_heads=1", "model.head_dim=16",
    "seq_len=16", "data=fake", "hardware.peak_tflops=1",
]  # fmt: skip


def run(*args: str) -> str:
    """Output of `python …`. A failure ends the benchmark, with the end of what it printed."""
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=ENV, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {shlex.join(args)}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def command(*args: str) -> tuple[float, str]:
    """(seconds, output) of `python -m train -m …`."""
    began = time.monotonic()
    output = run("-m", "train", "-m", *args)
    return time.monotonic() - began, output


def statuses(folder: Path) -> list[dict[str, Any]]:
    grid = json.loads((folder / "sweep.json").read_text())["grid"]
    return [json.loads((folder / g["folder"] / "status.json").read_text()) for g in grid]


def twelve(out: Path, device: str, nproc: int) -> dict[str, float]:
    """A sweep of 12 points against the shell loop over the same frozen points."""
    args = [
        f"out={out}", "name=twelve", f"device={device}", f"nproc={nproc}", *TINY, "steps=20", "micro_batch=1,2,4",
        "seed=0,1", "reduction=zero2o,ddp",
    ]  # fmt: skip
    sweep_s, _ = command(*args)
    done = statuses(out / "twelve")
    assert len(done) == 12 and all(s["status"] == "ok" for s in done)
    train = [s["summary"]["seconds"]["train"] for s in done]
    wall = [s["summary"]["wall_s"] for s in done]
    grid = json.loads((out / "twelve" / "sweep.json").read_text())["grid"]
    began = time.monotonic()
    for g in grid:
        run(
            "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}",
            str(ROOT / "benchmarks/shell_loop_train.py"), str(out / "twelve" / g["folder"]),
        )  # fmt: skip
    loop_s = time.monotonic() - began
    return {
        "sweep_s": sweep_s,
        "loop_s": loop_s,
        "ratio": sweep_s / loop_s,
        "train_s_max": max(train),
        "overhead_per_point_s": (sweep_s - sum(train)) / 12,
        "point_wall_s": sorted(wall)[6],
    }


def rate(out: Path, device: str, nproc: int, points: int = 200) -> dict[str, float]:
    """Points a second from the first start to the last end, and of the whole command."""
    args = [
        f"out={out}",
        "name=rate",
        f"device={device}",
        f"nproc={nproc}",
        *TINY,
        "steps=1",
        f"seed=range(0,{points})",
    ]
    whole, output = command(*args)
    done = statuses(out / "rate")
    assert len(done) == points and all(s["status"] == "ok" for s in done), output[-2000:]
    wall = sum(s["summary"]["wall_s"] for s in done)
    return {"points_per_s": points / wall, "points_per_s_whole_command": points / whole, "command_s": whole}


def resume(out: Path, points: int) -> dict[str, float]:
    """Seconds of a command over `points` points that are all finished.

    Running them is part 2; here the finished state is written by the sweep's own functions.
    """
    name = f"resume{points}"
    args = [f"out={out}", f"name={name}", "device=cpu", *TINY, "reduction=zero2o,ddp", f"seed=range(0,{points // 2})"]
    prepare = (
        "import sys; from train.launch import local; from train.sweep import folder\n"
        "def finish(self, todo):\n"
        "    for p in todo:\n"
        "        folder.write_status(self.sweep.folder(p), p.identity, 'ok', '', {'wall_s': 1.0}, sync=False)\n"
        "        self._forget(p)\n"
        "local.Local._run = finish\n"
        "from train.sweep import run; run.report = lambda path: None\n"
        "from train.__main__ import main; main()\n"
    )
    run("-c", prepare, "-m", *args)
    seconds, output = command(*args)
    assert f"{points} kept" in output, output[-2000:]
    return {f"resume_{points}_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--parts", default="twelve,rate,resume")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temp:
        out = Path(temp)
        (out / "tmp").mkdir()
        ENV["TMPDIR"] = str(out / "tmp")  # another sweep on this machine would make ours wait for its lock
        if "twelve" in args.parts:
            found |= twelve(out, args.device, args.nproc)
        if "rate" in args.parts:
            found |= rate(out, args.device, args.nproc)
        if "resume" in args.parts:
            found |= resume(out, 1000) | resume(out, 10000)
    targets = {"ratio": ("<=", 1 / 3), "points_per_s": (">=", 5.0), "resume_1000_s": ("<=", 60.0)}
    if "resume_10000_s" in found:
        found["resume_growth"] = found["resume_10000_s"] / found["resume_1000_s"]
        targets["resume_growth"] = ("<=", 10.0)
    missed = []
    print("| what | value | target |\n|---|---|---|")
    for key, value in found.items():
        sign, limit = targets.get(key, ("", 0.0))
        ok = not sign or (value <= limit if sign == "<=" else value >= limit)
        missed += [] if ok else [key]
        aim = f"{sign} {limit:.3g}{'' if ok else ' MISSED'}" if sign else ""
        print(f"| {key} | {value:.3g} | {aim} |")
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
