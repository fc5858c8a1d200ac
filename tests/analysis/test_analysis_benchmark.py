"""The benchmark command runs, measures both sides and keeps to its exit code; its limits are for quiet machines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "analysis_load.py"


def test_small_run():
    pytest.importorskip("duckdb", reason="the yardstick, duckdb, is not installed (extra `bench`)")
    command = [sys.executable, str(SCRIPT), "--runs", "40", "--steps", "50", "--repeats", "1", "--limit", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "OUTSIDE the limits" in done.stdout, done.stdout + done.stderr
    assert re.search(r"analysis: [\d.]+ s .* peak 0\.\d+ GiB", done.stdout) and "duckdb: " in done.stdout


@pytest.mark.slow
def test_a_thousand_runs():
    pytest.importorskip("duckdb", reason="the yardstick, duckdb, is not installed (extra `bench`)")
    command = [sys.executable, str(SCRIPT), "--limit", "8", "--ratio", "4"]  # room for a machine that others use as well
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
