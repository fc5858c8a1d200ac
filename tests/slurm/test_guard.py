"""One sweep, this machine and the cluster: points that jobs have do not run here as well, nor the other way round."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.conftest import Cli
from tests.slurm.test_jobs import attempts

SHORT = ("nproc=1", "seed=1,2", "name=both")


def here(cli: Cli, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cli.args("launch=local", *args), env=cli.env(**more), cwd=cli.out, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_what_jobs_have_is_refused_here(cli: Cli, tmp_path: Path) -> None:
    cli.cluster.drain()
    cli.run(*SHORT, "launch.wait=false")
    before = {p: p.read_bytes() for p in (cli.out / "both").rglob("*.json")}
    refused = here(cli, *SHORT)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "launch=local: 2 of its points are queued or running as SLURM job" in line and "cancel=true" in line
    blind = here(cli, *SHORT, PATH="/nowhere")  # a machine that sees the folder and has no squeue
    assert blind.returncode == 2 and len(blind.stderr.splitlines()) == 1
    assert "2 of its points were submitted to SLURM and may still be there (squeue is not in PATH)" in blind.stderr
    assert before == {p: p.read_bytes() for p in (cli.out / "both").rglob("*.json")}
    assert here(cli, "nproc=1", "seed=3", "name=both").returncode == 0  # a point that no job has
    cli.run("name=both", "cancel=true")
    done = here(cli, *SHORT, PATH="/nowhere")
    assert done.returncode == 0, done.stdout + done.stderr
    assert cli.states("both") == ["ok"] * 3
    assert not cli.cluster.jobs()


@pytest.mark.slow
def test_what_runs_in_a_job_is_refused_here(cli: Cli) -> None:
    args = ("nproc=1", "steps=1000000", "name=running")
    p = cli.start(*args)
    folder = cli.until(cli.training("running"), "steps")
    os.killpg(p.pid, signal.SIGKILL)  # its lock on the sweep is free now
    p.communicate()
    refused = here(cli, *args)
    assert refused.returncode == 2 and "1 of its points are queued or running" in refused.stderr, refused.stdout
    assert cli.states("running") == ["running"] and not attempts(folder)
    cli.run("name=running", "cancel=true")
    assert cli.states("running") == ["interrupted"]


@pytest.mark.slow
def test_what_runs_here_is_waited_for(cli: Cli) -> None:
    args = ("nproc=1", "steps=1000000", "name=local")
    p = subprocess.Popen(
        cli.args("launch=local", *args), env=cli.env(), cwd=cli.out, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    cli.started.append(p)
    folder = cli.until(cli.training("local"), "steps")
    waiting = cli.start(*args)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "waiting: sweep local is in use by another command\n"
    time.sleep(2)
    assert waiting.poll() is None and not (cli.out / "local/.sweep/slurm").exists()
    assert cli.states("local") == ["running"] and not attempts(folder)
