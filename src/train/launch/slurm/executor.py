"""The executor of a cluster: finds what is queued already, submits the rest, waits with progress or leaves.

Everything that it knows is in the sweep's folder and in SLURM's queue, so it may be killed at any moment: the next command
finds the arrays again by their comment (mfu-sweep:<token>; a point is task <token>_<index>).
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from train.config import ConfigError, Train
from train.launch.classify import same_cause
from train.launch.prune import KEPT
from train.launch.slurm import files, queue, submit
from train.launch.slurm.claims import AGAIN, COMMENT, Claim, Claims, claims
from train.launch.slurm.view import View
from train.launch.supervisor import Stop
from train.sweep import folder as folders
from train.sweep.points import Frozen

if TYPE_CHECKING:
    from train.sweep.folder import Sweep

#: seconds between two looks at the queue; files are looked at every second
QUEUE_SECONDS = 4.0
#: a job must be gone for so long before its points are settled without it: its last file may be on its way (NFS)
SETTLE_SECONDS = 5.0
#: KillWait is 30 s by default, then the epilog
CANCEL_SECONDS = 90.0


class Slurm:
    """Runs a sweep's points on the cluster."""

    def __init__(self, sweep: "Sweep", cfg: Train, stop: Stop, say: Callable[[str], None]) -> None:
        self.sweep, self.cfg, self.stop, self.say = sweep, cfg, stop, say
        self.submitter = submit.Submitter(sweep, cfg)
        self.claims = Claims(sweep.path, say)
        self.waiting: dict[str, Claim] = {}  # queued or running points, by folder

    def status(self, point: Frozen) -> dict[str, Any]:
        """The point's status.json."""
        return folders.status_of(self.sweep.folder(point), point.identity)

    def statuses(self) -> list[str]:
        """Of this command's points."""
        return [self.status(p)["status"] for p in self.sweep.points]

    def left(self) -> list[Frozen]:
        """Points to submit: cheapest first along the knobs that memory grows with, so that an oom spares larger ones."""
        out = []
        for point in sorted(self.sweep.points, key=lambda p: p.cfg.micro_batch * p.cfg.seq_len):
            status = self.status(point)
            implied = status["status"] == "infeasible" and not self.cfg.prune  # now it is asked for
            if point.folder in self.waiting or (status["status"] in KEPT and not implied):
                continue
            if folders.failed_attempts(self.sweep.folder(point), status) > self.cfg.retries:
                self.say(f"{point.folder}: {status['status']} too often; retries={self.cfg.retries} is used up")
                continue
            out.append(point)
        return out

    def run(self) -> Optional[int]:
        """All points that are left. An exit code when it leaves before they have ended, None when they have."""
        launch = self.cfg.launch
        if not launch.dry_run:
            entries = self._look()
            if entries is None:
                return 1
            mine = {p.folder for p in self.sweep.points}
            self.waiting = {n: c for n, c in self.claims.find(entries).items() if n in mine}
        todo = self.left()
        kept = len(self.sweep.points) - len(todo) - len(self.waiting)
        found = f", {len(self.waiting)} found in the queue" if self.waiting else ""
        self.say(
            f"{self.sweep.path.name}: {len(self.sweep.points)} points" + (f", {kept} kept" if kept else "") + found
        )
        plans = submit.plan(todo, self.cfg, queue.max_array_size())
        for line in submit.describe(plans, self.cfg):
            self.say(line)
        if launch.dry_run:
            for path in self.submitter.dry_run(plans):
                self.say(f"written: {submit.shell(path)}")
            self.say("nothing was submitted (launch.dry_run=true)")
            return 0
        for point in todo:
            folders.refresh_config(self.sweep.folder(point), point.cfg)
        failed = self._submit(plans)
        if not launch.wait:
            self.say(
                f"not waiting (launch.wait=false): the same command goes on, name={self.sweep.path.name} cancel=true"
                f" cancels, and python -m analysis report {submit.shell(self.sweep.path)} shows how far it is"
            )
            return 1 if failed else 0
        self.wait()
        return 1 if failed and self.stop.signum is None else None

    def _submit(self, plans: list[submit.Plan]) -> bool:
        """Submit; whether something could not be."""
        try:
            for array, told, folder in self.submitter.submit(plans):
                self.claims.record(array, told)
                self.say(f"submitted: array {array}, {len(told.tasks)} tasks")
                self.waiting |= {c.folder: c for c in claims(folder, told, array)}
                if self.stop.signum is not None:
                    return True
        except submit.SubmissionFailed as e:
            self.say(f"not submitted: {e}; the same command submits what is left")
            return True
        return False

    def _look(self) -> Optional[dict[str, queue.Entry]]:
        """The queue; None when it can't be asked for a minute: submitting twice would be worse than not at all."""
        end = time.monotonic() + 60
        while True:
            try:
                return queue.look()
            except queue.QueueError as e:
                if time.monotonic() > end or self.stop.signum is not None:
                    self.say(f"the queue can't be asked: {e}")
                    return None
                time.sleep(2)

    def wait(self) -> None:
        """Until every waiting point has ended, a signal comes, or max_failures identical crashes came in a row."""
        with View(self.sweep.path, {p.folder: p.cfg.steps for p in self.sweep.points}) as view:
            before, self.say = self.say, view.say
            try:
                self._wait(view)
            finally:
                self.say = before
        if self.stop.signum is not None:
            self.say(
                f"{len(self.waiting)} points stay in the queue; the same command finds them,"
                f" name={self.sweep.path.name} cancel=true cancels them"
            )

    def _wait(self, view: View) -> None:
        shown: dict[str, str] = {}
        crashes: list[str] = []
        total, looked = len(self.waiting), float("-inf")
        entries: dict[str, queue.Entry] = {}
        while self.waiting and self.stop.signum is None:
            if time.monotonic() - looked > QUEUE_SECONDS:
                looked = time.monotonic()
                entries = self._see(entries)
            self._settle(entries)
            for claim in list(self.waiting.values()):
                if _waits(claim, entries) and shown.get(claim.folder) != "running":
                    continue  # its files don't change: they are not read every second, there may be a thousand
                kind = self.claims.kind(claim)
                if kind in AGAIN and not claim.settled:
                    self._show(claim, kind, shown)
                    continue
                del self.waiting[claim.folder]
                status = self.claims.status(claim)
                why = f": {status['reason']}" if status.get("reason") else ""
                self.say(f"[{total - len(self.waiting)}/{total}] {claim.folder}  {status['status']}{why}")
                crashes = [*crashes, str(status["reason"])] if status["status"] == "crashed" else []
                last = crashes[-self.cfg.max_failures :]
                if len(last) == self.cfg.max_failures and len({same_cause(c) for c in last}) == 1 and self.waiting:
                    self._give_up(last[0])
            running = [n for n in self.waiting if shown.get(n) == "running"]
            view.update(running, len(self.waiting) - len(running), total - len(self.waiting))
            time.sleep(1 if self.waiting else 0)

    def _show(self, claim: Claim, kind: str, shown: dict[str, str]) -> None:
        """A line when a point starts or waits again."""
        if shown.get(claim.folder, "pending") != kind:
            nodes = ", ".join((self.claims.status(claim).get("job") or {}).get("nodes", []))
            self.say(f"{claim.folder}  {kind}" + (f" on {nodes}" if nodes else "") + f", job {claim.job}")
        shown[claim.folder] = kind

    def _see(self, before: dict[str, queue.Entry]) -> dict[str, queue.Entry]:
        """Look at the queue and note which claims it no longer has."""
        try:
            entries = queue.look()
        except queue.QueueError:
            return before  # asked again next time
        for claim in self.waiting.values():
            if claim.active(entries):
                claim.gone = None
            elif claim.gone is None:
                claim.gone = time.monotonic()
        return entries

    def _settle(self, entries: dict[str, queue.Entry]) -> None:
        """A final status for points whose job is gone for long enough."""
        over = [c for c in self.waiting.values() if c.gone is not None and time.monotonic() - c.gone > SETTLE_SECONDS]
        self.claims.settle(over, entries)

    def _give_up(self, crash: str) -> None:
        """Cancel what has not started; those points stay pending and say why."""
        reason = f"{self.cfg.max_failures} identical crashes in a row (max_failures): {crash}"
        self.say(f"stopped: {reason}")
        for claim in [c for c in self.waiting.values() if self.claims.kind(c) == "pending"]:
            subprocess.run(["scancel", "--state=PENDING", claim.job], capture_output=True)
            why = f"not started: {reason}"
            files.write_status(self.sweep.path / claim.folder, claim.identity, "pending", why, {"id": claim.job})
            del self.waiting[claim.folder]


def _waits(claim: Claim, entries: dict[str, queue.Entry]) -> bool:
    entry = entries.get(claim.job)
    return entry is not None and entry.name == claim.name and entry.state == "PENDING"


def cancel(path: Path, say: Callable[[str], None]) -> int:
    """Cancel every job of the sweep folder `path` and settle its points; the exit code. Needs no grid and no lock."""
    sweep = Claims(path, say)
    tokens = {COMMENT + files.Submission.load(p.parent).token for p in sweep.root.glob("*/tasks.json")}
    try:
        jobs = [e.job for e in queue.look().values() if e.active and e.comment in tokens]
        if jobs:
            queue.ask("scancel", *sorted({j.split("_")[0] for j in jobs}))
        say(f"{path.name}: {len(jobs)} queued or running tasks cancelled")
        deadline = time.monotonic() + CANCEL_SECONDS
        entries = queue.look()
        while any(e.active and e.comment in tokens for e in entries.values()):
            if time.monotonic() > deadline:
                say(f"some still run after {CANCEL_SECONDS:.0f} s")
                return 1
            time.sleep(1)
            entries = queue.look()
        sweep.find(entries)
    except queue.QueueError as e:
        raise ConfigError("cancel", True, f"SLURM can't be asked: {e}") from None
    return 0
