"""Small things about processes on Linux: die with the parent, find strays, kill for certain."""

import ctypes
import os
import signal
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: by these a scheduler asks a job to end
ENDING = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with(parent: int) -> None:
    """End this process by SIGKILL when its parent ends; at once if `parent` has ended already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def volunteer_for_oom() -> None:
    """When memory runs out, the kernel shall end this rank rather than the supervisor or somebody's shell."""
    try:
        Path("/proc/self/oom_score_adj").write_text("900")
    except OSError:
        pass


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `strays` finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def strays(keep: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """All descendants of this process but the children `keep` and what is below those."""
    out: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in keep:
            continue
        out.append(child)
        try:
            out += child.children(recursive=True)
        except psutil.NoSuchProcess:
            pass
    return out


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone is fine."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass
