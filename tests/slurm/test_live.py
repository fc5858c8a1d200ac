"""Steps and losses of points that run in jobs, live, from the shared folder alone."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from analysis.watch import Watcher
from tests.slurm.conftest import Cli

STEP = re.compile(r"step (\d+)/100000 +loss \d+\.\d+ +[\d,.]+ tokens/s")


@pytest.mark.slow
def test_the_launcher_and_watch_show_steps_and_losses(cli: Cli) -> None:
    main, terminal = pty.openpty()
    p = subprocess.Popen(
        cli.args("launch=slurm", "nproc=1", "steps=100000", "seed=1,2", "name=live"), cwd=cli.out, stdin=terminal,
        stdout=terminal, stderr=terminal, start_new_session=True,
        env={k: v for k, v in cli.env(TERM="xterm", COLUMNS="200").items() if k != "NO_COLOR"},
    )  # fmt: skip
    cli.started.append(p)  # type: ignore[arg-type]
    os.close(terminal)
    seen, end = "", time.monotonic() + 90
    while len({int(s) for s in STEP.findall(seen)}) < 3 and time.monotonic() < end:
        if select.select([main], [], [], 1)[0]:
            seen += os.read(main, 65536).decode(errors="replace")
    assert len({int(s) for s in STEP.findall(seen)}) >= 3, seen + cli.logs()
    assert "2 running, 0 queued, 0 ended" in seen
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    os.close(main)
    alone = {k: v for k, v in cli.env(PATH="/nowhere").items() if k != "SLURM_CONF"}
    watch = [sys.executable, "-m", "analysis", "watch", "live"]
    once = subprocess.run([*watch, "--once"], cwd=cli.out, env=alone, capture_output=True, text=True)
    assert len(re.findall(r"step \d+ of 100000  loss \d+\.\d+  [\d,.]+ tokens/s", once.stdout)) == 2, once.stdout
    follow = subprocess.Popen(watch, cwd=cli.out, env=alone, stdout=subprocess.PIPE, text=True)
    cli.started.append(follow)
    cli.run("name=live", "cancel=true")
    assert follow.communicate(timeout=60)[0].splitlines()[-1] == "live: 2 of 2 points done: 2 interrupted"


@pytest.mark.parametrize(
    ("status", "queued"),
    [
        (None, True),
        ({"status": "pending", "reason": "not started: budget.hours=1 is used up"}, True),  # by a local run before
        ({"status": "pending", "job": {"id": "7_0"}}, True),  # an earlier array gave it up
        ({"status": "pending", "job": {"id": "9_0"}}, False),  # this one did
        ({"status": "interrupted", "job": {"id": "9_0"}}, False),
        ({"status": "interrupted", "job": {"id": "9_0", "requeued": "preempted"}}, True),
        ({"status": "ok", "job": {"id": "9_0"}}, False),
    ],
)
def test_which_points_a_queue_has(tmp_path: Path, status: dict[str, Any] | None, queued: bool) -> None:
    (tmp_path / "a-1").mkdir()
    jobs = [{"id": "7", "points": ["a-1"]}, {"id": "9", "points": ["a-1"]}]
    (tmp_path / "sweep.json").write_text(json.dumps({"grid": [{"folder": "a-1", "identity": "1"}], "jobs": jobs}))
    if status:
        (tmp_path / "a-1/status.json").write_text(json.dumps(status))
    assert Watcher(tmp_path).look().queued == queued


@pytest.mark.slow
def test_watch_waits_for_queued_and_requeued_points(cli: Cli) -> None:
    cli.cluster.drain()
    cli.run("nproc=1", "steps=600", "name=queued", "launch.wait=false")
    impatient = "import sys; from analysis import __main__, watch; watch.PATIENCE = 3.0; sys.exit(__main__.main())"
    watch = subprocess.Popen(
        [sys.executable, "-c", impatient, "watch", "queued", "--interval", "0.5"], cwd=cli.out, env=cli.env(),
        text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    cli.started.append(watch)
    assert watch.stdout is not None
    assert "1 pending" in watch.stdout.readline()
    time.sleep(5)  # longer than it waits for a point that nobody has queued
    assert watch.poll() is None
    cli.cluster.resume()
    cli.until(cli.training("queued", 5), "steps")
    (status,) = cli.points("queued").values()
    cli.cluster.command("scontrol", "requeue", status["job"]["raw"])
    said = watch.communicate(timeout=240)[0]
    assert said.splitlines()[-1] == "queued: 1 of 1 points done: 1 ok", said
    assert "interrupted  signal SIGTERM" in said
