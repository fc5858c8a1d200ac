"""What the launcher and the jobs tell each other through the sweep's folder. No Hydra and no torch: jobs read it too.

.sweep/slurm/<token>/    one array: tasks.json (written before sbatch), the script, job.json (after sbatch), logs
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from train import config
from train.config import Train
from train.launch import prune
from train.launch.record import now
from train.sweep.freeze import SCHEMA, read_json, write_json


@dataclass
class Task:
    """One point in a task of an array."""

    folder: str
    identity: str


@dataclass
class Submission:
    """tasks.json of one array."""

    token: str
    name: str  # of the job: no other job ever has it
    tasks: list[list[Task]]
    code: str  # hash of the snapshot
    torch: Optional[str]  # version at submission; null: not installed there
    warm: bool
    time: Optional[str]
    signal_seconds: int
    requeues: int
    provenance: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Into the submission's folder."""
        write_json(folder / "tasks.json", {"schema": SCHEMA} | asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Submission":
        """Raises OSError, ValueError or TypeError for a file that is none."""
        data = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        data.pop("schema")
        data["tasks"] = [[Task(**t) for t in task] for task in data["tasks"]]
        return cls(**data)


def status(folder: Path, identity: str) -> dict[str, Any]:
    """The point's status.json; one that is damaged or another point's counts as none (`pending`)."""
    data = read_json(folder / "status.json")
    if data is None or data.get("schema") != SCHEMA or data.get("identity") != identity or "status" not in data:
        return {"status": "pending", "reason": "", "attempt": 0, "schema": SCHEMA, "identity": identity}
    return data


def write_status(folder: Path, identity: str, name: str, reason: str, job: Optional[dict[str, Any]] = None) -> None:
    """status.json of a point that did not run."""
    content = {
        "schema": SCHEMA, "identity": identity, "status": name, "reason": reason, "attempt": 0,
        "started": None, "ended": now(), "ranks": [], "summary": {},
    }  # fmt: skip
    write_json(folder / "status.json", content | ({"job": job} if job else {}))


def end(folder: Path, current: dict[str, Any], name: str, reason: str) -> None:
    """The final status of an attempt whose supervisor can't write it any more."""
    write_json(folder / "status.json", current | {"status": name, "reason": reason, "ended": now()})


def implied_by(sweep: Path, folder: str, cfg: Train) -> Optional[str]:
    """A point of the sweep that ran out of memory though it is no larger than this one, all else equal."""
    for entry in (read_json(sweep / "sweep.json") or {}).get("grid", []):
        if entry["folder"] == folder:
            continue
        if (read_json(sweep / entry["folder"] / "status.json") or {}).get("status") != "oom":
            continue
        other = config.load(sweep / entry["folder"] / "config.yaml")
        if prune.implies(other, cfg):
            return str(entry["folder"])
    return None
