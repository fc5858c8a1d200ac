"""Odd answers of squeue and sacct, through fake binaries in PATH: the right class, or asked again."""

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from train.launch.slurm import queue

Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """fake("sacct", answer, code=0, error=""): a command with that answer."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, answer: str, code: int = 0, error: str = "") -> None:
        (tmp_path / f"{name}.out").write_text(answer)
        (tmp_path / f"{name}.err").write_text(error)
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\ncat "{tmp_path}/{name}.out"; cat "{tmp_path}/{name}.err" >&2; exit {code}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return make


OURS = {"12_0": "mfu-x-abc123", "12_1": "mfu-x-abc123"}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED by 54321", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("TIMEOUT", "TIMEOUT"),
        ("FAILED", "FAILED"),
        ("PREEMPTED", "PREEMPTED"),
        ("DEADLINE", "DEADLINE"),
    ],
)
def test_states_are_read(fake: Fake, state: str, expected: str) -> None:
    fake("sacct", f"12_0|mfu-x-abc123|{state}\n12_0.batch|batch|COMPLETED\n")
    assert queue.ended(OURS) == {"12_0": expected}


@pytest.mark.parametrize(
    "answer",
    ["", "\n", "12_0|mfu-x-abc123|RUNNING\n", "12_0|mfu-x-abc123|PENDING\n", "12_0|mfu-x-abc123|SOMETHING_NEW\n",
     "12_0|mfu-x-abc123|\n", "12_0|mfu-x-abc123|+\n", "garbage\n", "12_[3-9]|mfu-x-abc123|PENDING\n"],
)  # fmt: skip
def test_no_end_is_asked_again(fake: Fake, answer: str) -> None:
    fake("sacct", answer)
    assert queue.ended(OURS) == {}


def test_a_reused_id_is_not_ours(fake: Fake) -> None:
    fake("sacct", "12_0|somebody-else|COMPLETED\n12_1|mfu-x-abc123|TIMEOUT\n")
    assert queue.ended(OURS) == {"12_1": "TIMEOUT"}


def test_a_completed_parent_with_a_cancelled_step(fake: Fake) -> None:
    fake(
        "sacct",
        "12_0|mfu-x-abc123|COMPLETED\n12_0.batch|batch|COMPLETED\n12_0.0|python|CANCELLED by 0\n"
        "12_1|mfu-x-abc123|COMPLETED\n12_1.0|python|COMPLETED\n",
    )
    assert queue.ended(OURS) == {"12_0": "CANCELLED", "12_1": "COMPLETED"}


@pytest.mark.parametrize(
    "error",
    [
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:db:6819: "
        "Connection refused",
        "Slurm accounting storage is disabled",
    ],
)
def test_an_error_of_the_accounting_daemon_is_no_answer(fake: Fake, error: str) -> None:
    fake("sacct", "", 1, error)
    with pytest.raises(queue.QueueError, match="Connection refused|disabled"):
        queue.ended(OURS)


def test_a_missing_command_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(queue.QueueError, match="squeue is not in PATH"):
        queue.look()


def test_a_command_that_hangs_is_no_answer(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake("squeue", "")
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(queue, "COMMAND_SECONDS", 0.3)
    with pytest.raises(queue.QueueError, match="no answer"):
        queue.look()


def test_the_queue_is_read(fake: Fake) -> None:
    fake(
        "squeue",
        "12|0|15|RUNNING|None|mfu-x-abc123|mfu-sweep:t1\n12|1|12|COMPLETING|None|mfu-x-abc123|mfu-sweep:t1\n"
        "13|N/A|13|PENDING|Priority|someone's|a|comment|with bars\nslurm_load_jobs: odd line\n\n"
        "14|0|16|CANCELLED|None|mfu-x-abc123|mfu-sweep:t1\n",
    )
    entries = queue.look()
    assert list(entries) == ["12_0", "12_1", "13", "14_0"]
    assert [e.active for e in entries.values()] == [True, True, True, False]
    assert entries["12_0"].raw == "15" and entries["13"].comment == "a|comment|with bars"


@pytest.mark.parametrize(
    ("text", "left"),
    [("59:30", 3570.0), ("1-00:00:10", 86410.0), ("0:00", 0.0), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_time_left(fake: Fake, text: str, left: float | None) -> None:
    fake("squeue", text + "\n")
    assert queue.seconds_left("15") == left


@pytest.mark.parametrize(
    ("state", "started", "expected"),
    [
        ("CANCELLED", True, "interrupted"),
        ("CANCELLED", False, "interrupted"),
        ("TIMEOUT", True, "timeout"),
        ("NODE_FAIL", True, "lost"),
        ("OUT_OF_MEMORY", True, "oom"),
        ("COMPLETED", True, "lost"),
        ("FAILED", False, "crashed"),
        ("COMPLETED", False, "crashed"),
        ("TIMEOUT", False, "pending"),
        (None, True, "lost"),
        (None, False, "interrupted"),
    ],
)
def test_a_point_without_a_final_status(state: str | None, started: bool, expected: str) -> None:
    found = queue.verdict(state, started, "python: not found")
    assert found.status == expected and found.reason
    if expected == "crashed":
        assert found.reason.startswith("infrastructure: ") and found.reason.endswith("python: not found")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("JobState=RUNNING Restarts=1 PreemptTime=2026-11-29T15:43:55 EndTime=x", "preempted"),
        ("JobState=RUNNING Restarts=1 PreemptTime=None", ""),
        ("JobState=COMPLETING Restarts=1 PreemptTime=2026-11-29T15:43:55", ""),
        ("JobState=COMPLETING Restarts=1 ExitCode=0:15", ""),
        ("JobState=COMPLETING Restarts=2 ExitCode=0:0", "requeued"),
        ("slurm_load_jobs error: Invalid job id specified", ""),
    ],
)
def test_a_requeue_and_a_preemption_are_told_from_a_cancellation(fake: Fake, said: str, expected: str) -> None:
    fake("scontrol", f"JobId=15 {said}\n")
    assert queue.fate("15", 1) == expected


#: what SLURM 22.05 says of a job that it has just preempted, `scontrol show job --oneliner`, shortened
PREEMPTED = (
    "JobId=15 ArrayJobId=15 ArrayTaskId=0 JobName=mfu-x-abc123 UserId=root(0) GroupId=root(0) MCS_label=N/A"
    " Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState=COMPLETING Reason=None Dependency=(null) Requeue=1"
    " Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:03 TimeLimit=UNLIMITED EndTime=Unknown Partition=main"
)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_the_signals_that_end_a_job_do_not_end_its_questions(fake: Fake, tmp_path: Path, sig: signal.Signals) -> None:
    """SLURM sends SIGTERM twice to every process of a step: to the scontrol that asks about the first one as well."""
    fake("scontrol", PREEMPTED + "\n")
    fake("sinfo", "n1 allocated\nn2 down*\n")
    fake("squeue", "0:40\n")
    for name in ("scontrol", "sinfo", "squeue"):
        lines = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join((lines[0], f"kill -{int(sig)} $$", *lines[1:])))
    with pytest.raises(queue.QueueError, match=f"left with -{int(sig)}"):
        queue.ask("scontrol", "show", "job", "15")
    before = signal.getsignal(sig)
    assert (queue.fate("15", 0), queue.down(["n1", "n2"]), queue.seconds_left("15")) == ("requeued", "n2", 40.0)
    assert signal.getsignal(sig) == before


def test_dead_nodes_are_named(fake: Fake) -> None:
    fake("sinfo", "n1 allocated\nn2 down*\nn3 drained\nn4 failing\nn2 down*\n")
    assert queue.down(["n1", "n2", "n3", "n4"]) == "n2,n4"
    assert queue.down(["n1", "n3"]) == ""
    fake("sinfo", "", 1, "Unable to contact slurm controller")
    assert queue.down(["n2"]) == ""


def test_max_array_size(fake: Fake) -> None:
    fake("scontrol", "Configuration data\nMaxArraySize            = 11\nMaxJobCount = 5\n")
    assert queue.max_array_size() == 11
    fake("scontrol", "", 1, "slurm_load_ctl_conf error: Unable to contact slurm controller")
    assert queue.max_array_size() == 1001
