"""How long it takes to load and summarise many runs, beside DuckDB's read_json on the same files.

    python benchmarks/analysis_load.py                  # 1,000 runs of 500 steps, two cores
    python benchmarks/analysis_load.py --runs 10000 --steps 100

Prints one line a measurement and ends with 0 if the load is within --limit seconds, within --ratio times DuckDB's time
and below --memory-gib of resident memory; 1 otherwise. Every measurement runs in a fresh process, best of five.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORES = 2


def make(folder: Path, runs: int, steps: int) -> None:
    """A synthetic sweep: the same writer as the tests', with every key that a GPU run has."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "analysis")]
    from synth import Point, write_sweep

    gpu = {"gpu/power_w": 612.5, "gpu/sm_clock_mhz": 1755.0, "gpu/temperature_c": 61.0}
    points = [
        Point(micro_batch=1 + i % 32, reduction=("zero2", "zero2o")[i // 32 % 2], steps=steps, seed=i, phi=0.3)
        for i in range(runs)
    ]
    for i, point in enumerate(points):
        point.config = {"seed": i}
        point.extra_metrics = gpu
    write_sweep(folder, points)


def report(total: float, loaded: float, cpu: float) -> None:
    """For the parent: seconds, GiB, seconds of loading alone, CPU seconds since `cpu`."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{total:.3f} {memory:.3f} {loaded:.3f} {time.process_time() - cpu:.3f}")


def ours(folder: Path) -> None:
    """Load, summarise and rank."""
    sys.path.insert(0, str(ROOT))
    from analysis.load import load
    from analysis.rank import rank

    start, cpu = time.perf_counter(), time.process_time()
    data = load(folder)
    loaded = time.perf_counter() - start
    ranked = rank(data)
    total = time.perf_counter() - start
    assert ranked.rows["rank"].notna().all(), "every synthetic run has a result"
    report(total, loaded, cpu)


def duckdb_reads(folder: Path) -> None:
    """DuckDB reads the same metrics files into a table and takes the median of every metric of every run."""
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET threads = {CORES}")
    start, cpu = time.perf_counter(), time.process_time()
    connection.execute(
        "CREATE TABLE steps AS SELECT * FROM read_json(?, format = 'newline_delimited', filename = true)",
        [f"{folder}/*/metrics.jsonl"],
    )
    loaded = time.perf_counter() - start
    names = [row[0] for row in connection.execute("DESCRIBE steps").fetchall() if row[0] not in ("filename", "step")]
    medians = ", ".join(f'median("{name}")' for name in names)
    rows = connection.execute(f"SELECT filename, {medians} FROM steps GROUP BY filename").fetchall()
    total = time.perf_counter() - start
    assert rows
    report(total, loaded, cpu)


def measure(folder: Path, repeats: int) -> dict[str, tuple[float, ...]]:
    """Best (seconds, GiB, seconds of loading alone, CPU seconds) of fresh processes on CORES cores, the two taking turns."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    found: dict[str, list[tuple[float, ...]]] = {"ours": [], "duckdb": []}
    for _ in range(repeats):
        for what, results in found.items():
            command = [sys.executable, __file__, "--child", what, "--folder", str(folder)]
            out = subprocess.run(
                command, check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
            )
            results.append(tuple(map(float, out.stdout.split())))
    return {what: min(results) for what, results in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--limit", type=float, default=4.0, help="seconds")
    parser.add_argument("--ratio", type=float, default=2.0, help="times DuckDB's time")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--folder", type=Path, help="an existing sweep instead of a new one")
    parser.add_argument("--child", choices=("ours", "duckdb"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (ours if args.child == "ours" else duckdb_reads)(args.folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "sweep"
        if not args.folder:
            make(folder, args.runs, args.steps)
        size = sum(path.stat().st_size for path in folder.glob("*/metrics.jsonl")) / 2**20
        print(
            f"{args.runs} runs x {args.steps} steps, {size:.0f} MiB of metrics, {CORES} cores, best of {args.repeats}"
        )
        best = measure(folder, args.repeats)
        total, memory, loaded, cpu = best["ours"]
        reference, _, read, duckdb_cpu = best["duckdb"]
        parts = f"load and summarise {loaded:.2f} s, rank {total - loaded:.2f} s; CPU {cpu:.2f} s"
        print(f"analysis: {total:.2f} s ({parts}), peak {memory:.2f} GiB")
        parts = f"read_json {read:.2f} s, medians {reference - read:.2f} s; CPU {duckdb_cpu:.2f} s"
        print(f"duckdb: {reference:.2f} s ({parts})")
        print(f"ratio {total / reference:.2f} by the clock, {cpu / duckdb_cpu:.2f} in CPU time")
    good = total <= args.limit and total <= args.ratio * reference and memory < args.memory_gib
    print("within the limits" if good else "OUTSIDE the limits")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
