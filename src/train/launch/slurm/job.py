"""What a job runs on every node: `python -m train.launch.slurm.job SUBMISSION`, from the snapshot; one supervisor a node.

SUBMISSION is the folder that the launcher wrote (tasks.json). Node 0 decides which points still run; the others follow it
through plan files in that folder. It leaves with 0 whatever happened: how a point ended is in its status.json.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from train import config, saved
from train.config import Train
from train.launch import environment, process, scratch, starters
from train.launch.classify import Verdict
from train.launch.nodes import Nodes, address_towards
from train.launch.prune import KEPT
from train.launch.record import archive
from train.launch.slurm import files, queue
from train.launch.supervisor import Stop, Supervisor
from train.launch.tell import say
from train.measure.telemetry import Telemetry
from train.sweep.freeze import read_json, write_json

#: a node that hears nothing from node 0 for so long before a point leaves the job
PLAN_SECONDS = 600.0
#: SLURM may send the signal before the limit up to 60 s early (sbatch --signal)
EARLY_SECONDS = 60.0


@dataclass
class Place:
    """Where this process stands, from SLURM's environment."""

    job: str  # 12_3 for a task of an array
    raw: str  # the id that scontrol takes for this task alone
    task: int
    node: int
    hosts: list[str]
    restart: int  # how often the job was requeued

    @classmethod
    def here(cls) -> "Place":
        """Raises KeyError outside a job."""
        from submitit.slurm.slurm import SlurmJobEnvironment

        env = os.environ
        place = SlurmJobEnvironment()
        return cls(
            place.job_id, place.raw_job_id, int(env["SLURM_ARRAY_TASK_ID"]), place.node, list(place.hostnames),
            int(env.get("SLURM_RESTART_COUNT", "0")),
        )  # fmt: skip


class Job:
    """The points of one task of an array, one after the other, on this node."""

    def __init__(self, submission: Path, place: Place) -> None:
        self.submission, self.place = submission, place
        self.sweep = submission.parents[2]
        self.told = files.Submission.load(submission)
        self.points = self.told.tasks[place.task]
        environment.PROVENANCE.update(self.told.provenance)
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            environment.USER["MFU_SWEEP_CORES"] = (
                cores  # without task/affinity or cgroups the mask shows the whole node
            )
        self.stop = self._signals()
        self.ran = 0
        self.again: Optional[str] = None  # why the job should be requeued
        self.folder, self.had = Path(), 0  # of the point that runs; steps in its checkpoints before this attempt
        self.record: dict[str, Any] = {}  # its `job` in status.json
        code = Path(__file__).resolve().parents[3]
        self.warm = starters.Warm(code) if len(self.points) > 1 and self.told.warm else None
        self.cold = starters.Cold(code, frozenset({self.warm.process.pid}) if self.warm else frozenset())
        self.seen: Optional[dict[str, Any]] = None  # what probing this node showed
        self.telemetry = Telemetry([])
        scratch.remove_stale()

    # ---- signals -----------------------------------------------------------------------------------------------------

    def _signals(self) -> Stop:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        stop = Stop(fd=read)

        def handler(signum: int, _: object) -> None:
            if stop.signum is None:  # srun and slurmstepd may both deliver it: the second is no order to hurry
                stop.signum = signum
                os.write(write, b"x")

        for s in process.ENDING:
            signal.signal(s, handler)
        stop.meaning = self._meaning
        return stop

    def _meaning(self) -> Verdict:
        """What the signal that came says about the point that runs."""
        fate = queue.fate(self.place.raw, self.place.restart) if self.stop.signum == signal.SIGTERM else ""
        verdict = self._read_signal(fate)
        if (self.again or fate == "requeued") and self.place.restart < self.told.requeues:
            self.record["requeued"] = self.again or verdict.reason  # for those who watch the files: it starts again
        return verdict

    def _read_signal(self, fate: str) -> Verdict:
        assert self.stop.signum is not None
        name = signal.Signals(self.stop.signum).name
        if self.stop.signum != signal.SIGUSR2:
            if fate == "requeued" and (down := queue.down(self.place.hosts)):
                return Verdict("lost", f"node {down} is down")
            if fate == "preempted":
                self.again = fate
            return Verdict("interrupted", f"signal {name}" + (f" ({fate})" if fate else ""))
        left = queue.seconds_left(self.place.raw)
        if left is None or left > self.told.signal_seconds + EARLY_SECONDS:
            self.again = name
            return Verdict("interrupted", f"signal {name}: to be requeued")
        done = saved.steps_done(self.folder)
        if done > self.had and self.place.restart < self.told.requeues:
            self.again = "the time limit"
            return Verdict("interrupted", f"launch.time={self.told.time} is used up; goes on after step {done - 1}")
        if self.ran == 0:
            return Verdict("timeout", f"launch.time={self.told.time} is used up")
        self.again = "the time limit"
        return Verdict("interrupted", f"launch.time={self.told.time} was used up by {self.ran} points before it")

    # ---- points ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All points of the task that are left."""
        for index, point in enumerate(self.points):
            if self.stop.signum is not None or self.again:
                break
            attempt = self._decide(point) if self.place.node == 0 else 0
            if len(self.place.hosts) > 1:
                attempt = self._agree(index, attempt)
            if attempt:
                self._one(point, attempt)
        if self.warm is not None:
            self.warm.close()
        if self.again and self.place.node == 0:
            self._requeue()

    def _decide(self, point: files.Task) -> int:
        """The number of the attempt that starts now, 0 when the point is not to run."""
        folder = self.sweep / point.folder
        status = files.status(folder, point.identity)
        if status["status"] in KEPT or (status["status"] in ("crashed", "timeout") and self._mine(status)):
            return 0
        if status["status"] == "running":
            other = (status.get("job") or {}).get("id", "")
            if other and other != self.place.job and queue.active(other):
                say(f"{point.folder}: runs in job {other}")
                return 0
            files.end(folder, status, "lost", "the supervisor ended without a word")
            status = files.status(folder, point.identity)
        cfg = config.load(folder / "config.yaml")
        if why := self._unfit(cfg):
            archive(folder)
            files.write_status(folder, point.identity, "crashed", f"infrastructure: {why}", self._record())
            say(f"{point.folder}  crashed: infrastructure: {why}")
            return 0
        if cfg.prune and (smaller := files.implied_by(self.sweep, point.folder, cfg)):
            files.write_status(folder, point.identity, "infeasible", f"implied by {smaller}", self._record())
            say(f"{point.folder}  infeasible: implied by {smaller}")
            return 0
        job = status.get("job") or {}
        if self._mine(status) and job["restart"] < self.place.restart and "requeued" not in job:
            # SLURM gave no answer when the attempt ended; that this start runs is the answer
            write_json(folder / "status.json", status | {"job": job | {"requeued": status["reason"]}})
        return archive(folder)

    def _mine(self, status: dict[str, Any]) -> bool:
        """Whether this job ended the point already, before a requeue: that is not retried within one command."""
        return bool((status.get("job") or {}).get("token") == self._record()["token"])

    def _unfit(self, cfg: Train) -> Optional[str]:
        """What is wrong with this node's software."""
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return f"{sys.executable} has no torch (on {self._host()})"
        if self.told.torch and torch != self.told.torch:
            return f"torch {torch}, submitted with {self.told.torch} (on {self._host()})"
        return self._no_gpus(cfg) if cfg.device == "cuda" else None

    def _no_gpus(self, cfg: Train) -> Optional[str]:
        """What a look at the node's GPUs finds wrong; the first look also starts telemetry."""
        assert cfg.nproc is not None
        if self.seen is None:
            try:
                self.seen = self._probe()
            except (EOFError, OSError, ValueError) as e:
                return f"torch can't be used: {e} (on {self._host()})"
            self.telemetry = Telemetry([g["uuid"] for g in self.seen["gpus"]])
        ranks, gpus = cfg.nproc // len(self.place.hosts), len(self.seen["gpus"])
        if gpus < ranks:
            why = f" ({self.seen['gpu_error']})" if self.seen["gpu_error"] else ""
            return f"{gpus} GPUs are visible, {ranks} are needed{why} (on {self._host()})"
        return None

    def _host(self) -> str:
        """This node as SLURM calls it."""
        return self.place.hosts[self.place.node]

    def _probe(self) -> dict[str, Any]:
        if self.warm is not None:
            return self.warm.probe()
        command = [sys.executable, "-m", "train.launch.probe"]
        done = subprocess.run(command, env=starters.python_env(self.cold.code), capture_output=True, text=True)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["no output"])[-1])
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def _agree(self, index: int, attempt: int) -> int:
        """Node 0 tells the attempt's number, the others wait for it; 0: skip the point."""
        plan = self.submission / f"plan-{self.place.task}.{self.place.restart}.{index}.json"
        if self.place.node == 0:
            write_json(plan, {"attempt": attempt})
            return attempt
        deadline = time.monotonic() + PLAN_SECONDS
        while self.stop.signum is None and time.monotonic() < deadline:
            if told := read_json(plan):
                return int(told["attempt"])
            time.sleep(0.2)
        return 0

    def _one(self, point: files.Task, attempt: int) -> None:
        folder = self.sweep / point.folder
        cfg = config.load(folder / "config.yaml")
        nodes = None
        if len(self.place.hosts) > 1:
            other = self.place.hosts[1 if self.place.node == 0 else 0]
            nodes = Nodes(folder, self.place.node, len(self.place.hosts), address_towards(other))
            if self.place.node > 0 and (why := self._unfit(cfg)):  # node 0 has looked at itself before it decided
                say(f"infrastructure: {why}")
                nodes.end(Verdict("crashed", f"infrastructure: {why}"), True, [], {})
                return
        self.folder, self.had, self.record = folder, saved.steps_done(folder), self._record()
        starter: starters.Starter = self.cold
        if self.warm is not None and not environment.needs_cold_start(cfg):
            if not self.warm.alive():
                self.warm.restart()
            starter = self.warm
        supervisor = Supervisor(
            folder, point.identity, starter, self.stop, self.told.code, telemetry=self.telemetry, attempt=attempt,
            nodes=nodes, job=self.record,
        )  # fmt: skip
        began = time.monotonic()
        verdict = supervisor.run()
        why = f": {verdict.reason}" if verdict.reason else ""
        say(f"{point.folder}  {verdict.status}  {time.monotonic() - began:.1f} s{why}")
        if verdict.status == "lost" and self.stop.signum is None:  # else SLURM knows, and has decided
            self.again = verdict.reason
        if verdict.status != "interrupted":
            self.ran += 1

    def _record(self) -> dict[str, Any]:
        p = self.place
        return {
            "id": p.job,
            "raw": p.raw,
            "restart": p.restart,
            "nodes": p.hosts,
            "token": f"{self.told.token}_{p.task}",
        }

    def _requeue(self) -> None:
        """Ask SLURM to start the job again; it kills this process for that, so it is the last thing done."""
        if self.place.restart >= self.told.requeues:
            say(f"not requeued ({self.again}): launch.requeues={self.told.requeues} is used up")
            return
        say(f"requeued: {self.again}")
        try:
            queue.ask_while_ending("scontrol", "requeue", self.place.raw, timeout=60)
        except queue.QueueError as e:
            say(f"scontrol requeue: {e}")


def main(submission: str) -> int:
    """Entry point. Never raises and returns 0: an exit code would only hide what status.json says."""
    try:
        place = Place.here()
        if place.restart > files.Submission.load(Path(submission)).requeues:
            say("launch.requeues is used up: the job ends")
            return 0
        Job(Path(submission), place).run()
    except BaseException:
        traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
