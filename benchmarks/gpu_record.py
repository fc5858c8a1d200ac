"""The claims about replay on one GPU: run `sweeps=gpu_record` and `gpu_replay`, check what they left, one line a claim.

With two GPUs the two sweeps run side by side, one a GPU.

    PYTHONPATH=src:. python -m benchmarks.gpu_record [--out FOLDER] [--only gpu_replay] [--limit SECONDS] [KEY=VALUE ...]

First (part qualify) makes a record of this device in FOLDER/qualified (ship it from src/train/model/qualified). Exit code 0
only if every claim holds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.beside import ROOT, begin, words

SWEEPS = ("gpu_record", "gpu_replay")
PARTS = ("qualify", *SWEEPS)


class Point:
    """One finished (or not) point of the sweep."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder, self.given = folder, dict(o.split("=", 1) for o in overrides)
        self.given = {k: v.lower() if v in ("True", "False") else v for k, v in self.given.items()}
        try:
            self.status: dict[str, Any] = json.loads((folder / "status.json").read_text())
        except (OSError, ValueError):
            self.status = {"status": "pending", "reason": "", "summary": {}}
        self.summary: dict[str, Any] = self.status["summary"]
        self.ok = self.status["status"] == "ok"

    def tokens_per_s(self) -> float:
        """Median of the second half: warm-up is over."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return statistics.median(line["perf/throughput"] for line in lines[len(lines) // 2 :])


def flips(points: list[Point]) -> list[tuple[str, bool, str]]:
    """Every flip is caught with its step, rank and tensor."""
    hit = [p for p in points if "fault" in p.given]
    named = 0
    for p in hit:
        found = next(iter(p.summary.get("replay", {}).get("differences", [])), None)
        if found and p.summary.get("replay_match") is False:  # the fault spoils the first parameter's gradient
            named += (found["tensor"], found["step"], found["rank"]) == ("embed.weight.grad", 1, 0)
    return [("bit flips caught, with step, rank and tensor", named == len(hit) == 16, f"{named} of {len(hit)}")]


def replays(points: list[Point]) -> list[tuple[str, bool, str]]:
    """dense_1b replayed; activation checkpointing changes no bit."""
    mine = [p for p in points if p.given.get("replay") == "true" and "fault" not in p.given]
    rows, roots = [], {}
    for p in mine:
        name = f"replay compile={p.given['compile']}, {p.given.get('memory', 'no recompute')}"
        match = p.summary.get("replay_match")
        detail = f"replay_match {match}, attention {p.summary.get('attention_backend')}" if p.ok else p.status["reason"]
        rows.append((name, match is True, detail))
        if p.given["compile"] == "none":
            roots[p.given.get("memory", "none")] = p.summary.get("leaf_root")
    equal = len(roots) == 2 and None not in roots.values() and len(set(roots.values())) == 1
    return [*rows, ("recompute on = off, bitwise", equal, " / ".join(str(r)[:12] for r in roots.values()))]


def memory(points: list[Point]) -> list[tuple[str, bool, str]]:
    """Peak inside the steps and over the round, for each micro-batch."""
    rows = []
    for p in (p for p in points if "round" in p.given):
        detail = p.status["reason"]
        if p.ok:
            inside, whole = p.summary["rank_step_peak_mem_gib"][0], p.summary["rank_peak_mem_gib"][0]
            ratio = p.summary["round"]["compression_ratio"]
            detail = f"in steps {inside:.2f} GiB, over the round {whole:.2f} GiB, compression {ratio:.1f}"
        rows.append((f"memory micro_batch={p.given['micro_batch']}", p.ok, detail))
    return rows or [("memory", False, "no point ran")]


def price(points: list[Point]) -> list[tuple[str, bool, str]]:
    """Tokens/s with and without determinism."""
    rows = []
    for mode in ("none", "layer"):
        mine = {
            p.given["deterministic"]: p for p in points if "deterministic" in p.given and p.given["compile"] == mode
        }
        done = len(mine) == 2 and all(p.ok for p in mine.values())
        detail = "; ".join(f"{k}: {p.status['status']} {p.status['reason']}" for k, p in mine.items())
        if done:
            slow, fast = mine["true"].tokens_per_s(), mine["false"].tokens_per_s()
            paths = [mine[k].summary["attention_backend"] for k in ("true", "false")]
            detail = f"{slow:,.0f} ({paths[0]}) against {fast:,.0f} tokens/s ({paths[1]}): {100 * (1 - slow / fast):.1f} % less"
        rows.append((f"price of determinism, compile={mode}", done, detail))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / f"gpu_record-{int(time.time())}")
    parser.add_argument("--only", default=",".join(PARTS), help="some of the parts (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=450, help="seconds for the sweeps")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every point")
    args = parser.parse_args()
    parts = words(parser, "--only", args.only, PARTS)
    gpus = begin(parser)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [f"{ROOT / 'src'}", f"{ROOT}", os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(out)}
    folder = out / "mfu-sweep" / "qualified"  # where runs with this XDG_CACHE_HOME look for records
    if "qualify" in parts:
        subprocess.run([sys.executable, "-m", "train.qualify", "--out", str(folder)], env=env, cwd=ROOT, check=False)
    began = time.monotonic()
    wanted = [name for name in SWEEPS if name in parts]
    queues = [wanted[:1], wanted[1:]] if gpus > 1 else [wanted]

    def work(gpu: int) -> None:
        own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if gpus > 1 else {}
        for name in queues[gpu]:
            if (left := args.limit - (time.monotonic() - began)) < 1:
                continue  # its claims fail below
            command = [sys.executable, "-m", "train", "-m", f"sweeps={name}", f"out={out}", f"name={name}",
                       *args.overrides]  # fmt: skip
            process = subprocess.Popen(command, env=env | own, cwd=ROOT)
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                process.terminate()  # the running point is interrupted; what has finished is shown below
                process.wait()

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(len(queues))))
    points = []
    for name in wanted:
        file = out / name / "sweep.json"
        grid = json.loads(file.read_text())["grid"] if file.exists() else []
        points += [Point(out / name / g["folder"], g["overrides"]) for g in grid]
    checks = {"gpu_replay": [replays, flips], "gpu_record": [memory, price]}
    claims = [claim for name in wanted for check in checks[name] for claim in check(points)]
    print(f"\n{len(points)} points in {time.monotonic() - began:.0f} s")
    for name, holds, detail in claims:
        print(f"{'holds ' if holds else 'FAILED'}  {name:50} {detail}")
    for file in sorted(folder.glob("*.json")):
        (out / file.name).write_bytes(file.read_bytes())
        print(f"record: {out / file.name}")
    return 0 if all(holds for _, holds, _ in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
