"""A cluster with accounting (slurmdbd on MariaDB): sacct answers, and accounts are enforced."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import ACCOUNTING_PROGRAMS, Cluster, missing, names_resolve
from tests.slurm.conftest import Cli, why_not
from train.launch.slurm import queue

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    if lacking := missing(ACCOUNTING_PROGRAMS):
        assert os.environ.get("CI") != "true", f"CI needs slurmdbd and mariadb-server: {lacking} missing"
        pytest.skip(f"apt-get install slurmdbd mariadb-server: {', '.join(lacking)} missing")
    folder = tmp_path_factory.mktemp("accounted") / "c"
    with names_resolve(), Cluster(folder, more="MinJobAge=2", accounting=True) as cluster:
        yield cluster


@pytest.fixture
def cli(accounted: Cluster, tmp_path: Path) -> Iterator[Cli]:
    accounted.clear()
    it = Cli(accounted, tmp_path)
    yield it
    accounted.clear()
    it.stop()


def test_a_bad_account_is_refused(cli: Cli) -> None:
    text = cli.run("name=bad", "launch.account=nosuch", code=2)
    assert text.count("\n") == 1 and "launch.account=nosuch: SLURM refuses it: Invalid account" in text
    assert not (cli.out / "bad").exists()


def test_sacct_says_how_jobs_ended_that_the_queue_has_forgotten(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("nproc=1", "seed=1,2", "steps=100000", "name=told", "launch.account=team", "launch.array_parallelism=1")
    cli.run(*args, "launch.wait=false")
    folder = cli.until(cli.training("told"), "steps")
    (running,) = (s for s in cli.points("told").values() if s["status"] == "running")
    array = running["job"]["id"].split("_")[0]
    other = f"{array}_{1 - int(running['job']['id'].split('_')[1])}"
    cli.cluster.command("scancel", other)  # while it waits
    os.kill(running["supervisor"]["pid"], signal.SIGKILL)
    forgotten = ("squeue", "-h", "-r", "--states=all", "-o", "%i")
    cli.until(lambda: not cli.cluster.command(*forgotten).split(), "an empty queue")
    for key, value in cli.cluster.env().items():
        if os.environ.get(key) != value:
            monkeypatch.setenv(key, value)
    names = dict.fromkeys((running["job"]["id"], other), f"mfu-told-{running['job']['token'][:6]}")
    states = cli.until(lambda: len(s := queue.ended(names)) == 2 and s, "sacct's answer")
    assert states[other] == "CANCELLED" and states[running["job"]["id"]] in ("COMPLETED", "FAILED"), states
    assert queue.ended(dict.fromkeys(names, "another-name")) == {}
    text = cli.run("name=told", "cancel=true")
    assert "0 queued or running tasks cancelled" in text
    points = cli.points("told")
    lost = points.pop(folder.name)
    (cancelled,) = points.values()
    assert (lost["status"], cancelled["status"]) == ("lost", "interrupted")
    assert cancelled["reason"] == "the job was cancelled before the point started"
    assert lost["reason"].startswith("the job is ") and states[running["job"]["id"]] in lost["reason"]
