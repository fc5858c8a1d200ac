"""Runs one point on one node: starts its ranks, watches them, classifies the end, writes status.json. Imports no torch."""

import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Optional

from train import config
from train.launch import environment, process
from train.launch.classify import RankEnd, Verdict, judge
from train.launch.heartbeat import Watch
from train.launch.starters import Starter
from train.sweep.freeze import SCHEMA, write_json

#: after the first failure the peers get this long to say what happened to them
GRACE_SECONDS = 0.5
#: a rank that got the signal for its stack needs this long to write it
STACK_SECONDS = 0.5


@dataclass
class Stop:
    """Set by a signal handler; `fd` becomes readable so that waits return at once."""

    signum: Optional[int] = None
    hard: bool = False  # a second signal: kill without waiting
    fd: int = -1


@dataclass
class Progress:
    """What a terminal may show while a point runs."""

    folder: Path
    step: int
    steps: int
    phase: str


@dataclass
class Supervisor:
    """One point, from its frozen folder to its final status."""

    folder: Path
    identity: str
    starter: Starter
    stop: Stop
    code: str = ""  # hash of the code snapshot that runs
    on_progress: Callable[[Progress], None] = lambda _: None
    attempt: int = 1
    started: str = ""
    pids: dict[int, int] = field(default_factory=dict)  # pid → rank
    ends: dict[int, RankEnd] = field(default_factory=dict)

    def run(self) -> Verdict:
        """Run the point to its end. Never raises for what happens to the point; the verdict says it."""
        self.cfg = config.load(self.folder / "config.yaml")
        assert self.cfg.nproc is not None
        self.world = self.cfg.nproc
        self.attempt = archive(self.folder)
        self.started = now()
        self.watches: dict[int, Watch] = {}
        scratch = Path(tempfile.mkdtemp(prefix=f"mfu-sweep-{os.getuid()}-"))
        oom_kills = _oom_kills()
        try:
            self._status(Verdict("running", ""), {})
            (self.folder / "logs").mkdir(exist_ok=True)
            verdict = self._start(scratch) or self._watch(scratch)
            self._end_ranks(scratch)
            if verdict is None:
                verdict = judge(list(self.ends.values()), _oom_kills() > oom_kills)
        except OSError as e:
            self._end_ranks(scratch)
            verdict = Verdict("crashed", f"{type(e).__name__}: {e}")
        try:
            self._manifest(scratch)
            self._status(verdict, self._summary(scratch, verdict))
        except OSError as e:  # a full disk: status.json stays as it was, the next command sees a point to run again
            verdict = Verdict("crashed", f"status.json can't be written: {e}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return verdict

    def _start(self, scratch: Path) -> Optional[Verdict]:
        rank = 0
        try:
            for rank in range(self.world):
                self.watches[rank] = Watch(scratch, rank)
                env = environment.rank_env(self.cfg, rank, rank, self.world, self.world)
                pid = self.starter.start(self.folder, scratch, env, self.folder / "logs" / f"rank{rank}.log")
                self.pids[pid] = rank
        except OSError as e:
            return Verdict("crashed", f"rank {rank} can't be started: {e}{_limits()}", rank)
        return None

    def _watch(self, scratch: Path) -> Optional[Verdict]:
        """Until every rank has ended, or the point is decided from outside; None when `judge` should decide."""
        began = time.monotonic()
        failed_at: Optional[float] = None
        self._status(Verdict("running", ""), {})
        while len(self.ends) < self.world:
            for e in self.starter.wait(0.05, [self.stop.fd] if self.stop.fd >= 0 else []):
                if e.pid not in self.pids:
                    continue
                rank = self.pids[e.pid]
                self.watches[rank].look()
                self.ends[rank] = RankEnd(
                    rank, e.code, e.at, step=self.watches[rank].step, error=_record(scratch, rank)
                )
                if e.code != 0:
                    failed_at = failed_at or time.monotonic()
            if self.stop.signum is not None:
                return Verdict("interrupted", f"signal {signal.Signals(self.stop.signum).name}")
            now_ = time.monotonic()
            if failed_at is not None and now_ - failed_at > GRACE_SECONDS:
                return None
            if self.cfg.timeout is not None and now_ - began > self.cfg.timeout:
                self._stacks()
                return Verdict("timeout", f"timeout={self.cfg.timeout:g} s is used up at step {self._step()}")
            if failed_at is None and (verdict := self._hang(scratch)):
                self._stacks()
                return verdict
            lead = self.watches[0]
            self.on_progress(Progress(self.folder, lead.step, self.cfg.steps, lead.phase))
        return None

    def _step(self) -> int:
        return max(w.step for w in self.watches.values())

    def _hang(self, scratch: Path) -> Optional[Verdict]:
        """A rank whose heartbeat stopped. The others may only be waiting for it, so the oldest beat names the culprit."""
        quiet = {r: w.look() for r, w in self.watches.items() if r not in self.ends}
        if not quiet:
            return None
        rank, seconds = max(quiet.items(), key=lambda item: item[1])
        w = self.watches[rank]
        slowest = max(w.slowest for w in self.watches.values())
        if min(self.watches[r].step for r in quiet) < 2:
            limit = self.cfg.launch.first_step_timeout
        else:
            limit = max(self.cfg.launch.hang_seconds, 5 * slowest)
        if seconds <= limit:
            return None
        return Verdict(
            "timeout", f"rank {rank} gave no sign of life for {limit:.1f} s at step {w.step} ({w.phase})", rank
        )

    def _stacks(self) -> None:
        """Every living rank writes its Python stack to its log (faulthandler), stopped ones too once they continue."""
        for pid, rank in self.pids.items():
            if rank not in self.ends:
                process.kill(pid, signal.SIGUSR1)
                process.kill(pid, signal.SIGCONT)
        time.sleep(STACK_SECONDS)

    def _end_ranks(self, scratch: Path) -> None:
        """Kill what still runs and everything below it; afterwards no process of the point is left."""
        for pid, rank in self.pids.items():
            if rank not in self.ends:
                self.watches[rank].look()
                error = _record(scratch, rank)  # it may have spoken before it was killed
                self.ends[rank] = RankEnd(rank, None, killed=error is None, step=self.watches[rank].step, error=error)
                process.kill(pid)
        self.starter.clean()

    def _summary(self, scratch: Path, verdict: Verdict) -> dict[str, Any]:
        """What only the run knows: rank 0's summary, and lists over ranks."""
        results = [_read(scratch / f"result-{r}.json") or {} for r in range(self.world)]
        summary: dict[str, Any] = results[0].get("summary", {})
        if lead := _read(scratch / "summary.json"):
            summary = lead | summary
        for key in sorted(set(results[0]) - {"summary"}):
            if all(key in r for r in results):
                summary[key] = [r[key] for r in results]
        failure = self.ends.get(verdict.rank) if verdict.rank is not None else None
        if verdict.status != "ok" and failure is not None:
            summary["failure"] = {"rank": failure.rank, "host": socket.gethostname(), "step": failure.step} | (
                failure.error or {}
            )
        return summary

    def _manifest(self, scratch: Path) -> None:
        if host := _read(scratch / "manifest.json"):
            write_json(self.folder / "manifest.json", {"schema": SCHEMA, "hosts": [host]})

    def _status(self, verdict: Verdict, summary: dict[str, Any]) -> None:
        running = verdict.status == "running"
        ranks = [
            {
                "rank": rank,
                "pid": pid,
                "host": socket.gethostname(),
                "exit_code": self.ends[rank].code if rank in self.ends else None,
            }
            for pid, rank in self.pids.items()
        ]
        write_json(
            self.folder / "status.json",
            {
                "schema": SCHEMA,
                "identity": self.identity,
                "status": verdict.status,
                "reason": verdict.reason,
                "attempt": self.attempt,
                "code": self.code,
                "supervisor": {"pid": os.getpid(), "host": socket.gethostname(), "started": process_start(os.getpid())},
                "started": self.started,
                "ended": None if running else now(),
                "ranks": ranks,
                "summary": summary,
            },
        )


def now() -> str:
    """The time of day, UTC, ISO 8601. For people: durations come from monotonic clocks."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def process_start(pid: int) -> Optional[int]:
    """The kernel's start time of a process in clock ticks since boot: with the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def archive(folder: Path) -> int:
    """Move what an earlier attempt left to attempts/<n>/; the number of the attempt that starts now."""
    done = folder / "attempts"
    number = 1 + max((int(p.name) for p in done.glob("*") if p.name.isdigit()), default=0) if done.is_dir() else 1
    old = [
        folder / n
        for n in ("status.json", "metrics.jsonl", "manifest.json", "logs", "rendezvous")
        if (folder / n).exists()
    ]
    if not old:
        return number
    target = done / str(number)
    target.mkdir(parents=True)
    for path in old:
        path.rename(target / path.name)
    return number + 1


def _read(path: Path) -> Optional[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _record(scratch: Path, rank: int) -> Optional[dict[str, Any]]:
    return _read(scratch / f"error-{rank}.json")


def _limits() -> str:
    """The limits that a failed start may have hit."""
    procs, files = resource.getrlimit(resource.RLIMIT_NPROC)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shown = ["unlimited" if v == resource.RLIM_INFINITY else str(v) for v in (procs, files)]
    return f" (limits: processes {shown[0]}, open files {shown[1]})"


def _oom_kills() -> int:
    """Kills by the kernel for memory in this process's cgroup (v2, else v1), 0 where there is no count."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                file = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                file = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control"
            else:
                continue
            for entry in file.read_text().splitlines():
                name, _, count = entry.partition(" ")
                if name == "oom_kill":
                    return int(count)
    except (OSError, ValueError):
        pass
    return 0
