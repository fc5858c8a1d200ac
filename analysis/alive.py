"""Whether the process that wrote `running` is still there, as far as this host can tell."""

import socket
from pathlib import Path
from typing import Any


def gone(status: dict[str, Any]) -> str:
    """Why a point that says `running` isn't, or "": its supervisor was on this host and is no more."""
    owner = status.get("supervisor")
    if status.get("status") != "running" or not isinstance(owner, dict) or owner.get("host") != socket.gethostname():
        return ""
    pid, started = owner.get("pid"), owner.get("started")
    if not isinstance(pid, int) or not Path("/proc/self/stat").exists():
        return ""
    living = _started(pid)
    return "" if living is not None and started in (None, living) else f"its supervisor (pid {pid}) is gone"


def _started(pid: int) -> int | None:
    """Clock ticks after boot at which a living process began (proc(5), field 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
