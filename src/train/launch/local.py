"""The executor of this machine: points one at a time, under a lock on its devices, in an order that lets memory prune."""

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from filelock import FileLock, Timeout

from train.config import Train
from train.launch import environment, prune, scratch, starters
from train.launch.classify import Verdict, same_cause
from train.launch.prune import KEPT
from train.launch.supervisor import Progress, Stop, Supervisor
from train.launch.tell import say as tell
from train.measure.telemetry import Telemetry
from train.sweep import folder as folders
from train.sweep import freeze
from train.sweep.estimate import Estimate, readable
from train.sweep.points import Frozen

if TYPE_CHECKING:
    from train.sweep.folder import Sweep


@contextmanager
def locked(path: Path, what: str, stop: Stop) -> Iterator[bool]:
    """Hold a lock file; says so when it must wait. Yields False when a signal came first. Raises OSError."""
    lock = FileLock(str(path), mode=0o666)
    said = False
    while True:
        try:
            lock.acquire(timeout=0 if not said else 0.2)
            break
        except Timeout:
            if not said:
                tell(f"waiting: {what} is in use by another command")
                said = True
        if stop.signum:
            yield False
            return
    try:
        yield True
    finally:
        lock.release()


def device_lock(cfg: Train) -> Path:
    """The lock of this host's devices of that kind; a folder that all users share."""
    visible = environment.USER.get("CUDA_VISIBLE_DEVICES", "all") if cfg.device == "cuda" else ""
    name = f"mfu-sweep-{cfg.device}-{visible.replace('/', '_')}.lock"
    return Path(tempfile.gettempdir()) / name[:200]


class Local:
    """Runs a sweep's points here."""

    def __init__(
        self,
        sweep: "Sweep",
        cfg: Train,
        warm: Optional[starters.Warm],
        stop: Stop,
        say: Callable[[str], None],
        uuids: Optional[list[str]] = None,
    ) -> None:
        self.sweep, self.cfg, self.warm, self.stop, self.say = sweep, cfg, warm, stop, say
        self.began = time.monotonic()
        self.telemetry = Telemetry((uuids or []) if cfg.device != "cpu" else [])
        self.estimate = Estimate()
        self.on_progress: Callable[[Progress], None] = lambda _: None
        self.known: dict[str, dict[str, Any]] = {}  # identity → status

    def order(self) -> list[Frozen]:
        """Cheapest first along the knobs that memory grows with; with repeats, shuffled so that drift can't align with one."""
        if self.cfg.repeats > 1:
            out = list(self.sweep.points)
            random.Random(self.cfg.seed).shuffle(out)
            return out
        return sorted(self.sweep.points, key=lambda p: p.cfg.micro_batch * p.cfg.seq_len)

    def status(self, point: Frozen) -> dict[str, Any]:
        """The point's status.json, read once: under the sweep's lock nobody else writes it."""
        known = self.known.get(point.identity)
        if known is None:
            known = self.known[point.identity] = folders.status_of(self.sweep.folder(point), point.identity)
        return known

    def _forget(self, point: Frozen) -> None:
        """Its status.json has been written."""
        self.known.pop(point.identity, None)

    def statuses(self) -> list[str]:
        """Of this command's points."""
        return [self.status(p)["status"] for p in self.sweep.points]

    def left(self) -> list[Frozen]:
        """Points to run, in order; `running` ones whose supervisor is gone are `lost` first."""
        out = []
        for point in self.order():
            status = self.status(point)
            self.estimate.add(point.cfg, status)
            if status["status"] == "running":
                self._lose(self.sweep.folder(point), status)
                self._forget(point)
            if status["status"] == "infeasible" and not self.cfg.prune:
                self.known[point.identity] = status | {"status": "pending"}  # it was only implied; now it is asked for
            elif status["status"] in KEPT:
                continue
            if folders.failed_attempts(self.sweep.folder(point), status) > self.cfg.retries:
                self.say(
                    f"{point.folder}: {status['status']} {self.cfg.retries + 1} times; retries={self.cfg.retries} is used up"
                )
                continue
            out.append(point)
        return out

    def _lose(self, folder: Path, status: dict[str, Any], then: str = "; it runs again") -> None:
        """We hold the sweep's lock, so whoever wrote `running` is gone, whatever the clock says."""
        owner = status.get("supervisor") or {}
        self.say(f"{folder.name}: lost, its supervisor (pid {owner.get('pid')}) is gone{then}")
        lost = status | {"status": "lost", "reason": "the supervisor ended without a word", "ended": last_sign(folder)}
        freeze.write_json(folder / "status.json", lost)

    def _lose_others(self) -> None:
        """The same for points that earlier commands put into this folder and that are not in this one's grid."""
        own = {p.folder for p in self.sweep.points}
        for entry in (freeze.read_json(self.sweep.path / "sweep.json") or {}).get("grid", []):
            if entry["folder"] in own:
                continue
            status = freeze.read_json(self.sweep.path / entry["folder"] / "status.json") or {}
            if status.get("status") == "running" and not status.get("job"):  # a scheduler's jobs need no lock
                self._lose(self.sweep.path / entry["folder"], status, then="")

    def run(self) -> None:
        """All points that are left, until done, stopped, over budget, or `max_failures` identical crashes in a row."""
        scratch.remove_stale()
        self._lose_others()
        todo = self.left()
        if self.cfg.prune:
            todo = self._prune_known(todo)
        total = len(self.sweep.points)
        invalid = sum(p.invalid is not None for p in self.sweep.points)
        counts = {"kept": total - len(todo) - invalid, "invalid": invalid}
        kept = "".join(f", {count} {what}" for what, count in counts.items() if count)
        expected = self.estimate.total([p.cfg for p in todo]) if todo else None
        about = f", about {readable(expected)} to go" if expected is not None else ""
        self.say(f"{self.sweep.path.name}: {total} point{'s' * (total != 1)}{kept}{about}")
        if not todo:
            return
        with locked(device_lock(todo[0].cfg), f"the {todo[0].cfg.device} of this host", self.stop) as owned:
            left = self._run(todo) if owned else (todo, f"interrupted by signal {self.stop.signum}")
        if left is not None:
            self._leave(*left)

    def _run(self, todo: list[Frozen]) -> Optional[tuple[list[Frozen], str]]:
        """None when every point was met, else those that were not started and why."""
        crashes: list[str] = []
        n = self.cfg.max_failures
        for number, point in enumerate(todo, 1):
            rest = todo[number - 1 :]
            if self.stop.signum:
                return rest, f"interrupted by signal {self.stop.signum}"
            if self.status(point)["status"] in KEPT:  # became infeasible meanwhile
                continue
            if len(crashes) >= n and len({same_cause(c) for c in crashes[-n:]}) == 1:
                return rest, f"{n} identical crashes in a row (max_failures={n}): {crashes[-1]}"
            if self._over_budget(point):
                return rest, f"budget.hours={self.cfg.budget.hours:g} is used up"
            began = time.monotonic()
            verdict = self._one(point)
            self._forget(point)
            crashes = [*crashes, verdict.reason] if verdict.status == "crashed" else []
            status = self.status(point)
            self.estimate.add(point.cfg, status)
            self._tell(number, todo, point, verdict, time.monotonic() - began, status)
            if verdict.status == "oom" and self.cfg.prune:
                self._prune(point, todo[number:])
        return None

    def _tell(
        self, number: int, todo: list[Frozen], point: Frozen, verdict: Verdict, seconds: float, status: dict[str, Any]
    ) -> None:
        why = f": {verdict.reason}" if verdict.reason else ""
        parts = (status.get("summary") or {}).get("seconds") or {}
        spent = f" ({', '.join(f'{k} {v:.1f}' for k, v in parts.items())})" if verdict.status == "ok" and parts else ""
        left = self.estimate.total([p.cfg for p in todo[number:]]) if number < len(todo) else None
        about = f"; about {readable(left)} to go" if left is not None else ""
        self.say(f"[{number}/{len(todo)}] {point.folder}  {verdict.status}  {seconds:.1f} s{spent}{why}{about}")

    def _deadline(self) -> float:
        hours = self.cfg.budget.hours
        return float("inf") if hours is None else self.began + 3600 * hours

    def _over_budget(self, point: Frozen) -> bool:
        """Would the point, as far as anybody can tell, end after the budget? Then it is not started."""
        return time.monotonic() + (self.estimate.seconds(point.cfg) or 0.0) > self._deadline()

    def _leave(self, points: list[Frozen], reason: str) -> None:
        """Points that are not started stay `pending` with the reason."""
        self.say(f"stopped: {reason}")
        for p in points:
            if self.status(p)["status"] != "pending":
                continue
            try:
                folders.write_status(self.sweep.folder(p), p.identity, "pending", f"not started: {reason}", sync=False)
                self._forget(p)
            except (
                OSError
            ):  # a full or read-only disk may be the very reason; a point without status.json is pending too
                return

    def _one(self, point: Frozen) -> Verdict:
        try:
            folders.refresh_config(self.sweep.folder(point), point.cfg)
        except OSError as e:
            return Verdict("crashed", f"{type(e).__name__}: {e}")
        return Supervisor(
            self.sweep.folder(point), point.identity, self._starter(point), self.stop, self.sweep.code_hash,
            self.on_progress, self.telemetry, self._deadline(),
        ).run()  # fmt: skip

    def _starter(self, point: Frozen) -> starters.Starter:
        """A fork of the warm server, unless the point sets what Python, torch or OpenMP read at import."""
        if self.warm is None or environment.needs_cold_start(point.cfg):
            return starters.Cold(self.sweep.code, frozenset({self.warm.process.pid}) if self.warm else frozenset())
        if not self.warm.alive():
            self.warm.code = self.sweep.code  # the checkout may have changed since
            self.warm.restart()
        return self.warm

    # ---- pruning -----------------------------------------------------------------------------------------------------

    def _prune_known(self, todo: list[Frozen]) -> list[Frozen]:
        """What earlier commands found out of memory implies larger points of this one as well."""
        by_key: dict[str, list[Frozen]] = defaultdict(list)
        for p in todo:
            by_key[prune.all_else(p.cfg)].append(p)
        for p in self.sweep.points:
            if self.status(p)["status"] == "oom":
                self._prune(p, by_key.get(prune.all_else(p.cfg), []))
        return [p for p in todo if self.status(p)["status"] not in KEPT]

    def _prune(self, point: Frozen, rest: list[Frozen]) -> None:
        """What is larger along micro_batch or seq_len, all else equal, would not fit either."""
        for p in rest:
            if prune.implies(point.cfg, p.cfg) and self.status(p)["status"] not in KEPT:
                folders.write_status(self.sweep.folder(p), p.identity, "infeasible", f"implied by {point.folder}")
                self._forget(p)
                self.say(f"{p.folder}  infeasible: implied by {point.folder}")


def last_sign(folder: Path) -> str:
    """When a run that can't say so itself was last seen to write, UTC, ISO 8601: what it used counts as wasted."""
    files = [folder / "status.json", folder / "metrics.jsonl", *folder.glob("logs/*")]
    newest = max(f.stat().st_mtime for f in files if f.exists())
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="milliseconds")
