"""The cp ranks that share a sequence, reachable by name: operators that torch knows (torch.library) take no objects."""

from dataclasses import dataclass
from typing import Any

from train.parallel.dims import Dims
from train.parallel.traffic import Meter


@dataclass(frozen=True)
class Line:
    """One rank's end of its cp group."""

    group: Any
    size: int
    rank: int
    meter: Meter


_lines: dict[str, Line] = {}


def join(dims: Dims) -> str:
    """The name of this rank's line."""
    group = dims.group("cp")
    _lines[group.group_name] = Line(group, dims.size("cp"), dims.index("cp"), dims.meter)
    return group.group_name


def get(name: str) -> Line:
    """What `join` named."""
    return _lines[name]
