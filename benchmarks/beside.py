"""Other systems on the same work: benchmarks/peers' scripts, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_peer(arguments: list[str], seconds: float, packages: str = "") -> tuple[dict[str, Any], str]:
    """`python ARGUMENTS` in benchmarks/peers, within `seconds`: (the last JSON line that it printed, "") or ({}, why none).

    `packages`: a folder that goes in front of PYTHONPATH. What a failed script printed is shown.
    """
    env = (
        os.environ | {"PYTHONPATH": os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])} if packages else None
    )
    print("$", " ".join(["python", *arguments]), flush=True)
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT / "benchmarks" / "peers", env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {}, "cut off"
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if found:
        result: dict[str, Any] = json.loads(found[-1])
        return result, ""
    print(done.stdout[-1500:], done.stderr[-3000:], flush=True)
    return {}, (done.stderr.strip().splitlines() or ["nothing printed"])[-1][:120]
