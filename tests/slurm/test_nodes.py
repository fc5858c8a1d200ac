"""Points over two nodes when something breaks on one of them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slurm.conftest import Cli
from tests.slurm.test_jobs import attempts, steps

TWO = ("nproc=2", "launch.nodes=2", "launch.cpus=1")


def node(folder: Path, n: int) -> dict[str, Any]:
    return json.loads((folder / f"nodes/{n}.json").read_text())


def rank_pids(supervisor: int) -> list[int]:
    return [p.pid for p in psutil.Process(supervisor).children(recursive=True)]


def test_a_rank_killed_on_the_other_node(cli: Cli) -> None:
    p = cli.start(*TWO, "steps=100000", "name=killed")
    folder = cli.until(cli.training("killed"), "steps")
    (victim,) = rank_pids(node(folder, 1)["pid"])
    others = rank_pids(node(folder, 0)["pid"])
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    text = p.communicate(timeout=120)[0]
    assert p.returncode == 1
    (status,) = cli.points("killed").values()
    assert status["status"] == "crashed", text + cli.logs()
    assert status["reason"].startswith("rank 1 killed by signal 9"), status["reason"]
    assert [r["rank"] for r in status["ranks"]] == [0, 1]
    assert not any(psutil.pid_exists(o) for o in others)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_the_other_nodes_supervisor_killed(cli: Cli) -> None:
    """Its ranks die with it, node 0 sees them go; the job is requeued, the point starts again."""
    p = cli.start(*TWO, "steps=400", "name=lost")
    folder = cli.until(cli.training("lost"), "steps")
    os.kill(node(folder, 1)["pid"], signal.SIGKILL)
    text = p.communicate(timeout=240)[0]
    (status,) = cli.points("lost").values()
    assert status["status"] == "ok" and status["attempt"] == 2, text + cli.logs()
    assert attempts(folder)[0]["status"] == "lost", attempts(folder)
    assert p.returncode == 0 and steps(folder) == list(range(400))


@pytest.mark.slow
def test_the_other_nodes_rank_server_killed(cli: Cli) -> None:
    """Node 0 hears why, and doesn't take the silence for a lost node."""
    p = cli.start(*TWO, "steps=100000", "seed=1,2", "launch.points_per_job=2", "name=server")
    folder = cli.until(cli.training("server"), "steps")
    children = psutil.Process(node(folder, 1)["pid"]).children()
    (server,) = [child for child in children if "train.launch.server" in child.cmdline()]
    server.kill()
    cli.until(lambda: "crashed" in cli.states("server"), "end of the point", 15)
    status = json.loads((folder / "status.json").read_text())
    assert status["reason"] == "the rank server ended with signal 9", status["reason"]
    cli.run("name=server", "cancel=true")
    p.communicate(timeout=60)


@pytest.mark.slow
def test_a_node_whose_daemon_dies(cli: Cli) -> None:
    """slurmd of n2 killed and its step with it: SLURM sees it after SlurmdTimeout, we after 20 s of silence."""
    p = cli.start(*TWO, "steps=100000", "name=down")
    folder = cli.until(cli.training("down"), "steps")
    ours = rank_pids(node(folder, 0)["pid"])
    theirs = psutil.Process(node(folder, 1)["pid"])
    step = theirs.parent()
    assert step is not None
    began = time.monotonic()
    cli.cluster.kill("n2")
    step.kill()
    for child in [*theirs.children(recursive=True), theirs]:
        child.kill()
    cli.until(lambda: not any(psutil.pid_exists(o) for o in ours), "end of the ranks on n1", 30)
    assert time.monotonic() - began < 30
    cli.until(lambda: attempts(folder) or cli.states("down") == ["lost"], "end of the attempt", 60)
    cli.cluster.start_node("n2")
    cli.until(lambda: attempts(folder), "a second attempt", 120)
    assert attempts(folder)[0]["status"] == "lost"
    cli.run("name=down", "cancel=true")
    p.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("requeues", [1, 0])
def test_a_node_set_down(cli: Cli, requeues: int) -> None:
    """SLURM ends the job on both nodes and requeues it; launch.requeues says how often the point is tried again."""
    p = cli.start(*TWO, "steps=600", "name=set", f"launch.requeues={requeues}")
    folder = cli.until(cli.training("set"), "steps")
    ours = rank_pids(node(folder, 0)["pid"])
    cli.cluster.command("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    cli.until(lambda: not any(psutil.pid_exists(o) for o in ours), "end of the ranks on n1", 30)
    cli.until(lambda: cli.states("set") != ["running"] or attempts(folder), "a status", 30)
    cli.cluster.resume()
    text = p.communicate(timeout=240)[0]
    (status,) = cli.points("set").values()
    if requeues:
        assert p.returncode == 0 and status["status"] == "ok" and status["attempt"] == 2, text + cli.logs()
        (status,) = attempts(folder)
    else:
        assert p.returncode == 1 and not attempts(folder), text + cli.logs()
    assert (status["status"], status["reason"]) == ("lost", "node n2 is down")


@pytest.mark.slow
def test_the_controller_restarts(cli: Cli) -> None:
    p = cli.start(*TWO, "steps=300", "name=controller")
    folder = cli.until(cli.training("controller"), "steps")
    cli.cluster.kill("slurmctld")
    time.sleep(6)
    cli.cluster.start_controller()
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 0 and cli.states("controller") == ["ok"], text + cli.logs()
    assert steps(folder) == list(range(300)) and not attempts(folder)


def test_no_daemon_is_left(tmp_path: Path) -> None:
    from tests.slurm.cluster import Cluster
    from tests.slurm.conftest import why_not

    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path / "c") as cluster:
        assert cluster.ready() and len(cluster.processes()) >= 4
        subprocess.run(
            ["sbatch", "--output=/dev/null", "--wrap=sleep 100"], env=cluster.env(), check=True, cwd=tmp_path
        )
        cluster.wait(lambda: cluster.jobs(), "job")
    assert not [p for p in cluster.processes() if p.status() != psutil.STATUS_ZOMBIE]
