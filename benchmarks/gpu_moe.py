"""moe_3b on one GPU, seq 2048, micro-batch 8, compiled: this project's routing, forced even routing, and torchtitan beside it.

    python -m benchmarks.gpu_moe                     # the three rows, at most 530 s
    python -m benchmarks.gpu_moe --json moe.json     # as JSON too
    python -m benchmarks.gpu_moe --no-peer           # without torchtitan (benchmarks/peers says what it needs)

Prints where the steps' time goes by kernel family, the rows, and last the ratio of the first row to torchtitan's.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from analysis import kernels
from benchmarks.beside import begin, earlier
from benchmarks.gpu_memory import Part, Row, run, torchtitan
from train.sweep.freeze import write_atomic

MOE = ["recipe=moe_3b_h200", "steps=24", "profile=true"]
CASES = {
    "router": ["model.balance=none"],
    "forced even": ["model.balance=none", "model.force_balance=true"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=530, help="nothing is started that would end later")
    parser.add_argument("--out", type=Path, help="where run folders go; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    earlier(parser, "--json", args.json, ("part", "lever"))
    begin(parser)
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        router, forced = (Part(f"moe, {name}", [*MOE, *keys], ["none"]) for name, keys in CASES.items())
        rows: list[Row] = []

        def keep(more: list[Row]) -> None:
            rows.extend(more)
            if args.json:
                write_atomic(args.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")

        keep(run(router, {"none"}, out, end))
        if not args.no_peer:
            keep([torchtitan(Row("torchtitan", "none", "not run"), ["moe_3b", "2048", "8", "none", "1"], end)])
        keep(run(forced, {"none"}, out, end))
        if any(out.glob("moe*/*/traces/*")):
            print(kernels.render(sorted(out.glob("moe*")), 0, "markdown"))
    for row in rows:
        speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f} tokens/s, {row.peak_gib:.1f} GiB"
        print(f"{row.part:20} {row.status:10} {speed}")
    if not args.no_peer and rows[0].tokens_per_s and rows[1].tokens_per_s:
        print(f"router / torchtitan: {rows[0].tokens_per_s / rows[1].tokens_per_s:.2f}")
    return 0 if all(row.status == "ok" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
