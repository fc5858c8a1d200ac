"""Runs one point on one node: starts its ranks, watches them, classifies the end, writes status.json. Imports no torch."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import psutil

from train import config
from train.launch import environment, explain, hang, limits, process, record, scratch, stacks
from train.launch.classify import RankEnd, Verdict, at_step, failed, judge
from train.launch.heartbeat import Watch
from train.launch.nodes import Nodes
from train.launch.starters import Starter
from train.measure.telemetry import Telemetry
from train.sweep.freeze import SCHEMA, read_json, write_json

#: after the first failure the peers get this long to say what happened to them
GRACE_SECONDS = 0.5
#: a scheduler's signal to a whole job may end its ranks so long before it reaches their supervisor, on a busy node
SIGNAL_SECONDS = 1.0


@dataclass
class Stop:
    """Set by a signal handler; `fd` becomes readable so that waits return at once."""

    signum: Optional[int] = None
    fd: int = -1
    count: int = 0  # signals so far
    nothing_written: bool = True  # the command may just end
    meaning: Optional[Callable[[], Verdict]] = None  # of the signal for the point that runs; None: interrupted
    busy: bool = False  # a point's end is being recorded: a second signal waits for that, it takes 0.1 s


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
    telemetry: Telemetry = field(default_factory=lambda: Telemetry([]))
    deadline: float = float("inf")  # monotonic seconds at which the command's budget ends
    attempt: int = 0  # already archived by the caller as this one; 0: archive here
    nodes: Optional[Nodes] = None  # several nodes: this one's place among them
    job: Optional[dict[str, Any]] = None  # of the scheduler that started us, for status.json
    started: str = ""
    pids: dict[int, int] = field(default_factory=dict)  # pid → rank
    ends: dict[int, RankEnd] = field(default_factory=dict)
    quiet: dict[str, float] = field(default_factory=dict)  # of a hang: {quiet_s, limit_s}

    def run(self) -> Verdict:
        """Run the point to its end. Never raises for what happens to the point; the verdict says it."""
        self.began = time.monotonic()
        self.started = record.now()
        self.stop.busy = True
        try:
            return self._run()
        except (OSError, config.ConfigError) as e:  # not even a scratch folder, or no readable config.yaml
            return Verdict("crashed", f"{type(e).__name__}: {e}{explain.limits_of(e)}")
        finally:
            self.stop.busy = False

    def _run(self) -> Verdict:
        self.cfg = config.load(self.folder / "config.yaml")
        assert self.cfg.nproc is not None
        self.world = self.cfg.nproc
        self.local = self.nodes.ranks(self.world) if self.nodes else range(self.world)  # ranks of this node
        self.watches: dict[int, Watch] = {}
        self.scratch = scratch.make()
        oom_kills = limits.oom_kills()
        try:
            self.attempt = self.attempt or record.archive(self.folder)
            if self.local[0] == 0:
                record.reserve(self.folder, self.world)
            self._status(Verdict("running", ""), {})
            self.logs.mkdir(exist_ok=True)
            self.telemetry.begin(self.scratch, self._own_pids, len(self.local))
            verdict = self._start() or self._watch()
            if verdict is None and any(e.code is not None and -e.code in process.ENDING for e in self.ends.values()):
                verdict = self._told()
            self._end_ranks()
            decided, oom_killed = verdict is not None, limits.oom_kills() > oom_kills
            if verdict is None:
                verdict = self._judge(oom_killed)
            if self.nodes:
                verdict = self._over_nodes(self.nodes, verdict, decided, oom_killed)
        except (OSError, EOFError) as e:  # EOFError: the rank server is gone, its ranks with it
            self._end_ranks()
            name = "" if isinstance(e, EOFError) else f"{type(e).__name__}: "
            verdict = Verdict("crashed", f"{name}{e}{explain.limits_of(e)}")
            if isinstance(e, EOFError) and limits.oom_kills() > oom_kills:
                verdict = Verdict("oom", f"out of host memory: {e}, killed by the kernel")
            elif isinstance(e, EOFError):
                verdict = self._told() or verdict
            if self.nodes:  # else they would only see that this one has gone silent
                with contextlib.suppress(OSError):
                    self.nodes.end(verdict, True, list(self.ends.values()), {})
        try:
            return self._last_word(verdict)
        finally:
            self.telemetry.end()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _last_word(self, verdict: Verdict) -> Verdict:
        """Write how the point ended, also on a disk that is full by now; the verdict that was written."""
        if self.local[0] != 0:
            return verdict  # node 0 alone writes it
        try:
            self._manifest()
        except OSError as e:
            if verdict.status == "ok":  # a result without its provenance is none
                verdict = Verdict("crashed", f"manifest.json can't be written: {e}")
        try:
            record.release(self.folder)
            self._status(verdict, self._summary(verdict))
        except OSError as e:  # status.json stays as it was, the next command sees a point to run again
            return Verdict("crashed", f"status.json can't be written: {e}")
        return verdict

    def _over_nodes(self, nodes: Nodes, verdict: Verdict, decided: bool, oom_killed: bool) -> Verdict:
        """Tell the other nodes how this one ended; on node 0 the verdict over all of them."""
        ends = list(self.ends.values())
        results = {str(r): read_json(self.scratch / f"result-{r}.json") or {} for r in self.local}
        manifest = read_json(self.scratch / "manifest.json")
        nodes.end(verdict, decided, ends, results, ranks=self._ranks(), manifest=manifest)
        return nodes.judge(verdict, decided, ends, oom_killed) if nodes.node == 0 else verdict

    @property
    def logs(self) -> Path:
        """Each rank's output, and stacks of a hang."""
        return self.folder / "logs"

    def _own_pids(self) -> set[int]:
        own = set(self.pids)
        for pid in list(own):
            try:
                own |= {p.pid for p in psutil.Process(pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                pass
        return own

    def _start(self) -> Optional[Verdict]:
        rank = 0
        recorder = stacks.recorder_env(self.scratch) if self.cfg.device == "cuda" and self.world > 1 else {}
        try:
            for local_rank, rank in enumerate(self.local):
                self.watches[rank] = Watch(self.scratch, rank)
                env = recorder | environment.rank_env(self.cfg, rank, local_rank, self.world, len(self.local))
                if self.nodes:
                    env = self.nodes.env() | env
                pid = self.starter.start(self.folder, self.scratch, env, self.logs / f"rank{rank}.log")
                self.pids[pid] = rank
        except OSError as e:
            return Verdict("crashed", f"rank {rank} can't be started: {e}{limits.named()}", rank)
        return None

    def _watch(self) -> Optional[Verdict]:
        """Until every rank has ended, or the point is decided from outside; None when `judge` should decide."""
        failed_at: Optional[float] = None
        self._status(Verdict("running", ""), {})
        while len(self.ends) < len(self.local):
            for e in self.starter.wait(0.05, [self.stop.fd] if self.stop.fd >= 0 else []):
                if e.pid in self.pids:
                    self._ended(self.pids[e.pid], e.code, e.at)
            if failed_at is None and (any(failed(e) for e in self.ends.values()) or self._spoken()):
                failed_at = time.monotonic()
            if self.stop.signum is not None:
                if self.stop.meaning is not None:
                    return self.stop.meaning()
                return Verdict("interrupted", f"{signal.Signals(self.stop.signum).name}{at_step(self._step())}")
            now_ = time.monotonic()
            if self.nodes:
                if gone := self.nodes.look():
                    return gone
                if failed_at is None and self.nodes.failed():
                    failed_at = now_
            if failed_at is not None:
                if now_ - failed_at > GRACE_SECONDS:
                    return None
                continue
            if self.cfg.timeout is not None and now_ - self.began > self.cfg.timeout:
                self._stacks()
                return Verdict("timeout", f"timeout={self.cfg.timeout:g} s is used up{at_step(self._step())}")
            if now_ > self.deadline:
                return Verdict("interrupted", f"budget.hours is used up{at_step(self._step())}")
            if verdict := self._hang():
                return verdict
            lead = self.watches[self.local[0]]
            self.on_progress(Progress(self.folder, lead.step, self.cfg.steps, lead.phase))
        return None

    def _told(self) -> Optional[Verdict]:
        """What the scheduler that started us means by the signal that ended ranks; None when none comes to us as well."""
        if self.stop.meaning is None:
            return None
        deadline = time.monotonic() + SIGNAL_SECONDS
        while self.stop.signum is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.stop.meaning() if self.stop.signum is not None else None

    def _ended(self, rank: int, code: Optional[int], at: float, killed: bool = False) -> None:
        self.watches[rank].look()
        error = read_json(self.scratch / f"error-{rank}.json")
        done = (self.scratch / f"result-{rank}.json").exists()
        self.ends[rank] = RankEnd(rank, code, at, killed and error is None, self.watches[rank].step, done, error)

    def _spoken(self) -> bool:
        """Has a rank recorded an error whose process is still ending? (A CUDA context takes seconds to tear down.)"""
        return any((self.scratch / f"error-{r}.json").exists() for r in self.local if r not in self.ends)

    def _step(self) -> int:
        for w in self.watches.values():
            w.look()  # the last look may be a step ago
        return max(w.step for w in self.watches.values())

    def _hang(self) -> Optional[Verdict]:
        quiet = hang.silence(self.watches, self.ends, self.cfg.launch)
        if quiet is None:
            return None
        self.quiet = {"quiet_s": quiet.seconds, "limit_s": quiet.limit}
        return hang.accuse(quiet, self.watches, self._stacks())

    def _stacks(self) -> dict[int, stacks.Stack]:
        """Stacks of the living ranks and NCCL's flight recorder, kept in the point folder."""
        alive = {rank: pid for pid, rank in self.pids.items() if rank not in self.ends}
        found = stacks.collect(self.scratch, self.logs, alive)
        stacks.flight_recorder(self.scratch, self.logs, alive)
        return found

    def _judge(self, oom_killed: bool) -> Verdict:
        verdict = judge(list(self.ends.values()), oom_killed)
        end = self.ends.get(verdict.rank) if verdict.rank is not None else None
        if end is not None:
            verdict = explain.held_by_others(verdict, end, self.telemetry.foreign(end.rank))
            log = self.logs / f"rank{end.rank}.log"
            explain.last_line(verdict, end, log)
            explain.name_limits(verdict, end, log)
        return verdict

    def _end_ranks(self) -> None:
        """Kill what still runs and everything below it; afterwards no process of the point is left."""
        for pid, rank in self.pids.items():
            if rank not in self.ends:
                self._ended(rank, None, time.monotonic(), killed=True)  # it may have spoken before
                process.kill(pid)
        self.starter.clean()

    def _summary(self, verdict: Verdict) -> dict[str, Any]:
        """What only the run knows: rank 0's summary, lists over ranks, cost, and the failure."""
        results = [read_json(self.scratch / f"result-{r}.json") or {} for r in self.local]
        for other in self.nodes.told("results") if self.nodes else []:
            results += [result for _, result in sorted(other.items(), key=lambda item: int(item[0]))]
        summary: dict[str, Any] = results[0].get("summary", {})
        if lead := read_json(self.scratch / "summary.json"):
            summary = lead | summary
        for key in sorted(set(results[0]) - {"summary"}):
            if len(results) == self.world and all(key in r for r in results):
                summary[key] = [r[key] for r in results]
        if telemetry := self.telemetry.end():
            summary["telemetry"] = telemetry
        wall = time.monotonic() - self.began
        summary |= {"wall_s": wall, "device_hours": wall * self.world / 3600}
        if verdict.status != "ok":
            summary["device_hours_wasted"] = summary["device_hours"]
        failure = self.ends.get(verdict.rank) if verdict.rank is not None else None
        if verdict.status != "ok" and failure is not None:
            error = failure.error or {}
            at = error.get("at", failure.at)
            summary["failure"] = {"rank": failure.rank, "host": socket.gethostname(), "step": failure.step} | error
            summary["failure"] |= {"seconds_to_verdict": time.monotonic() - at} | self.quiet
        elif verdict.rank is not None and self.nodes and (theirs := self.nodes.failure(verdict.rank)):
            summary["failure"] = theirs
        return summary

    def _manifest(self) -> None:
        host = read_json(self.scratch / "manifest.json")
        if host:
            others = self.nodes.told("manifest") if self.nodes else []
            write_json(self.folder / "manifest.json", {"schema": SCHEMA, "hosts": [host, *others]}, sync=False)

    def _ranks(self) -> list[dict[str, Any]]:
        host = socket.gethostname()
        return [
            {"rank": r, "pid": p, "host": host, "exit_code": self.ends[r].code if r in self.ends else None}
            for p, r in self.pids.items()
        ]

    def _status(self, verdict: Verdict, summary: dict[str, Any]) -> None:
        if self.local[0] != 0:
            return  # node 0 alone writes it
        running = verdict.status == "running"
        host, pid = socket.gethostname(), os.getpid()
        others = self.nodes.told("ranks") if self.nodes else []
        content = {
            "schema": SCHEMA,
            "identity": self.identity,
            "status": verdict.status,
            "reason": verdict.reason,
            "attempt": self.attempt,
            "code": self.code,
            "supervisor": {"pid": pid, "host": host, "started": scratch.process_start(pid)},
            "started": self.started,
            "ended": None if running else record.now(),
            "ranks": sum(others, self._ranks()),
            "summary": summary,
        }
        if self.job:
            content["job"] = self.job
        write_json(self.folder / "status.json", content, sync=not running)
