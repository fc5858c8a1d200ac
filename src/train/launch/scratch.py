"""A point's scratch folder on this node: heartbeats, errors, stacks. Gone afterwards, also when the supervisor was killed."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Optional

_NAME = re.compile(r"mfu-sweep-(\d+)-(\d+)-(\d+)-.*")


def process_start(pid: int) -> Optional[int]:
    """The kernel's start time of a process in clock ticks since boot: with the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def make() -> Path:
    """A new folder in the temporary directory, named for this process."""
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"mfu-sweep-{os.getuid()}-{pid}-{process_start(pid)}-"))


def remove_stale() -> None:
    """Remove this user's scratch folders whose supervisor is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"mfu-sweep-{os.getuid()}-*"):
        match = _NAME.fullmatch(path.name)
        if match and process_start(int(match[2])) != int(match[3]):
            shutil.rmtree(path, ignore_errors=True)


def caches() -> dict[str, str]:
    """Environment that puts Inductor's and Triton's caches on this node, one place for all points and sweeps of a user.

    Without it Triton's lies in the home folder, which is often a network file system. Empty when the folder is not ours.
    """
    root = Path(tempfile.gettempdir()) / f"mfu-sweep-cache-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            return {}
    except OSError:
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"), "TRITON_CACHE_DIR": str(root / "triton")}
