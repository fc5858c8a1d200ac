"""Which folders are sweeps, and which points a sweep has: those of its grid, and those found on disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.errors import BadInput
from analysis.files import read_json

POINT_FILES = ("status.json", "config.yaml", "metrics.jsonl", "manifest.json")


@dataclass(frozen=True)
class PointFolder:
    """One point: where it is (or would be) and what the grid says about it."""

    path: Path
    identity: str = ""
    overrides: tuple[str, ...] = ()
    in_grid: bool = True


@dataclass(frozen=True)
class SweepFolder:
    """One sweep: its folder, the command that made it, and its points in the order of the grid."""

    path: Path
    name: str
    meta: dict[str, Any] = field(default_factory=dict)
    points: tuple[PointFolder, ...] = ()


def find_sweeps(path: Path) -> list[SweepFolder]:
    """The sweep at `path`, or the sweeps one level below it, by name.

    Raises BadInput where `path` does not exist or holds neither a sweep nor a point.
    """
    if not path.exists():
        raise BadInput(f"no such folder: {path}")
    if not path.is_dir():
        raise BadInput(f"not a folder: {path} (a sweep, a point or a folder of sweeps is expected)")
    if is_point(path) and not (path / "sweep.json").exists():
        return [SweepFolder(path, path.resolve().name, points=(PointFolder(path),))]
    if _is_sweep(path):
        return [read_sweep(path)]
    found = [read_sweep(child) for child in children(path) if _is_sweep(child)]
    if not found:
        raise BadInput(f"not a sweep: {path} has no sweep.json and no folder with a status.json or metrics.jsonl")
    return found


def read_sweep(path: Path) -> SweepFolder:
    """The points of sweep.json's grid, then the point folders that it does not name."""
    meta = read_json(path / "sweep.json")
    folders = children(path)
    by_hash = {child.name.rpartition("-")[2]: child for child in folders}
    points = []
    for entry in meta.get("grid") or []:
        if isinstance(entry, dict) and isinstance(entry.get("folder"), str):
            overrides = tuple(str(item) for item in entry.get("overrides") or ())
            # Only the last part of the name counts: a folder in the grid never leads out of its sweep.
            folder, identity = path / Path(entry["folder"]).name, str(entry.get("identity", ""))
            if not folder.is_dir():  # the slug may have been renamed; the hash is what identifies it
                folder = by_hash.get(identity[:8], folder) if identity else folder
            points.append(PointFolder(folder, identity, overrides))
    known = {point.path.name for point in points}
    on_disk = (child for child in folders if child.name not in known and is_point(child))
    points += [PointFolder(child, in_grid=not meta) for child in on_disk]
    return SweepFolder(path, path.resolve().name, meta, tuple(points))


def is_point(path: Path) -> bool:
    """Whether a folder has any of the files of a point."""
    return any((path / name).is_file() for name in POINT_FILES)


def children(path: Path) -> list[Path]:
    """Folders below, hidden ones left out, by name."""
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _is_sweep(path: Path) -> bool:
    return (path / "sweep.json").is_file() or any(is_point(child) for child in children(path))
