"""What SLURM says about jobs: squeue while they are known, sacct where there is accounting. Odd answers are asked again."""

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Optional

from train.launch import process
from train.launch.classify import Verdict
from train.launch.slurm.options import seconds

#: states of a job that has not ended for good (squeue(1), JOB STATE CODES)
ACTIVE = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
    "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
)  # fmt: skip
#: how a point ended whose supervisor left no final status, by the state in which its job ended
ENDED = {
    "COMPLETED": "lost",
    "FAILED": "lost",
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
    "REVOKED": "interrupted",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "lost",
    "BOOT_FAIL": "lost",
    "LAUNCH_FAILED": "lost",
    "RECONFIG_FAIL": "lost",
}
#: a command that hangs counts as one that failed
COMMAND_SECONDS = 30.0
#: the same in a job that SLURM is ending: it kills within 30 s (KillWait), and two questions are asked
ENDING_SECONDS = 8.0


class QueueError(Exception):
    """SLURM gave no usable answer; its own words."""


@dataclass(frozen=True)
class Entry:
    """One job, or one task of an array."""

    job: str  # 12_3
    raw: str
    state: str
    reason: str
    name: str
    comment: str

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def ask(*command: str, timeout: Optional[float] = None) -> str:
    """Standard output of a SLURM command. Raises QueueError."""
    limit = timeout or COMMAND_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except FileNotFoundError:
        raise QueueError(f"{command[0]} is not in PATH") from None
    except subprocess.TimeoutExpired:
        raise QueueError(f"{command[0]} gave no answer in {limit:.0f} s") from None
    if done.returncode:
        raise QueueError(" ".join(done.stderr.split()) or f"{command[0]} left with {done.returncode}")
    return done.stdout


def ask_while_ending(*command: str, timeout: float = ENDING_SECONDS) -> str:
    """The same in a job that SLURM is ending, by a command that its signals don't reach. Raises QueueError.

    Depending on proctrack they go to every process of a step, and twice, from slurmd and through srun: the second would kill
    the command that is to say what the first one meant. What is ignored here, a command that we start ignores too.
    """
    before = {s: signal.signal(s, signal.SIG_IGN) for s in process.ENDING}
    try:
        return ask(*command, timeout=timeout)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def clean(state: str) -> str:
    """`CANCELLED by 54321`, `CANCELLED+` and cut-off names like `OUT_OF_ME+` as SLURM's full name; "" for none."""
    word = state.split(" ")[0].strip().upper()
    if word.endswith("+"):
        word = word[:-1]
        return next((s for s in (*ENDED, *ACTIVE) if s.startswith(word)), "") if word else ""
    return word if word in ENDED or word in ACTIVE else ""


def look() -> dict[str, Entry]:
    """This user's jobs by id, ended ones too while the controller remembers them (MinJobAge). Raises QueueError."""
    text = ask(
        "squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%F|%K|%A|%T|%r|%j|%k"
    )
    entries = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 6)
        if len(parts) < 7:
            continue
        array, index, raw, state, reason, name, comment = parts
        job = f"{array}_{index}" if index.isdigit() else raw
        entries[job] = Entry(job, raw, clean(state), reason, name, comment)
    return entries


def ended(jobs: dict[str, str]) -> dict[str, str]:
    """From accounting, the states of those jobs (id → our name for it) that have ended. Raises QueueError.

    Ids are used again, so the name must be ours. Jobs that are not in the answer have to be asked for again: accounting lags
    behind, or there is none.
    """
    arrays = ",".join(sorted({j.split("_")[0] for j in jobs}))
    text = ask("sacct", "--noheader", "--parsable2", f"--jobs={arrays}", "--format=JobID,JobName,State")
    states: dict[str, str] = {}
    steps: dict[str, list[str]] = {}
    for line in text.splitlines():
        job, _, rest = line.strip().partition("|")
        title, _, state = rest.rpartition("|")
        parent, dot, _ = job.partition(".")
        if parent not in jobs:
            continue
        if dot:
            steps.setdefault(parent, []).append(clean(state))
        elif title == jobs[parent] and clean(state) in ENDED:
            states[parent] = clean(state)
    for job, state in states.items():
        if state == "COMPLETED" and "CANCELLED" in steps.get(job, []):
            states[job] = "CANCELLED"  # scancel of the step alone: the script then ends well
    return states


def verdict(state: Optional[str], started: bool, log: str = "") -> Verdict:
    """How a point ended that has no final status though its job has ended, in `state`; None: nobody knows any more.

    Reasons name no job, so that points that end alike say the same; status.json has the job.
    """
    if state is None:
        if started:
            return Verdict("lost", "the job is gone and its supervisor ended without a word")
        return Verdict("interrupted", "the job left the queue before the point started")
    kind = ENDED[state]
    if started:
        why = "ended without a word" if kind == "lost" else "was ended"
        memory = " (host memory)" if kind == "oom" else ""
        return Verdict(kind, f"the job is {state}{memory}; its supervisor {why}")
    if state in ("COMPLETED", "FAILED"):
        said = f": {log}" if log else ""
        return Verdict("crashed", f"infrastructure: the job is {state} before its supervisor started{said}")
    if kind == "interrupted":
        return Verdict(kind, f"the job was {state.lower()} before the point started")
    return Verdict("pending", f"the job is {state} before the point started")


def active(job: str) -> bool:
    """Whether the job is waiting or running; when SLURM can't be asked it may be."""
    try:
        entry = look().get(job)
    except QueueError:
        return True
    return entry is not None and entry.active


def fate(raw: str, restart: int) -> str:
    """What SLURM means by ending a job in its start number `restart`.

    "requeued": it starts again by itself (scontrol requeue, preemption by requeue, a dead node). "preempted": it is to make
    room, and may be asked to start again. "": it is over, or SLURM can't say.
    """
    try:
        text = ask_while_ending("scontrol", "show", "job", "--oneliner", raw)
    except QueueError:
        return ""
    fields = dict(part.partition("=")[::2] for part in text.split())
    if fields.get("Restarts", "").isdigit() and int(fields["Restarts"]) > restart:
        return "requeued"
    preempted = fields.get("JobState") == "RUNNING" and fields.get("PreemptTime", "None") != "None"
    return "preempted" if preempted else ""


def down(hosts: list[str]) -> str:
    """Those of a job's nodes that SLURM holds for dead, joined by commas; "" for none, or when it can't be asked."""
    try:
        text = ask_while_ending("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T")
    except QueueError:
        return ""
    states = [line.split() for line in text.splitlines()]
    dead = {s[0] for s in states if len(s) == 2 and s[1].startswith(("down", "fail"))}
    return ",".join(h for h in hosts if h in dead)


def seconds_left(raw: str) -> Optional[float]:
    """Time that the job has left; None when SLURM can't say."""
    try:
        text = ask_while_ending("squeue", "--noheader", f"--jobs={raw}", "--format=%L").strip()
    except QueueError:
        return None
    if text.startswith("-"):
        return 0.0
    return seconds(text) if ":" in text else None  # squeue shows M:SS at least; UNLIMITED, INVALID


def max_array_size() -> int:
    """Tasks that one array may have; SLURM's default where it can't be asked."""
    try:
        for line in ask("scontrol", "show", "config").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "MaxArraySize":
                return max(1, int(value))
    except (QueueError, ValueError):
        pass
    return 1001
