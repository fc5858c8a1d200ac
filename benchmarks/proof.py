"""`make proof`: everything that has to hold on a GPU, in one command, and what may be claimed from it.

    PYTHON=python3 make proof              # or: python benchmarks/proof.py [--out FOLDER] [--steps N] [--recipe NAME]

Steps, each with its exit code and seconds in steps.tsv: a qualification record of this machine's attention kernels, the GPU
tests (a skip fails; side by side, but for those that want a GPU to themselves), the dense profile in training with replay=true
and the check of what these left. verdict.json says whether all of it passed, and whether this device, torch and driver are
among the qualified ones, those that a record shipped with the package covers: only there does a pass back a claim of bitwise
replay.

Exit code: 0 passed and qualified, 4 passed on an unqualified stack, 1 anything failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def run_step(name: str, command: list[str], out: Path, env: dict[str, str], limit: float) -> tuple[str, int, float]:
    """(name, exit code, seconds); the output goes to <name>.log. 124 for a step that ran out of time."""
    began = time.monotonic()
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    with open(out / f"{name}.log", "wb") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.monotonic() - began
    print(f"{name}: exit code {code}, {seconds:.1f} s", flush=True)
    if code:
        print((out / f"{name}.log").read_text(errors="replace")[-3000:], flush=True)
    return name, code, seconds


def room() -> tuple[str, int]:
    """(which of the tests marked gpu can run here, how many of them side by side): two cores and 16 GiB of a GPU for each."""
    code = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.mem_get_info(0)[0] if n else 0)"
    gpus, free = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    workers = min(8, len(os.sched_getaffinity(0)) // 2, free >> 34)
    return "gpu" if gpus > 1 else "gpu and not two_gpus", max(1, workers)


def gpu_tests(report: Path) -> list[str]:
    """What is wrong with pytest's report: no tests, failures, skips."""
    try:
        cases = ElementTree.parse(report).getroot().iter("testcase")
    except (OSError, ElementTree.ParseError) as e:
        return [f"no report of the GPU tests: {e}"]
    bad, count = [], 0
    for case in cases:
        count += 1
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        bad += [f"{case.get('classname')}.{case.get('name')}: {kind}" for kind in sorted(kinds)]
    return bad if count else ["no GPU test ran"]


def replayed(sweep: Path, fast_path: bool) -> tuple[list[str], dict[str, Any]]:
    """(what is wrong with the replayed run, its summary). The Merkle root is computed again from the leaves."""
    from train.replay.compare import merkle_root

    found = sorted(sweep.glob("*/status.json"))
    if not found:
        return ["the replayed run left no status.json"], {}
    bad, summary = [], {}
    for path in found:
        status = json.loads(path.read_text())
        summary = status.get("summary", {})
        name = path.parent.name
        if status["status"] != "ok":
            bad.append(f"{name}: {status['status']}: {status['reason']}")
            continue
        if summary.get("replay_match") is not True:
            bad.append(f"{name}: {summary.get('replay_difference') or 'no replay'}")
        lines = [json.loads(line) for line in (path.parent / "leaves.jsonl").read_text().splitlines()]
        root = merkle_root([bytes.fromhex(leaf) for line in lines for leaf in line["leaves"]])
        if root != summary.get("leaf_root"):
            bad.append(f"{name}: the leaves give root {root}, status.json says {summary.get('leaf_root')}")
        if fast_path and summary.get("attention_backend") == "math":
            bad.append(f"{name}: attention ran on the math path, not on a fused kernel")
        if summary.get("attention_qualified") is not True:
            bad.append(f"{name}: no record qualifies attention={summary.get('attention_backend')}")
    return bad, summary


def qualified_stacks() -> list[dict[str, Any]]:
    """What the records shipped with the package cover."""
    from train.model import qualified

    files = qualified.load(qualified.shipped())
    return [{k: f.get(k) for k in ("device", "capability", "torch", "driver")} for f in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / f"proof-{datetime.now():%Y-%m-%d_%H-%M-%S}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the command itself")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recipe", default="dense_1b_h200")
    parser.add_argument("--override", action="append", default=[], help="more KEY=VALUE for the replayed run")
    parser.add_argument("--tests", default="tests", help="where the GPU tests are; fewer prove less")
    parser.add_argument("--limit", type=float, default=420, help="seconds a step may take")
    args = parser.parse_args()
    from benchmarks.beside import begin

    begin(parser, gpu=args.device == "cuda")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [f"{ROOT / 'src'}", f"{ROOT}", os.environ.get("PYTHONPATH")]))
    env = os.environ | {
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "REQUIRE_GPU": "1",
        "XDG_CACHE_HOME": str(out / "cache"),
    }
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    which, workers = room()
    tests = {
        "gpu_tests": [f"{which} and not whole_gpu", "-n", str(workers), "--dist", "worksteal"],
        "gpu_tests_alone": ["gpu and whole_gpu"],
    }
    if args.tests != "tests":
        del tests["gpu_tests_alone"]  # which are few, and may be elsewhere
    train = ["-m", "train", f"recipe={args.recipe}", "replay=true", f"steps={args.steps}", f"device={args.device}",
             f"out={out}", "name=replayed", *args.override]  # fmt: skip
    steps = [
        run_step("qualify", [python, "-m", "train.qualify", "--device", args.device], out, env, args.limit),
        *(run_step(name, [*pytest, f"--junitxml={out / name}.xml", args.tests, "-m", *how], out, env, args.limit)
          for name, how in tests.items()),
        run_step("replayed", [python, *train], out, env, args.limit),
    ]  # fmt: skip
    began = time.monotonic()
    wrong = [line for name in tests for line in gpu_tests(out / f"{name}.xml")]
    more, summary = replayed(out / "replayed", args.device == "cuda")
    wrong += more + [f"step {name} ended with exit code {code}" for name, code, _ in steps if code]
    steps.append(("evidence", int(bool(wrong)), time.monotonic() - began))
    with open(out / "steps.tsv", "w", encoding="utf-8") as f:
        f.writelines(f"{name}\t{code}\t{seconds:.1f}\n" for name, code, seconds in steps)
    verdict = judge(out, wrong, summary)
    (out / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n")
    print((out / "steps.tsv").read_text(), verdict["claim"], *wrong, sep="\n", flush=True)
    return 1 if wrong else 0 if verdict["qualified"] else 4


def judge(out: Path, wrong: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    """verdict.json: passed, qualified, the stack it ran on, those that are qualified, and the claim in a sentence."""
    made = sorted((out / "cache" / "mfu-sweep" / "qualified").glob("*.json"))
    record = json.loads(made[0].read_text()) if made else {}
    here = {k: record.get(k) for k in ("device", "capability", "torch", "driver")}
    stacks = qualified_stacks()
    qualified = bool(record) and here in stacks
    text = f"{here['device']}, torch {here['torch']}, driver {here['driver']}"
    if wrong:
        claim = f"FAILED on {text}: nothing is claimed."
    elif qualified:
        claim = f"PASSED on {text}, which is qualified: replay is bitwise here."
    else:
        claim = f"PASSED on {text}, which no shipped record qualifies: the run is valid, no claim of bitwise replay is made."
    return {
        "passed": not wrong,
        "qualified": qualified,
        "claim": claim,
        "here": here,
        "qualified_stacks": stacks,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "wrong": wrong,
        "leaf_root": summary.get("leaf_root"),
        "attention_backend": summary.get("attention_backend"),
        "engine": summary.get("engine"),
    }


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    sys.exit(main())
