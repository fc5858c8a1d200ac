"""The dense step on one GPU beside torchtitan's and the measured ceiling, on the same work in the same run.

    python -m benchmarks.gpu_step --out docs/results/step --settings mb16,mb8 --repeats 3 --budget 560 --peers /tmp/peers

Ours and torchtitan's runs alternate: in each round one sweep of ours for the settings that differ in micro_batch, then the peer
on the same work. A setting's figure is the median over the rounds; the first one of ours is profiled, for the time by kernel
family. What an earlier call wrote to OUT.json stays, each row with its date, so that a table can be made over several calls;
ratios are within a call. Variants of ours, in turn with each other, by --ours compile.kernels=inductor --ours "".
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from analysis import kernels
from benchmarks.beside import ROOT, begin, earlier, peers, run_peer, words
from benchmarks.gpu_dp2 import STEADY, rows, train
from train.sweep.freeze import write_atomic


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
                f"memory={memory}", f"precision={self.precision}",
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


def sweeps(settings: list[str]) -> list[list[str]]:
    """Settings that one sweep over micro_batch runs."""
    found: dict[Setting, list[str]] = {}
    for key in settings:
        found.setdefault(replace(SETTINGS[key], micro_batch=0), []).append(key)
    return list(found.values())


def ours(name: str, settings: list[str], *more: str) -> dict[str, dict[str, Any]]:
    """One sweep of this project's over settings that differ in micro_batch; those that ended well."""
    shutil.rmtree(ROOT / "outputs" / name, ignore_errors=True)
    sizes = {SETTINGS[key].micro_batch: key for key in settings}
    micro_batch = f"micro_batch={','.join(map(str, sizes))}"
    train(name, *SETTINGS[settings[0]].ours(), micro_batch, *more).wait()
    return {sizes[row["micro_batch"]]: row | {"sweep": name} for row in rows(name) if "step_s" in row}


def families(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a step by kernel family, of a run with profile=true."""
    trace = ROOT / "outputs" / row["sweep"] / row["point"] / "traces" / "rank0.json.gz"
    return {k: 1e3 * v / 2 for k, v in kernels.breakdown(kernels.read(trace)).items()} if trace.exists() else {}


def measure(settings: list[str], args: argparse.Namespace, end: float) -> Iterator[list[dict[str, Any]]]:
    """After each sweep of ours and the peer's runs beside it, the table's rows of its settings so far: one for each variant of
    ours. Nothing starts after `end`."""
    mine: dict[tuple[str, str], list[dict[str, Any]]] = {(k, more): [] for k in settings for more in args.ours}
    theirs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    ceilings: dict[str, dict[str, Any]] = {}
    for repeat in range(args.repeats):
        tried: set[tuple[str, ...]] = set()  # in this round: settings may share the peer's work
        for at, together in enumerate(sweeps(settings)):
            if time.monotonic() > end:
                print(f"budget used: round {repeat + 1} of {', '.join(together)} left out", flush=True)
                continue
            profile = [] if repeat else ["profile=true"]  # of two late steps, which the median doesn't see
            for index, more in enumerate(args.ours):
                done = ours(f"step_{at}_{index}_{repeat}", together, f"steps={args.steps}", *profile, *more.split())
                for key, row in done.items():
                    mine[key, more].append(row)
            works = [tuple(SETTINGS[key].peer()) for key in together] if args.peers else []
            for arguments in dict.fromkeys(a for a in works if a not in tried):
                tried.add(arguments)
                found = run_peer(list(arguments), 300, args.peers)[0]
                theirs.setdefault(arguments, []).extend([found] if found else [])
            for key in set(args.ceilings) & set(together) - set(ceilings):
                shape = [str(SETTINGS[key].seq_len), str(SETTINGS[key].micro_batch)]
                ceilings[key] = run_peer(["roofline.py", "dense_1b", *shape], 300, args.peers)[0]
            yield [
                described(
                    key, more, mine[key, more], theirs.get(tuple(SETTINGS[key].peer()), []), ceilings.get(key, {})
                )
                for key in together
                for more in args.ours
            ]


def described(
    key: str, more: str, mine: list[dict[str, Any]], theirs: list[dict[str, Any]], ceiling: dict[str, Any]
) -> dict[str, Any]:
    """What stays of one variant of a setting."""
    setting = SETTINGS[key]
    return {
        "setting": f"{key} {more}".strip(), "date": date.today().isoformat(), "micro_batch": setting.micro_batch,
        "seq_len": setting.seq_len, "recompute": setting.recompute, "precision": setting.precision,
        "steps_ms": [1e3 * r["step_s"] for r in mine], "tokens_per_s": [r["tokens_per_s"] for r in mine],
        "peak_gib": [r["rank_step_peak_mem_gib"][0] for r in mine], "mfu_causal": [r["mfu_causal"] for r in mine],
        "first_step_s": [r["first_step_s"] for r in mine], "torchtitan": theirs, "ceiling": ceiling,
        "families_ms": families(mine[0]) if mine else {},
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row a setting, then the families."""
    head = ["setting", "date", "step ms", "tokens/s", "MFU causal %", "peak GiB", "first step s", "torchtitan tokens/s",
            "its GiB", "ratio", "of ceiling %"]  # fmt: skip
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
            f"{max(r.get('first_step_s') or [0]):.0f}",
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


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "step")
    p.add_argument("--settings", default=",".join(SETTINGS), help="(default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--budget", type=float, default=560.0, help="seconds after which no further sweep starts")
    p.add_argument(
        "--ceilings", default="mb16,seq8192", help="settings whose ceiling is measured (default: %(default)s)"
    )
    p.add_argument("--ours", action="append", help="overrides of ours, a row of its own for each --ours")
    p.add_argument("--peers", default="", help="folder with torchtitan and what it needs; empty: without it")
    args = p.parse_args()
    args.ours = args.ours or [""]
    settings = words(p, "--settings", args.settings, SETTINGS)
    args.ceilings = words(p, "--ceilings", args.ceilings, SETTINGS)
    if args.repeats < 1 or args.steps <= STEADY:
        p.error(f"--repeats {args.repeats} --steps {args.steps}: at least 1, and {STEADY + 1}")
    peers(p, args.peers)
    file = args.out.with_suffix(".json")
    kept = {r["setting"]: r for r in earlier(p, "--out", file, ("setting", "steps_ms", "tokens_per_s"))}
    begin(p)
    began = time.monotonic()
    failed = False
    for found in measure(settings, args, began + args.budget):
        failed |= not all(r["tokens_per_s"] for r in found)
        kept |= {r["setting"]: r for r in found if r["tokens_per_s"] or r["setting"] not in kept}
        write_atomic(file, json.dumps(list(kept.values()), indent=1) + "\n")
    shown = [r for k in SETTINGS for r in kept.values() if r["setting"].split()[0] == k]
    print(table(shown), f"\n{time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
