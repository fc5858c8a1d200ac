"""Every memory lever on one GPU: tokens/s, peak memory and what it is made of, each against the run without the lever.

    python -m benchmarks.gpu_memory                        # all parts, at most 530 s
    python -m benchmarks.gpu_memory --only dense,peer      # dense_1b and torchtitan beside it
    python -m benchmarks.gpu_memory --levers none,budget   # some levers of each part
    python -m benchmarks.gpu_memory --json memory.json     # the rows as JSON too, beside those of earlier calls
    python -m benchmarks.gpu_memory --only nothing --json memory.json --picture memory.svg    # what is there already

Parts: `dense` is dense_1b at seq 2048, micro-batch 16; `llama` is llama3_8b at seq 8192, against full recompute with the
chunked head (a plain run does not fit); `tight` is llama3_8b under recipe=memory_tight at seq 32768; `peer` is torchtitan
(benchmarks/peers) on dense_1b. What the time is too short for is listed as not run. Prints one table, last; ratios
are within a call, and a row that was measured again takes the earlier one's place.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis.plots.bars import stack
from analysis.plots.style import context, figure, finish, legend
from benchmarks.beside import ROOT, begin, earlier, run_peer, words
from train.sweep.freeze import write_atomic

DENSE = ["recipe=dense_1b_h200", "steps=14"]
LLAMA = ["model=llama3_8b", "data=fake", "compile=layer", "seq_len=8192", "micro_batch=2", "steps=6"]
SECONDS = 240  # of one point: a lever that hangs costs the others no more
WARM = 4  # steps that are left out: compile, allocator, the step whose allocations are recorded


@dataclass
class Part:
    """One sweep over memory=…, its levers compared to the first one."""

    name: str
    overrides: list[str]
    levers: list[str]


PARTS = [
    Part("dense", DENSE, ["none", "selective", "full_recompute", "offload", "chunked_head", "optimizer_offload"]),
    Part("dense, more", DENSE, ["activation_offload", "every_second", "budget"]),
    Part("dense, host", [*DENSE, "optim.clip_norm=null"], ["full_offload"]),
    Part("dense, bf16 state", [*DENSE, "optim.state_dtype=bf16"], ["none"]),
    Part("llama", [*LLAMA, "memory.lm_head_chunk=8192"], ["full_recompute", "offload", "selective"]),
    Part(
        "tight",
        ["model=llama3_8b", "data=fake", "recipe=memory_tight", "seq_len=32768", "micro_batch=1", "steps=5"],
        [""],
    ),
]


@dataclass
class Row:
    part: str
    lever: str
    status: str
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    host_gib: float | None = None
    kinds_gib: dict[str, float] = field(default_factory=dict)
    date: str = field(default_factory=lambda: date.today().isoformat())
    slower_pct: float | None = None  # than the part's first lever
    less_memory_pct: float | None = None
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="dense,llama,tight,peer", help="parts, by the first word of their names")
    parser.add_argument("--seconds", type=float, default=530, help="nothing is started that would end later")
    parser.add_argument("--out", type=Path, help="where run folders go; a temporary folder by default")
    parser.add_argument("--levers", help="of the parts, by name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="SVG of the memory by kind")
    args = parser.parse_args()
    known = [*(part.name for part in PARTS if "," not in part.name), "peer", "nothing"]
    wanted = set(words(parser, "--only", args.only, known))
    every = {lever for part in PARTS for lever in part.levers}  # "": what a recipe sets
    levers = set(words(parser, "--levers", args.levers, sorted(every - {""}))) if args.levers else every
    if len(wanted) > 1 and "nothing" in wanted:
        parser.error(f"--only {args.only}: nothing stands alone")
    if args.picture is not None and (args.picture.is_dir() or not args.picture.absolute().parent.is_dir()):
        parser.error(f"--picture {args.picture}: no such folder, or a folder")
    found = earlier(parser, "--json", args.json, (f.name for f in fields(Row)))
    before = [Row(**row) for row in found]
    begin(parser, gpu=wanted != {"nothing"})
    end = time.monotonic() + args.seconds
    rows: list[Row] = []

    def keep(more: list[Row]) -> None:
        rows.extend(more)
        if args.json is not None:
            write_atomic(args.json, json.dumps([asdict(row) for row in merged(before, rows)], indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        # what is compared comes first; extras last
        for part in sorted((p for p in PARTS if p.name.split(",")[0] in wanted), key=lambda p: "," in p.name):
            keep(run(part, levers, out, end))
            if part.name == "dense" and "peer" in wanted:
                keep(beside_dense(end))
    if "peer" in wanted and "dense" not in wanted:
        keep(beside_dense(end))
    compare(rows)
    keep([])  # with the ratios
    rows = merged(before, rows)
    show(rows)
    if args.picture is not None and any(row.peak_gib for row in rows):
        args.picture.write_bytes(picture(rows))
    return 0 if any(row.status == "ok" for row in rows) else 1


def merged(before: list[Row], rows: list[Row]) -> list[Row]:
    """All rows in the order of PARTS and their levers, the peer's last; a row that did not run takes no other's place."""
    found = {(row.part, row.lever): row for row in before}
    found |= {(row.part, row.lever): row for row in rows if row.status == "ok" or (row.part, row.lever) not in found}
    order = [(part.name, lever or "recipe=memory_tight") for part in PARTS for lever in part.levers]
    return sorted(
        found.values(), key=lambda row: order.index(key) if (key := (row.part, row.lever)) in order else len(order)
    )


def picture(rows: list[Row]) -> bytes:
    """SVG: a bar a lever of dense_1b, stacked by what the memory holds; torchtitan's is one piece."""
    shown = [row for row in rows if row.peak_gib and row.part.split(",")[0] in ("dense", "peer")]
    kinds = list(dict.fromkeys(kind for row in shown for kind in row.kinds_gib))
    parts = {kind: np.array([row.kinds_gib.get(kind, 0.0) for row in shown]) for kind in kinds}
    parts["not told apart"] = np.array([0.0 if row.kinds_gib else row.peak_gib or 0.0 for row in shown])
    names = [
        row.lever if row.part in ("dense", "dense, more", "peer") else f"{row.lever}, {row.part[7:]}" for row in shown
    ]
    with context():
        fig, ax = figure((6.6, 1.6 + 0.28 * len(shown)))
        ends = stack(ax, parts, names)
        for i, row in enumerate(shown):
            ax.text(ends[i] + 0.6, i, f"{row.tokens_per_s:,.0f} tokens/s", va="center", fontsize=7)
        ax.set_xlim(0, 1.25 * ends.max())
        ax.set_xlabel("GiB at the step's peak")
        legend(fig, ax)
        return finish(fig, "memory_levers", "Memory by kind over the levers", "").svg


def run(part: Part, levers: set[str], out: Path, end: float) -> list[Row]:
    """The part's levers as one sweep; what it hasn't finished by `end` is cut off."""
    chosen = [lever for lever in part.levers if lever in levers]
    rows = {lever: Row(part.name, lever or "recipe=memory_tight", "not run") for lever in chosen}
    left = end - time.monotonic()
    if not chosen or left < 45:  # less than a start, a compile and a few steps take
        return list(rows.values())
    name = part.name.replace(", ", "-").replace(" ", "-")
    choice = [f"memory={','.join(filter(None, chosen))}"] if any(chosen) else []
    command = [sys.executable, "-m", "train", "-m", f"out={out}", f"name={name}", "nproc=1", *part.overrides, *choice]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    with subprocess.Popen([*command, f"timeout={SECONDS}"], cwd=ROOT) as sweep:
        try:
            code = sweep.wait(left)
        except subprocess.TimeoutExpired:
            sweep.terminate()  # it ends its ranks, and writes what became of its points
            try:
                code = sweep.wait(60)
            except subprocess.TimeoutExpired:
                sweep.kill()
                code = sweep.wait()
    for folder in sorted(f.parent for f in (out / name).glob("*/status.json")):
        lever = yaml.safe_load((folder / "config.yaml").read_text())["memory"]["name"]
        fill(rows[lever if lever in rows else chosen[0]], folder)
    for row in rows.values():
        if code and row.status == "not run":
            row.status = f"exit code {code}"
    return list(rows.values())


def fill(row: Row, folder: Path) -> None:
    """From what the run left."""
    status = json.loads((folder / "status.json").read_text())
    row.status = status["status"] if status["status"] == "ok" else f"{status['status']}: {status.get('reason')}"[:160]
    if status["status"] != "ok":
        return
    began, ended = (datetime.fromisoformat(status[key]) for key in ("started", "ended"))
    row.seconds = (ended - began).total_seconds()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = lines[WARM:] or lines[-1:]
    row.tokens_per_s = statistics.median(line["perf/throughput"] for line in late)
    row.peak_gib = max(line["perf/peak_memory"] for line in late)
    summary: dict[str, Any] = status["summary"]
    row.host_gib = max(summary.get("rank_host_peak_gib", [0.0]))
    row.kinds_gib = (summary.get("memory_by_kind") or [{}])[0]


def beside_dense(end: float) -> list[Row]:
    """torchtitan with dense_1b's geometry, sequence and micro-batch, compiled, by recompute."""
    modes = ("none", "selective", "full")
    return [
        torchtitan(Row("peer", f"torchtitan {mode}", "not run"), ["dense_1b", "2048", "16", mode, "1"], end)
        for mode in modes
    ]


def torchtitan(row: Row, arguments: list[str], end: float) -> Row:
    """`row`, filled by torchtitan: geometry, sequence, micro-batch, recompute, compile."""
    left, start = end - time.monotonic(), time.monotonic()
    if left < 40:  # it takes 25 to 30 s on an H200
        return row
    said, why = run_peer(["torchtitan_dense.py", *arguments], left)
    row.seconds = time.monotonic() - start
    if why:
        row.status = why
        return row
    row.status, row.tokens_per_s, row.peak_gib = "ok", said["tok_s"], said["peak_gib"]
    return row


def compare(rows: list[Row]) -> None:
    """Every row against the first lever of its PARTS; offload against full recompute, which it adds to."""
    for row in rows:
        family = row.part.split(",")[0]
        first = next((part.levers[0] for part in PARTS if part.name == family), "torchtitan none")
        lever = "full_recompute" if row.lever == "offload" else first
        base = next((r for r in rows if r.part == family and r.lever == lever and r is not row), None)
        if base is None or not (row.tokens_per_s and row.peak_gib and base.tokens_per_s and base.peak_gib):
            continue
        row.slower_pct = 100 * (1 - row.tokens_per_s / base.tokens_per_s)
        row.less_memory_pct = 100 * (1 - row.peak_gib / base.peak_gib)


def show(rows: list[Row]) -> None:
    """The table. Offload is compared with full recompute, all else with the part's first row."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds_gib))
    head = ["part", "lever", "date", "tokens/s", "slower %", "peak GiB", "less %", "host GiB", *kinds]
    table = [head]
    for row in rows:
        if row.tokens_per_s is None:
            table.append([row.part, row.lever, row.date, row.status])
            continue
        numbers = [
            row.slower_pct,
            row.peak_gib,
            row.less_memory_pct,
            row.host_gib,
            *(row.kinds_gib.get(k) for k in kinds),
        ]
        shown = ["" if n is None else f"{n:.1f}" for n in numbers]
        table.append([row.part, row.lever, row.date, f"{row.tokens_per_s:,.0f}", *shown])
    widths = [max(len(r[i]) for r in table if i < len(r) and len(r) > 4) if table else 0 for i in range(len(head))]
    for line in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=False)).rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
