"""The executor of this machine: points one at a time, under a lock on its devices, in an order that lets memory prune."""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from filelock import FileLock, Timeout

from train.config import Train
from train.launch import environment, starters
from train.launch.supervisor import Progress, Stop, Supervisor, process_start
from train.sweep import folder as folders
from train.sweep.freeze import training_config
from train.sweep.points import Frozen

if TYPE_CHECKING:
    from train.sweep.folder import Sweep

KEPT = ("ok", "oom", "infeasible", "invalid")


@contextmanager
def locked(path: Path, what: str, stop: Stop) -> Iterator[bool]:
    """Hold a lock file; says so when it must wait. Yields False when a signal came first."""
    lock = FileLock(str(path), mode=0o666)
    said = False
    while True:
        try:
            lock.acquire(timeout=0 if not said else 0.2)
            break
        except Timeout:
            if not said:
                print(f"waiting: {what} is in use by another command", flush=True)
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
        self, sweep: "Sweep", cfg: Train, warm: Optional[starters.Warm], stop: Stop, say: Callable[[str], None]
    ) -> None:
        self.sweep, self.cfg, self.warm, self.stop, self.say = sweep, cfg, warm, stop, say
        keep = frozenset({warm.process.pid}) if warm else frozenset()
        self.cold = starters.Cold(sweep.code, keep)
        self.on_progress: Callable[[Progress], None] = lambda _: None

    def order(self) -> list[Frozen]:
        """Cheapest first along the knobs that memory grows with; with repeats, shuffled so that drift can't align with one."""
        if self.cfg.repeats > 1:
            out = list(self.sweep.points)
            random.Random(self.cfg.seed).shuffle(out)
            return out
        return sorted(self.sweep.points, key=lambda p: p.cfg.micro_batch * p.cfg.seq_len)

    def status(self, point: Frozen) -> dict[str, Any]:
        """The point's status.json."""
        return folders.status_of(self.sweep.folder(point), point.identity)

    def statuses(self) -> list[str]:
        """Of this command's points."""
        return [self.status(p)["status"] for p in self.sweep.points]

    def left(self) -> list[Frozen]:
        """Points to run, in order; `running` ones whose supervisor is gone are `lost` first."""
        out = []
        for point in self.order():
            status = self.status(point)
            if status["status"] == "running":
                self._lose(point, status)
            if status["status"] in KEPT:
                continue
            if folders.failed_attempts(self.sweep.folder(point), status) > self.cfg.retries:
                self.say(
                    f"{point.folder}: {status['status']} {self.cfg.retries + 1} times; retries={self.cfg.retries} is used up"
                )
                continue
            out.append(point)
        return out

    def _lose(self, point: Frozen, status: dict[str, Any]) -> None:
        owner = status.get("supervisor") or {}
        alive = owner.get("host") == os.uname().nodename and process_start(int(owner.get("pid", 0))) == owner.get(
            "started"
        )
        if alive:
            return  # only a supervisor without our lock: none in this version
        self.say(f"{point.folder}: lost, its supervisor (pid {owner.get('pid')}) is gone; it runs again")
        from train.sweep.freeze import write_json

        write_json(
            self.sweep.folder(point) / "status.json",
            status | {"status": "lost", "reason": "the supervisor ended without a word"},
        )

    def run(self) -> None:
        """All points that are left, until done, stopped, or `max_failures` identical crashes in a row."""
        todo = self.left()
        kept = len(self.sweep.points) - len(todo)
        self.say(f"{self.sweep.path.name}: {len(self.sweep.points)} points" + (f", {kept} kept" if kept else ""))
        if not todo:
            return
        with locked(device_lock(todo[0].cfg), f"the {todo[0].cfg.device} of this host", self.stop) as owned:
            if owned:
                self._run(todo)

    def _run(self, todo: list[Frozen]) -> None:
        crashes: list[str] = []
        for number, point in enumerate(todo, 1):
            if self.stop.signum:
                return
            if self.status(point)["status"] in KEPT:  # became infeasible meanwhile
                continue
            if len(crashes) >= self.cfg.max_failures and len(set(crashes[-self.cfg.max_failures :])) == 1:
                reason = f"{self.cfg.max_failures} identical crashes in a row (max_failures): {crashes[-1]}"
                self.say(f"stopped: {reason}")
                for p in todo[number - 1 :]:
                    if self.status(p)["status"] == "pending":
                        folders.write_status(self.sweep.folder(p), p.identity, "pending", f"not started: {reason}")
                return
            began = time.monotonic()
            verdict = self._one(point)
            crashes = [*crashes, verdict.reason] if verdict.status == "crashed" else []
            why = f": {verdict.reason}" if verdict.reason else ""
            self.say(f"[{number}/{len(todo)}] {point.folder}  {verdict.status}  {time.monotonic() - began:.1f} s{why}")
            if verdict.status == "oom" and self.cfg.prune:
                self._prune(point, todo[number:])

    def _one(self, point: Frozen) -> Any:
        starter: starters.Starter = self.cold
        if self.warm is not None and not environment.needs_cold_start(point.cfg):
            starter = self.warm
        return Supervisor(
            self.sweep.folder(point), point.identity, starter, self.stop, self.sweep.code_hash, self.on_progress
        ).run()

    def _prune(self, point: Frozen, rest: list[Frozen]) -> None:
        """What is larger along micro_batch or seq_len, all else equal, would not fit either."""

        def others(p: Frozen) -> dict[str, Any]:
            derived = ("micro_batch", "seq_len", "global_batch", "grad_accum")
            return {k: v for k, v in training_config(p.cfg).items() if k not in derived}

        for p in rest:
            larger = p.cfg.micro_batch >= point.cfg.micro_batch and p.cfg.seq_len >= point.cfg.seq_len
            if larger and others(p) == others(point) and self.status(p)["status"] not in KEPT:
                folders.write_status(self.sweep.folder(p), p.identity, "infeasible", f"implied by {point.folder}")
                self.say(f"{p.folder}  infeasible: implied by {point.folder}")
