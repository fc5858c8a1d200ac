"""Which checkpoints a point has. Without torch, for supervisors and jobs."""

import re
from pathlib import Path

NAME = re.compile(r"step-(\d{8})")


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(steps done, folder) of the complete checkpoints below a point's folder, oldest first."""
    found = [(int(m[1]), path) for path in (folder / "checkpoints").glob("step-*") if (m := NAME.fullmatch(path.name))]
    return sorted((steps, path) for steps, path in found if (path / ".metadata").is_file())


def steps_done(folder: Path) -> int:
    """Steps that the newest complete checkpoint holds; 0 without one."""
    return max((steps for steps, _ in complete(folder)), default=0)
