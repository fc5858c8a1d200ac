"""The benchmark command runs, measures both sides and keeps to its exit code; its limits are for quiet machines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "analysis_load.py"


def test_small_run():
    pytest.importorskip("duckdb", reason="the yardstick, duckdb, is not installed (extra `bench`)")
    command = [
        sys.executable,
        str(SCRIPT),
        "--runs",
        "40",
        "--steps",
        "50",
        "--repeats",
        "1",
        "--limit",
        "60",
        "--ratio",
        "1000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"analysis: [\d.]+ s .* peak 0\.\d+ GiB", done.stdout) and "duckdb: " in done.stdout
    assert subprocess.run([*command, "--limit", "0"], capture_output=True, timeout=120).returncode == 1


@pytest.mark.slow
def test_a_thousand_runs_are_within_the_limits():
    pytest.importorskip("duckdb", reason="the yardstick, duckdb, is not installed (extra `bench`)")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
