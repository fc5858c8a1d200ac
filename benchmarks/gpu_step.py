"""The dense step on one GPU beside torchtitan's and the measured ceiling, on the same work in the same run.

    python -m benchmarks.gpu_step --out docs/results/step --settings mb16,mb8 --repeats 3 --budget 560 --peers /tmp/peers

Runs alternate (ours, torchtitan, ours, …), each in a process of its own, as a user would start it; a setting's figure is the
median over its repeats. A last profiled run of ours gives the time by kernel family. What an earlier call wrote to OUT.json
stays, each row with its date, so that a table can be made over several calls; ratios are within a call. Variants of ours,
in turn with each other, by --ours compile.kernels=inductor --ours "".
"""

import argparse
import json
import shutil
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from analysis import kernels
from benchmarks.beside import ROOT, begin, run_peer, words
from benchmarks.gpu_dp2 import rows, train


@dataclass(frozen=True)
class Setting:
    """The work of a row, as both sides are told it."""

    micro_batch: int
    seq_len: int = 2048
    recompute: str = "none"  # as torchtitan and memory.recompute call it
    graph: bool = False  # ours: the whole step as one CUDA graph
    precision: str = "auto"  # fp8: both sides with one scale a tensor

    def ours(self) -> list[str]:
        memory = {"none": "none", "full": "full_recompute", "selective": "selective"}[self.recompute]
        return ["model=dense_1b", "data=fake", "nproc=1", "compile=layer", f"seq_len={self.seq_len}",
                f"micro_batch={self.micro_batch}", f"memory={memory}", f"precision={self.precision}",
                *(["compile.cuda_graph=true"] if self.graph else [])]  # fmt: skip

    def peer(self) -> list[str]:
        float8 = ["fp8"] if self.precision == "fp8" else []  # torchao's default recipe; it takes the LM head too
        shape = [str(self.seq_len), str(self.micro_batch)]
        return ["torchtitan_dense.py", "dense_1b", *shape, self.recompute, "1", *float8]


SETTINGS = {
    **{f"mb{n}": Setting(n) for n in (16, 8, 4, 2, 1)},
    **{f"graph{n}": Setting(n, graph=True) for n in (16, 8, 4, 2, 1)},
    "full16": Setting(16, recompute="full"),
    "selective16": Setting(16, recompute="selective"),
    "seq8192": Setting(4, seq_len=8192),
    "fp8_16": Setting(16, precision="fp8"),
}


def ours(name: str, setting: Setting, *more: str) -> dict[str, Any]:
    """One run of this project's; {} where it did not end well."""
    shutil.rmtree(ROOT / "outputs" / name, ignore_errors=True)
    train(name, *setting.ours(), *more).wait()
    found = [row for row in rows(name) if "step_s" in row]
    return found[0] if found else {}


def families(name: str) -> dict[str, float]:
    """Milliseconds a step by kernel family, of a run with profile=true."""
    trace = next((ROOT / "outputs" / name).glob("*/traces/rank0.json.gz"), None)
    return {k: 1e3 * v / 2 for k, v in kernels.breakdown(kernels.read(trace)).items()} if trace else {}


def measure(key: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The table's rows of a setting: one for each of --ours, beside the same runs of the peer."""
    setting, theirs = SETTINGS[key], []
    mine: list[list[dict[str, Any]]] = [[] for _ in args.ours]
    for repeat in range(args.repeats):
        for index, more in enumerate(args.ours):
            mine[index].append(ours(f"step_{key}_{index}_{repeat}", setting, f"steps={args.steps}", *more.split()))
        if args.peers:
            theirs.append(run_peer(setting.peer(), 300, args.peers)[0])
    ceiling, _ = run_peer(["roofline.py", "dense_1b", str(setting.seq_len), str(setting.micro_batch)], 300, args.peers)
    found = []
    for index, more in enumerate(args.ours):
        profile = f"step_{key}_{index}_profile"
        ours(profile, setting, f"steps={args.steps}", "profile=true", *more.split())
        runs = [r for r in mine[index] if r]
        found.append(row(f"{key} {more}".strip(), setting, runs, [r for r in theirs if r], ceiling, families(profile)))
    return found


def row(
    name: str,
    setting: Setting,
    mine: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    ceiling: dict[str, Any],
    families_ms: dict[str, float],
) -> dict[str, Any]:
    """What stays of one variant of a setting."""
    return {
        "setting": name, "date": date.today().isoformat(), "micro_batch": setting.micro_batch, "seq_len": setting.seq_len,
        "recompute": setting.recompute, "precision": setting.precision, "steps_ms": [1e3 * r["step_s"] for r in mine],
        "tokens_per_s": [r["tokens_per_s"] for r in mine], "peak_gib": [r["rank_step_peak_mem_gib"][0] for r in mine],
        "mfu_causal": [r["mfu_causal"] for r in mine], "torchtitan": theirs, "ceiling": ceiling,
        "families_ms": families_ms,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row a setting, then the families."""
    head = ["setting", "date", "step ms", "tokens/s", "MFU causal %", "peak GiB", "torchtitan tokens/s", "its GiB", "ratio",
            "of ceiling %"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in results:
        if not r["tokens_per_s"]:
            lines.append(f"| {r['setting']} | {r['date']} | did not run |")
            continue
        rate = statistics.median(r["tokens_per_s"])
        peer = statistics.median([p["tok_s"] for p in r["torchtitan"]]) if r["torchtitan"] else None
        memory = max(p["peak_gib"] for p in r["torchtitan"]) if r["torchtitan"] else None
        low, high = min(r["steps_ms"]), max(r["steps_ms"])
        eight = r.get("precision") == "fp8"  # then MFU is of the fp8 peak, and the measured ceiling, bf16's, is none
        ceiling = None if eight else r["ceiling"].get("ceiling_tok_s")
        cells = [
            r["setting"], r["date"], f"{statistics.median(r['steps_ms']):.1f} ({low:.1f} to {high:.1f})", f"{rate:,.0f}",
            f"{statistics.median(r['mfu_causal']):.1f}{' of fp8' * eight}", f"{max(r['peak_gib']):.1f}",
            f"{peer:,.0f}" if peer else "", f"{memory:.1f}" if memory else "", f"{rate / peer:.3f}" if peer else "",
            f"{100 * rate / ceiling:.1f}" if ceiling else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    names = [c for c in kernels.COLUMNS if any(r["families_ms"].get(c, 0) >= 0.05 for r in results)]
    lines += ["", f"| setting, ms a step | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for r in results:
        times = [f"{r['families_ms'].get(c, 0):.1f}" for c in names]
        lines.append(f"| {' | '.join([r['setting'], *times])} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "step")
    p.add_argument("--settings", default=",".join(SETTINGS), help="(default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--budget", type=float, default=560.0, help="seconds after which no further setting starts")
    p.add_argument("--ours", action="append", help="overrides of ours, a row of its own for each --ours")
    p.add_argument("--peers", default="", help="folder with torchtitan and what it needs; empty: without it")
    args = p.parse_args()
    args.ours = args.ours or [""]
    settings = words(p, "--settings", args.settings, SETTINGS)
    begin(p)
    began, longest = time.monotonic(), 0.0
    file = args.out.with_suffix(".json")
    kept = {r["setting"]: r for r in json.loads(file.read_text())} if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    for key in settings:
        if time.monotonic() - began + longest > args.budget:
            print(f"budget used: {key} left out", flush=True)
            continue
        start = time.monotonic()
        kept |= {r["setting"]: r for r in measure(key, args)}
        longest = max(longest, time.monotonic() - start)
        file.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    shown = [r for k in SETTINGS for r in kept.values() if r["setting"].split()[0] == k]
    print(table(shown), f"\n{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
