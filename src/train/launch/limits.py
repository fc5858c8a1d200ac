"""What the system allows this process: limits to name after a failure, and the kernel's count of kills for memory."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

CGROUP = Path("/sys/fs/cgroup")


def cgroup_files(controller: str, v2: str, v1: str) -> Iterator[Path]:
    """This process's file of a controller and those of the groups above it, innermost first; v2 or v1 names."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = CGROUP, v2
        elif controller in controllers.split(","):
            root, name = CGROUP / controllers, v1
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if (place / name).is_file():
                yield place / name
            if place == root:
                break


def oom_kills() -> int:
    """Processes that the kernel has killed for memory in this process's cgroup and those above; 0 without a count."""
    total = 0
    for file in cgroup_files("memory", "memory.events", "memory.oom_control"):
        try:
            for entry in file.read_text().splitlines():
                name, _, count = entry.partition(" ")
                if name == "oom_kill":
                    total += int(count)
        except (OSError, ValueError):
            continue
    return total


def _pids_max() -> Optional[int]:
    found = []
    for file in cgroup_files("pids", "pids.max", "pids.max"):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return min(found, default=None)


def named() -> str:
    """`(limits: processes 64, open files 1024)`: what a failed start or thread may have hit."""
    processes = [resource.getrlimit(resource.RLIMIT_NPROC)[0], _pids_max()]
    allowed = [n for n in processes if n not in (None, resource.RLIM_INFINITY)]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shown = [
        str(min(allowed)) if allowed else "unlimited",
        "unlimited" if files == resource.RLIM_INFINITY else str(files),
    ]
    return f" (limits: processes {shown[0]}, open files {shown[1]})"
