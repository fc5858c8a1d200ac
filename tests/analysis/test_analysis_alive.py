"""A point that says `running` after its supervisor has been killed."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from synth import Point, write_sweep

from analysis.alive import gone
from analysis.load import load
from train.launch.scratch import process_start


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def running(pid: int, **owner: object) -> dict:
    supervisor = {"pid": pid, "host": socket.gethostname(), "started": process_start(pid)} | owner
    return {"status": "running", "supervisor": supervisor}


def test_a_living_supervisor_runs(sleeper) -> None:
    assert gone(running(sleeper.pid)) == ""


def test_a_killed_one_is_gone_before_and_after_it_is_reaped(sleeper) -> None:
    status = running(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert gone(status) == f"its supervisor (pid {sleeper.pid}) is gone"
    sleeper.wait()
    assert gone(status) == f"its supervisor (pid {sleeper.pid}) is gone"


def test_another_process_with_its_number_is_not_it(sleeper) -> None:
    assert gone(running(sleeper.pid, started=1)) != ""


@pytest.mark.parametrize("status", [{}, {"status": "running"}, {"status": "ok", "supervisor": {"pid": 1}}])
def test_what_says_nothing_of_it(status: dict) -> None:
    assert gone(status) == ""


def test_another_host_can_not_be_seen(sleeper) -> None:
    assert gone(running(sleeper.pid, host="elsewhere", started=1)) == ""


def test_the_table_says_lost(tmp_path: Path, sleeper) -> None:
    sweep = write_sweep(tmp_path / "s", [Point(status="running"), Point(micro_batch=8)])
    for file in sweep.glob("*/status.json"):
        status = json.loads(file.read_text())
        if status["status"] == "running":
            file.write_text(json.dumps(status | running(sleeper.pid, started=1)))
    points = load(sweep).points
    assert sorted(points["status"]) == ["lost", "ok"]
    assert f"its supervisor (pid {sleeper.pid}) is gone" in points["reason"].tolist()
