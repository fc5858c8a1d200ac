"""The data-parallel table on two GPUs of one host: one self-contained command of at most ten minutes, its table last.

    python -m benchmarks.gpu_dp2 --out docs/results/dp2 --budget 560

Runs in this order and stops starting new parts when the budget (seconds) is nearly used: the 18 points of
sweeps=dp2_reductions; two independent single-GPU runs side by side; torchtitan with FSDP; buckets and transport of zero2o;
NCCL presets; replay over NCCL.
Every part is the command that a user would type. NVLink multicast stays as the environment has it (off where it must be).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.beside import ROOT, begin, peers, run_peer, words
from train.sweep.freeze import write_atomic

DENSE = ["model=dense_1b", "data=fake", "seq_len=2048", "compile=layer"]
SWEEPS = ("dp2", "dp2_buckets", "dp2_nccl", "dp2_replay", "dp2_single0", "dp2_single1")
#: column of the table → of a row
TOLD = {"run": "sweep", "reduction": "reduction", "bucket MiB": "bucket_mib", "transport": "transport",
        "recompute": "recompute", "nccl": "nccl", "micro-batch": "micro_batch"}  # fmt: skip
PARTS = "grid,single,peer,tuned,nccl,replay"
STEADY = 5  # steps dropped: compile and the first steps after it


def train(name: str, *args: str, **env: str) -> subprocess.Popen[bytes]:
    """Start `python -m train`; outputs/<name> holds the points."""
    command = [sys.executable, "-m", "train", "-m", *args, f"name={name}"]
    print("$", *(f"{k}={v}" for k, v in env.items()), " ".join(["python", *command[1:]]), flush=True)
    return subprocess.Popen(command, env=os.environ | env, cwd=ROOT)


def rows(name: str) -> list[dict[str, Any]]:
    """One row a point: configuration, median step over the steady steps, memory, communication, hashes."""
    out = []
    for status in sorted((ROOT / "outputs" / name).glob("*/status.json")):
        import yaml

        s = json.loads(status.read_text())
        cfg = yaml.safe_load((status.parent / "config.yaml").read_text())
        row: dict[str, Any] = {
            "sweep": name, "reduction": cfg["reduction"]["name"], "bucket_mib": cfg["reduction"]["bucket_mib"],
            "transport": cfg["reduction"]["transport"] or "collective",
            "micro_batch": cfg["micro_batch"], "recompute": cfg["memory"]["recompute"], "nccl": cfg["nccl"]["name"],
            "nproc": cfg["nproc"], "point": status.parent.name, "status": s["status"], "reason": s["reason"],
        }  # fmt: skip
        lines = (
            [json.loads(x) for x in (status.parent / "metrics.jsonl").read_text().splitlines()]
            if s["status"] == "ok"
            else []
        )
        if lines:
            steady = sorted(x["time/step"] for x in lines[STEADY:] or lines[-1:])
            step = steady[len(steady) // 2]
            summary = s["summary"]
            tokens = summary["tokens_per_step"] / step
            peak = summary["peak"]["flops"] * cfg["nproc"]
            exposed = (summary.get("traffic") or {}).get("exposed_s_mean")
            row |= {
                "step_s": step, "tokens_per_s": tokens, "mfu": 100 * tokens * summary["flops_per_token"]["mfu"] / peak,
                "mfu_causal": 100 * tokens * summary["flops_per_token"]["mfu_causal"] / peak,
                "rank_step_peak_mem_gib": summary.get("rank_step_peak_mem_gib"), "exposed_s": exposed,
                "first_step_s": sum(summary["seconds"].get(phase, 0) for phase in ("start", "fabric", "build", "compile")),
                "leaf_root": summary.get("leaf_root"), "replay_match": summary.get("replay_match"),
                "curve": [(x["loss"], x["grad_norm"]) for x in lines],
            }  # fmt: skip
        out.append(row)
    return out


def torchtitan(micro_batch: int, packages: str) -> dict[str, Any]:
    """The peer under torchrun on two GPUs; {} when it did not print its line."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "torchtitan_dense.py",
               "dense_1b", "2048", str(micro_batch), "none", "1"]  # fmt: skip
    return run_peer(command, 200, packages)[0]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = [*TOLD, "step ms", "tokens/s", "MFU %", "MFU causal %", "in-step peak GiB / rank", "exposed %"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in results:
        told = [str(r[key]) for key in TOLD.values()]
        if r["status"] != "ok" or "step_s" not in r:
            lines.append(f"| {' | '.join(told)} | {r['status']}: {r['reason']} |")
            continue
        memory = " / ".join(f"{m:.2f}" for m in r["rank_step_peak_mem_gib"] or [])
        exposed = "" if r["exposed_s"] is None else f"{100 * r['exposed_s'] / r['step_s']:.2f}"
        numbers = [f"{1e3 * r['step_s']:.1f}", f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.2f}", f"{r['mfu_causal']:.2f}"]
        lines.append(f"| {' | '.join([*told, *numbers, memory, exposed])} |")
    return "\n".join(lines)


def claims(results: list[dict[str, Any]], peer: list[dict[str, Any]]) -> list[str]:
    """What the runs show, as sentences with numbers."""
    out = []
    grid = {
        (r["sweep"], r["reduction"], r["recompute"], r["nccl"], r["micro_batch"]): r for r in results if "step_s" in r
    }
    for mb in (4, 8, 12):
        a, b = (grid.get(("dp2", name, "none", "default", mb)) for name in ("zero2", "zero2o"))
        if a and b:
            out.append(
                f"zero2 = zero2o at micro_batch {mb} (loss and norm of every step, bit for bit): {a['curve'] == b['curve']}"
            )
    singles = [r["tokens_per_s"] for r in results if r["sweep"].startswith("dp2_single") and "step_s" in r]
    for r in results:
        if "step_s" not in r or r["nproc"] == 1 or r["sweep"] == "dp2_replay":
            continue
        if r["reduction"] != "zero2o" or r["recompute"] != "none" or r["nccl"] != "default":
            continue
        run = f"{r['sweep']}: zero2o, {r['transport']}, buckets of {r['bucket_mib']:g} MiB, micro_batch {r['micro_batch']}"
        if r["exposed_s"] is not None:
            out.append(f"{run}: exposed communication {100 * r['exposed_s'] / r['step_s']:.2f} % of the step")
        if r["micro_batch"] == 12 and len(singles) == 2:
            out.append(f"{run}: {r['tokens_per_s'] / sum(singles):.4f} of two independent single-GPU runs")
        out += [
            f"{run}: {r['tokens_per_s'] / p['tok_s']:.3f} times torchtitan FSDP ({p['tok_s']:,} tokens/s)"
            for p in peer
            if p["mb"] == r["micro_batch"]
        ]
    replays = [r for r in results if r["sweep"] == "dp2_replay"]
    for r in replays:
        root = (r.get("leaf_root") or "")[:12]
        out.append(
            f"replay {r['reduction']} nccl={r['nccl']}: {r['status']} replay_match={r.get('replay_match')} leaf_root={root}"
        )
    if len(roots := {r.get("leaf_root") for r in replays}) == 1 and len(replays) > 1 and None not in roots:
        out.append("one leaf root over all of them")
    return out


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_dp2", help="PREFIX of .json and .txt")
    p.add_argument("--budget", type=float, default=560.0, help="seconds after which no further part starts")
    p.add_argument("--peers", default="", help="folder with torchtitan and what it needs")
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--transports", default="collective,peer", help="of the part tuned (default: %(default)s)")
    p.add_argument(
        "--buckets", default="25,100,400", help="reduction.bucket_mib of the part tuned (default: %(default)s)"
    )
    p.add_argument("--parts", default=PARTS, help="which parts to run; others are read if there (default: %(default)s)")
    args = p.parse_args()
    parts = words(p, "--parts", args.parts, PARTS.split(","))
    words(p, "--transports", args.transports, ("collective", "peer"))
    if not all(re.fullmatch(r"\d+(\.\d+)?", size) and float(size) for size in args.buckets.split(",")):
        p.error(f"--buckets {args.buckets}: MiB above 0, joined by commas")
    if args.steps < 1:
        p.error(f"--steps {args.steps}: at least 1")
    peers(p, args.peers)
    if not args.out.absolute().parent.is_dir() and args.out.parent != ROOT / "outputs":
        p.error(f"--out {args.out}: no such folder")
    begin(p)
    began = time.monotonic()
    steps = f"steps={args.steps}"

    def left(need: float) -> bool:
        return args.budget - (time.monotonic() - began) > need

    peer: list[dict[str, Any]] = []

    def report() -> str:
        """What is known so far, written to the files: a command that is cut off leaves it."""
        results = [r for name in SWEEPS for r in rows(name)]
        record = {
            "date": date.today().isoformat(), "command": "python -m benchmarks.gpu_dp2", "results": results,
            "torchtitan": peer, "claims": claims(results, peer),
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        said = [*(f"- {c}" for c in record["claims"]), "", *(json.dumps(p) for p in peer), "", table(results)]
        args.out.with_suffix(".txt").write_text("\n".join(said) + "\n")
        return "\n".join(said)

    if "grid" in parts:
        for name in SWEEPS:
            shutil.rmtree(ROOT / "outputs" / name, ignore_errors=True)
        train("dp2", "sweeps=dp2_reductions", steps).wait()
        report()
    if "single" in parts and left(60):
        alone = [*DENSE, "micro_batch=12", "nproc=1", "reduction=zero2o", steps]
        pair = [train(f"dp2_single{i}", *alone, CUDA_VISIBLE_DEVICES=str(i)) for i in (0, 1)]
        for run in pair:
            run.wait()
        report()
    if "peer" in parts and args.peers and left(60):
        peer += [r for r in [torchtitan(12, args.peers)] if r]
        report()
    pairs = [*DENSE, "nproc=2", "reduction=zero2o"]
    if "tuned" in parts and left(90):  # how long the matmuls beside a collective wait for its SMs
        how = [f"reduction.bucket_mib={args.buckets}", f"reduction.transport={args.transports}", "timeout=90"]
        train("dp2_buckets", *pairs, "micro_batch=12", *how, steps).wait()
        report()
    if "nccl" in parts and left(60):
        train("dp2_nccl", *pairs, "micro_batch=8", "nccl=default,pcie", steps).wait()
        report()
    if "replay" in parts and left(100):
        how = ["reduction=zero2,zero2o", "nccl=default,pcie", "replay=true", "steps=4"]
        train("dp2_replay", *DENSE, "nproc=2", "micro_batch=4", *how).wait()
        report()
    if "peer" in parts and args.peers and left(70):
        peer += [r for r in [torchtitan(8, args.peers)] if r]
    print(report(), f"\n{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
