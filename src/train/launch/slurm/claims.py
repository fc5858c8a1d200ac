"""Which points of a sweep are queued or running, from its folder and SLURM's queue; and how those ended that no longer are."""

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from train.config import ConfigError
from train.launch.prune import KEPT
from train.launch.record import now
from train.launch.slurm import files, queue
from train.launch.tell import say
from train.sweep.freeze import read_json, write_json

COMMENT = "mfu-sweep:"
#: states after which a point may still start again in the same job
AGAIN = ("pending", "running", "interrupted", "lost")


@dataclass
class Claim:
    """A point's place in an array of ours; its token is <token>_<index>."""

    folder: str
    identity: str
    job: str  # 12_3
    name: str  # of the job: an id alone may be somebody else's by now
    log: Path
    alone: bool  # the only point of its job
    gone: Optional[float] = None  # monotonic time since when the queue no longer has it
    settled: bool = False  # whatever its status.json says now is final

    def active(self, entries: dict[str, queue.Entry]) -> bool:
        """Whether it waits or runs."""
        entry = entries.get(self.job)
        return entry is not None and entry.name == self.name and entry.active


class Claims:
    """Of one sweep folder."""

    def __init__(self, sweep: Path, say: Callable[[str], None]) -> None:
        self.sweep, self.say = sweep, say
        self.root = sweep / ".sweep" / "slurm"

    def find(self, entries: dict[str, queue.Entry]) -> dict[str, Claim]:
        """Points that are queued or running, by folder; those whose job has ended meanwhile are settled."""
        tokens = {e.comment: e.job.split("_")[0] for e in entries.values()}
        found: dict[str, Claim] = {}
        for path in sorted(self.root.glob("*/tasks.json"), key=lambda p: p.stat().st_mtime_ns):
            told = files.Submission.load(path.parent)
            known = read_json(path.parent / "job.json") or {}
            if "id" not in known:  # the launcher was killed before sbatch answered
                if COMMENT + told.token not in tokens:
                    write_json(path.parent / "job.json", {"ended": True})
                    continue  # it never reached the queue
                known = {"id": tokens[COMMENT + told.token], "name": told.name}
                write_json(path.parent / "job.json", known)
                self.record(known["id"], told)
            mine = claims(path.parent, told, known["id"])
            if "ended" not in known and not any(c.active(entries) for c in mine):
                write_json(path.parent / "job.json", known | {"ended": True})
            for claim in mine:
                old = found.get(claim.folder)
                if old is None or not old.active(entries):
                    found[claim.folder] = claim
                elif claim.active(entries):
                    found[claim.folder] = self._one_of(old, claim, entries)
        self.settle([c for c in found.values() if not c.active(entries)], entries)
        return {n: c for n, c in found.items() if c.active(entries) and self.kind(c) in AGAIN}

    def _one_of(self, old: Claim, new: Claim, entries: dict[str, queue.Entry]) -> Claim:
        """Of two jobs that have the point the one that counts; the other leaves the queue while it only waits."""
        running = entries[new.job].state == "RUNNING" and entries[old.job].state != "RUNNING"
        kept, other = (new, old) if running else (old, new)
        if other.alone:  # a job with more points is left: it passes over a point that another job has
            self.say(f"{other.folder}: queued twice; job {other.job} is cancelled")
            subprocess.run(["scancel", "--state=PENDING", other.job], capture_output=True)
        return kept

    def kind(self, claim: Claim) -> str:
        """The point's status as far as this job goes: what an earlier one left counts as pending."""
        status = self.status(claim)
        theirs = (status.get("job") or {}).get("id") == claim.job
        return str(status["status"]) if theirs or status["status"] in KEPT else "pending"

    def status(self, claim: Claim) -> dict[str, Any]:
        """The point's status.json."""
        return files.status(self.sweep / claim.folder, claim.identity)

    def settle(self, ended: Iterable[Claim], entries: dict[str, queue.Entry]) -> None:
        """A final status for points whose job has ended without one."""
        ended = list(ended)
        for c in ended:
            c.settled = True
        open_ = [c for c in ended if self.status(c)["status"] in ("running", "pending")]
        unknown = {}
        states: dict[str, str] = {}
        for c in open_:
            entry = entries.get(c.job)
            if entry is not None and entry.name == c.name and entry.state in queue.ENDED:
                states[c.job] = entry.state
            else:
                unknown[c.job] = c.name
        if unknown:
            try:
                states |= queue.ended(unknown)
            except queue.QueueError:
                pass  # no accounting here, or none now: the files decide
        for c in open_:
            folder, status = self.sweep / c.folder, self.status(c)
            started = status["status"] == "running"
            if started and (status.get("job") or {}).get("id") != c.job:
                continue  # runs elsewhere
            if not started and "job" in status:
                continue  # was settled before
            verdict = queue.verdict(states.get(c.job), started, _last_line(c.log))
            if started:
                files.end(folder, status, verdict.status, verdict.reason)
            else:
                files.write_status(folder, c.identity, verdict.status, verdict.reason, {"id": c.job})

    def unsettled(self, identities: set[str]) -> list[str]:
        """Folders of those points that may still be queued or running, as far as files tell: where squeue can't."""
        out = []
        for path in self.root.glob("*/tasks.json"):
            known = read_json(path.parent / "job.json") or {}
            if "ended" in known:
                continue
            for t in (t for task in files.Submission.load(path.parent).tasks for t in task):
                status = files.status(self.sweep / t.folder, t.identity)
                theirs = str((status.get("job") or {}).get("id")).split("_")[0] == known.get("id")
                final = status["status"] in KEPT or (theirs and status["status"] not in AGAIN)
                if t.identity in identities and not final:
                    out.append(t.folder)
        return out

    def record(self, array: str, told: files.Submission) -> None:
        """The array in sweep.json's `jobs`, once."""
        path = self.sweep / "sweep.json"
        content = read_json(path) or {}
        if any(j.get("token") == told.token for j in content.get("jobs", [])):
            return
        points = [t.folder for task in told.tasks for t in task]
        content.setdefault("jobs", []).append({"id": array, "token": told.token, "points": points, "submitted": now()})
        write_json(path, content)


def refuse_queued(sweep: Path, identities: set[str]) -> None:
    """Raises ConfigError when jobs of the sweep folder still have one of those points: it must not run here as well."""
    mine = Claims(sweep, say)
    if not any(mine.root.glob("*/tasks.json")):
        return
    again = f"wait for them with launch=slurm, or cancel them with launch=slurm name={sweep.name} cancel=true"
    try:
        found = [c for c in mine.find(queue.look()).values() if c.identity in identities]
    except queue.QueueError as e:
        if open_ := mine.unsettled(identities):
            some = f"{len(open_)} of its points were submitted to SLURM and may still be there"
            raise ConfigError("launch", "local", f"{some} ({e}): {again}") from None
        return
    if found:
        jobs = ", ".join(sorted({c.job.split("_")[0] for c in found}))
        some = f"{len(found)} of its points are queued or running as SLURM job {jobs}"
        raise ConfigError("launch", "local", f"{some}: {again}")


def claims(folder: Path, told: files.Submission, array: str) -> list[Claim]:
    """Every point of a submission as a claim."""
    return [
        Claim(t.folder, t.identity, f"{array}_{index}", told.name, folder / f"{array}_{index}-0.log", len(task) == 1)
        for index, task in enumerate(told.tasks)
        for t in task
    ]


def _last_line(log: Path) -> str:
    """What the job's log ends with: of node 0, else of the script (a srun that could not start anything)."""
    for path in (log, log.with_name(log.name.replace("-0.log", ".log"))):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if said := [line.strip() for line in lines if line.strip()]:
            return re.sub(r"^slurmstepd-\S+: error: ", "", said[-1])[:300]
    return ""
