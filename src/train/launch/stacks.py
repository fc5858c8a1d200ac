"""What hanging ranks are doing: their stacks, kept in the point folder, and NCCL's flight recorder."""

import faulthandler
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from train.launch import process

#: a rank on a busy machine needs this long to be scheduled and write its stack
STACK_SECONDS = 2.0
#: NCCL's monitor looks at its pipe once a second
RECORDER_SECONDS = 3.0
_WAITING = re.compile(
    r"distributed_c10d|c10d_logger|_engine_run_backward|in synchronize|in wait\b|launch/rendezvous|parallel/lane"
    r"|all_reduce|all_gather"
)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


@dataclass
class Stack:
    """Where one rank is."""

    stopped: bool  # by SIGSTOP
    where: str  # innermost frame, "" when it gave none
    waiting: bool  # in a collective or for the device: perhaps only the victim


def file(scratch: Path, rank: int) -> Path:
    """The file into which a rank's faulthandler writes on SIGUSR1."""
    return scratch / f"stack-{rank}"


def answer(to: TextIO) -> None:
    """In a rank: SIGUSR1 writes the stacks of all threads into `to`, which stays open.

    To be said again from time to time: LLVM, which Triton compiles with, puts its own handlers on SIGUSR1 and a dozen others.
    """
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=to, all_threads=True, chain=False)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def read(text: str, stopped: bool = False) -> Stack:
    """Parse faulthandler's output: the thread that got the signal, which is the main thread."""
    section = text.rpartition("Current thread")[2] or text
    frames = [(Path(f).name, line, name, f) for f, line, name in _FRAME.findall(section)]
    where = f"in {frames[0][2]} ({frames[0][0]}:{frames[0][1]})" if frames else ""
    inner = " ".join(f"{path} in {name} " for _, _, name, path in frames[:6])
    return Stack(stopped, where, bool(_WAITING.search(inner)))


def collect(scratch: Path, logs: Path, ranks: dict[int, int]) -> dict[int, Stack]:
    """Ask the ranks (rank → pid) for their stacks, stopped ones too, and keep them as logs/rank<r>.stack."""
    stopped = {r for r, pid in ranks.items() if _state(pid) in ("T", "t")}
    for pid in ranks.values():
        process.kill(pid, signal.SIGUSR1)
        process.kill(pid, signal.SIGCONT)
    out: dict[int, Stack] = {}
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, sizes = sizes, {r: _size(file(scratch, r)) for r in ranks}
        if all(sizes.values()) and sizes == before:
            break
    for rank in ranks:
        try:
            text = file(scratch, rank).read_text(errors="replace")
            if text:
                shutil.copyfile(file(scratch, rank), logs / f"rank{rank}.stack")
        except OSError:  # the rank never came so far, or the disk is full: the verdict matters more
            text = ""
        out[rank] = read(text, rank in stopped)
    return out


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def recorder_env(scratch: Path) -> dict[str, str]:
    """Environment that makes NCCL's process groups record their last collectives and dump them when asked by a pipe."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the older name: without it torch 2.11 opens no pipe
        "TORCH_FR_DUMP_TEMP_FILE": str(scratch / "flight_"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(scratch / "flightpipe_"),
    }


def flight_recorder(scratch: Path, logs: Path, ranks: Iterable[int]) -> None:
    """Have NCCL's recorder dumped by every rank that has one, into logs/flight_<rank>; a no-op without NCCL."""
    asked = []
    for rank in ranks:
        try:
            fd = os.open(scratch / f"flightpipe_{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.write(fd, b"1")
            asked.append(scratch / f"flight_{rank}")
        except OSError:
            pass
        finally:
            os.close(fd)
    deadline, sizes = time.monotonic() + RECORDER_SECONDS, [0]
    while asked and time.monotonic() < deadline:
        time.sleep(0.1)
        before, sizes = sizes, [_size(p) for p in asked]
        if all(sizes) and sizes == before:  # all are there, and whole
            break
    for path in asked:
        try:
            if _size(path):
                shutil.copyfile(path, logs / path.name)
        except OSError:  # a full disk: the verdict matters more
            continue
