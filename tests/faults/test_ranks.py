"""Ranks are killed, stopped and starved from outside, in every phase; real processes, the real supervisor."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.lab import Lab, gone, steps, wait_for
from train import config
from train.launch import starters
from train.launch.classify import Verdict

LONG = {"steps": 10**6}
PHASES = [("start", -1), ("build", -1), ("train", 0), ("train", 20)]


def promptly(trial: object, seconds: float = 2.0) -> None:
    """A crash reaches its final status within 2 s, by the supervisor's own clock."""
    took = trial.status["summary"]["failure"]["seconds_to_verdict"]  # type: ignore[attr-defined]
    assert took < seconds, took


@pytest.mark.parametrize("phase, step", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed(lab: Lab, tmp_path: Path, rank: int, phase: str, step: int) -> None:
    trial = lab.start(tmp_path, **LONG)
    pid = trial.pid(rank)
    if phase != "start":
        trial.reach(phase, step)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    verdict = trial.end()
    assert time.monotonic() - killed < 2  # with its final status written and its ranks gone
    assert verdict.status == "crashed"
    assert verdict.reason.startswith(f"rank {rank} killed by signal 9 (SIGKILL)"), verdict.reason
    assert trial.status["status"] == "crashed" and trial.status["reason"] == verdict.reason
    assert trial.status["summary"]["failure"]["host"] == os.uname().nodename
    promptly(trial)
    if step > 0:
        assert f"at step {trial.status['summary']['failure']['step']}" in verdict.reason
        kept = steps(trial.folder)
        assert kept and kept == list(range(len(kept)))  # a flush is due four times a second


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("what", ["rank", "server"])
def test_a_schedulers_signal_reaches_the_supervisor_last(lab: Lab, tmp_path: Path, what: str, comes: bool) -> None:
    """SLURM signals a step's processes one after the other: those that died of it have not crashed."""
    trial = lab.start(tmp_path, **LONG)
    trial.stop.meaning = lambda: Verdict("interrupted", "signal SIGTERM (requeued)")
    trial.reach("train", 3)
    os.kill(trial.pid(0) if what == "rank" else lab.warm.process.pid, signal.SIGTERM)
    if comes:
        time.sleep(0.3)
        trial.stop.signum = signal.SIGTERM
    verdict = trial.end()
    if comes:
        assert (verdict.status, verdict.reason) == ("interrupted", "signal SIGTERM (requeued)")
    elif what == "rank":
        assert verdict.reason.startswith("rank 0 killed by signal 15 (SIGTERM) at step ")
    else:
        assert (verdict.status, verdict.reason) == ("crashed", "the rank server ended with signal 15")
    assert trial.status["status"] == verdict.status and trial.status["reason"] == verdict.reason


def test_segfault_leaves_no_core(lab: Lab, tmp_path: Path) -> None:
    trial = lab.start(tmp_path, **LONG)
    trial.reach("train", 3)
    os.kill(trial.pid(1), signal.SIGSEGV)
    assert trial.end().reason.startswith("rank 1 killed by signal 11 (SIGSEGV) at step ")
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith("core")]
    promptly(trial)


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_is_a_hang(lab: Lab, tmp_path: Path, rank: int) -> None:
    trial = lab.start(tmp_path, launch={"hang_seconds": 2.0}, **LONG)
    trial.reach("train", 5)
    os.kill(trial.pid(rank), signal.SIGSTOP)
    verdict = trial.end()
    assert verdict.status == "timeout"
    assert verdict.reason.startswith(f"rank {rank} gave no sign of life for ") and verdict.reason.endswith(
        "stopped by a signal"
    )
    failure = trial.status["summary"]["failure"]
    assert failure["limit_s"] <= failure["quiet_s"] < failure["limit_s"] + 1  # on a busy machine a look may come late
    for r in (0, 1):
        assert "worker.py" in (trial.folder / "logs" / f"rank{r}.stack").read_text()


@pytest.mark.slow
def test_hang_limit_grows_with_the_slowest_step(lab: Lab, tmp_path: Path) -> None:
    """Both ranks are held for 0.8 s in a steady step; from then on a hang takes five times that."""
    assert config.Launch().hang_seconds == 10
    trial = lab.start(tmp_path, launch={"hang_seconds": 2.0}, **LONG)
    trial.reach("train", 5)
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            os.kill(trial.pid(rank), signum)
        time.sleep(0.8)
    slowest = max(w.slowest for w in trial.supervisor.watches.values())
    assert slowest > 0.7
    os.kill(trial.pid(0), signal.SIGSTOP)
    stopped = time.monotonic()
    assert trial.end().status == "timeout"
    failure = trial.status["summary"]["failure"]
    assert failure["limit_s"] == pytest.approx(5 * slowest)
    assert failure["limit_s"] <= failure["quiet_s"] < failure["limit_s"] + 1
    assert time.monotonic() - stopped < failure["limit_s"] + 3  # stacks of all ranks included


def test_sleeping_rank_is_told_from_its_victim(lab: Lab, tmp_path: Path) -> None:
    for reduction in ("ddp", "zero2o"):
        trial = lab.run(
            tmp_path / reduction, steps=9, fault="hang@1:4", launch={"hang_seconds": 1.5}, reduction=reduction
        )
        verdict = trial.verdict
        assert verdict is not None and verdict.status == "timeout"
        assert verdict.reason.startswith("rank 1 gave no sign of life"), verdict.reason
        assert "at step 4 (train), in _hang (faults.py:" in verdict.reason
        assert trial.status["summary"]["failure"]["step"] == 4


def test_hang_before_the_first_step_has_its_own_limit(lab: Lab, tmp_path: Path) -> None:
    trial = lab.start(tmp_path, launch={"hang_seconds": 1.0, "first_step_timeout": 4.0}, **LONG)
    os.kill(trial.pid(1), signal.SIGSTOP)
    verdict = trial.end()
    assert verdict.status == "timeout" and "rank 1 gave no sign of life for 4.0 s before" in verdict.reason


def test_timeout_of_a_point(lab: Lab, tmp_path: Path) -> None:
    trial = lab.run(tmp_path, timeout=1.5, **LONG)
    assert trial.verdict is not None and trial.verdict.status == "timeout"
    assert re.match(r"timeout=1.5 s is used up (at step \d|before the first step$)", trial.verdict.reason)
    assert 1.5 <= trial.status["summary"]["wall_s"] < 5
    assert trial.status["summary"]["device_hours_wasted"] == pytest.approx(trial.status["summary"]["wall_s"] * 2 / 3600)


def test_children_of_ranks_end_with_the_point(lab: Lab, tmp_path: Path) -> None:
    """A rank's own child, here a debugger's stand-in, must not hold the GPU after the rank is gone."""
    trial = lab.start(tmp_path, **LONG)
    trial.reach("train", 2)
    adopted = subprocess.Popen(["sleep", "600"])  # not the ranks': must live
    os.kill(trial.pid(0), signal.SIGKILL)
    trial.end()
    assert not gone(adopted.pid)
    adopted.kill()
    adopted.wait()


def test_server_killed(lab: Lab, tmp_path: Path) -> None:
    trial = lab.start(tmp_path, **LONG)
    trial.reach("train", 2)
    pids = list(trial.supervisor.pids)
    lab.warm.process.kill()
    began = time.monotonic()
    verdict = trial.end()
    assert verdict.status == "crashed" and "the rank server ended with signal 9" in verdict.reason
    wait_for("ranks end", lambda: all(gone(p) for p in pids), 5)
    assert time.monotonic() - began < 5
    again = lab.run(tmp_path / "next", steps=3)  # another server takes its place
    assert again.verdict is not None and again.verdict.status == "ok"


@pytest.mark.slow
def test_server_stopped(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that no longer answers is ended and replaced; nobody waits for it for ever."""
    lab.run(tmp_path / "before", steps=3)
    monkeypatch.setattr(starters, "ANSWER_SECONDS", 1.0)
    os.kill(lab.warm.process.pid, signal.SIGSTOP)
    verdict = lab.run(tmp_path, steps=3).verdict
    assert verdict is not None and verdict.status == "crashed"
    assert "the rank server gave no answer for 1 s" in verdict.reason
    assert lab.run(tmp_path / "next", steps=3).status["status"] == "ok"


def test_open_files_used_up(lab: Lab, tmp_path: Path) -> None:
    """The limit is set on the server, whose forks inherit it: the supervisor itself stays whole."""
    subprocess.run(["prlimit", "--pid", str(lab.warm.process.pid), "--nofile=14:1024"], check=True)
    try:
        trial = lab.run(tmp_path, steps=3)
    finally:
        subprocess.run(["prlimit", "--pid", str(lab.warm.process.pid), "--nofile=1024:1024"], check=True)
    assert trial.verdict is not None and trial.verdict.status == "crashed"
    assert "open files 14" in trial.verdict.reason, trial.verdict.reason


def test_status_is_never_half_written(lab: Lab, tmp_path: Path) -> None:
    """A reader polls status.json while points start, run and are killed: always whole, always of a known status."""
    seen = set()
    for n in range(3):
        trial = lab.start(tmp_path / str(n), **LONG)
        path = trial.folder / "status.json"
        wait_for("status.json", path.exists)
        deadline, killed = time.monotonic() + 0.8, False
        while trial.thread.is_alive():
            text = path.read_text()
            assert text.endswith("}\n"), text
            seen.add(trial.status["status"])
            if time.monotonic() > deadline and not killed:
                killed = True
                os.kill(trial.pid(n % 2), signal.SIGKILL)
        trial.end()
    assert seen <= {"running", "crashed"} and "running" in seen
