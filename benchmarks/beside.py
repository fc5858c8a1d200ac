"""Other systems on the same work: benchmarks/peers' scripts, each in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


def words(parser: argparse.ArgumentParser, option: str, text: str, valid: Iterable[str]) -> list[str]:
    """The words of an option, joined by commas; exit code 2 for one that isn't valid."""
    known, found = list(dict.fromkeys(valid)), text.split(",")
    if unknown := [word for word in found if word not in known]:
        parser.error(f"{option} {unknown[0]}: valid are {', '.join(known)}")
    return found


def earlier(
    parser: argparse.ArgumentParser, option: str, file: Path | None, keys: Iterable[str]
) -> list[dict[str, Any]]:
    """What an earlier call wrote to `file`, [] for none: a JSON list of objects that have `keys`. Exit code 2 for a folder that
    isn't there and for a file that isn't this command's."""
    if file is None:
        return []
    if not file.absolute().parent.is_dir():
        parser.error(f"{option} {file}: no such folder")
    if not file.exists():
        return []
    wanted = set(keys)
    try:
        found: list[dict[str, Any]] = json.loads(file.read_text())
        mine = isinstance(found, list) and all(wanted <= set(row) for row in found)
    except (OSError, ValueError, TypeError):
        mine = False
    if not mine:
        parser.error(f"{option} {file}: is there already, and not by this command")
    return found


def peers(parser: argparse.ArgumentParser, folder: str) -> None:
    """Exit code 2 unless --peers is a folder, or empty."""
    if folder and not Path(folder).is_dir():
        parser.error(f"--peers {folder}: no such folder")


def begin(parser: argparse.ArgumentParser, gpu: bool = True) -> int:
    """At the start of a benchmark, before it writes anything: how many CUDA GPUs there are; exit code 2 for none, if `gpu`.
    From then on SIGTERM ends what this process has started, and then it."""
    count = (
        int(subprocess.check_output([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]))
        if gpu
        else 0
    )
    if gpu and not count:
        parser.error("needs a CUDA GPU")

    def end(signum: int, _: object) -> None:
        children = psutil.Process().children()
        for child in children:
            child.terminate()  # a sweep ends its ranks itself
        psutil.wait_procs(children, 30)
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    return count


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
        print(found[-1], flush=True)  # a command that is cut off has shown it
        result: dict[str, Any] = json.loads(found[-1])
        return result, ""
    print(done.stdout[-1500:], done.stderr[-3000:], flush=True)
    return {}, (done.stderr.strip().splitlines() or ["nothing printed"])[-1][:120]
