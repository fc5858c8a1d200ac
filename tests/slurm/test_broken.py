"""Submission, software on the nodes and endings that break: shared reality of clusters, on a real one."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.conftest import ROOT, Cli
from tests.slurm.test_jobs import attempts
from train.launch.slurm import files

LONG = ("nproc=1", "steps=4000")


# ---- submission ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_controller_that_is_away_for_seconds_is_waited_for(cli: Cli) -> None:
    hasty = cli.out / "slurm.conf"  # sbatch itself tries for MessageTimeout, twice, before it says a word
    hasty.write_text(cli.cluster.conf.read_text().replace("MessageTimeout=30", "MessageTimeout=5"))
    cli.cluster.kill("slurmctld")
    p = cli.start("nproc=1", "name=away", SLURM_CONF=str(hasty))
    assert p.stdout is not None
    said = p.stdout.readline()
    assert said.startswith("sbatch: Unable to contact slurm controller") and "trying again in 1 s" in said
    cli.cluster.start_controller()
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 0, text
    assert cli.states("away") == ["ok"]


@pytest.mark.slow
def test_a_launcher_killed_at_random_moments_while_it_submits(cli: Cli) -> None:
    """33 points are three arrays here. Whenever it dies, sbatch with it or not, the next command submits what is missing."""
    cli.cluster.drain()
    args = ("nproc=1", "seed=range(33)", "name=storm", "launch.wait=false")
    moments, kills = random.Random(6), 0
    root = cli.out / "storm/.sweep/slurm"
    while True:
        before = set(root.glob("*"))
        p = cli.start(*args)
        while p.poll() is None and set(root.glob("*")) == before:
            time.sleep(0.002)
        # first too short for more than one array, so that three kills are sure; longer each time, so that an sbatch on a busy
        # machine gets there too
        time.sleep(moments.uniform(0, 0.02 * 1.2**kills))
        if p.poll() is not None:
            break
        if kills % 2:
            os.killpg(p.pid, signal.SIGKILL)
        else:
            p.kill()  # an sbatch that it has started lives on
        kills += 1
        p.communicate()
    time.sleep(2)
    text = cli.run(*args)
    assert kills >= 3 and "33 found in the queue" in text, text
    folders = []
    for tasks in root.glob("*/tasks.json"):
        told = files.Submission.load(tasks.parent)
        ids = cli.cluster.command("squeue", "-h", "-r", f"--name={told.name}", "-o", "%K").split()
        folders += [told.tasks[int(i)][0].folder for i in ids]
    assert sorted(folders) == sorted(cli.points("storm")), "every point is queued exactly once"
    cli.run("name=storm", "cancel=true")
    assert cli.states("storm") == ["interrupted"] * 33


@pytest.mark.slow
def test_two_launchers_of_one_sweep_at_once(cli: Cli) -> None:
    args = ("nproc=1", "seed=1,2", "name=twice")
    both = [cli.start(*args), cli.start(*args)]
    said = [p.communicate(timeout=240)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert cli.states("twice") == ["ok", "ok"]
    assert all(s["attempt"] == 1 for s in cli.points("twice").values())
    assert len(json.loads((cli.out / "twice/sweep.json").read_text())["jobs"]) == 1
    assert sum("submitted: array" in text for text in said) == 1


# ---- software on the nodes ---------------------------------------------------------------------------------------------


def other_torch(folder: Path) -> Path:
    """A folder that, in PYTHONPATH, makes the environment one with torch 9.9.9."""
    (folder / "torch-9.9.9.dist-info").mkdir(parents=True)
    (folder / "torch-9.9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    return folder


@pytest.mark.slow
def test_another_torch_in_the_job_is_refused(cli: Cli, tmp_path: Path) -> None:
    elsewhere = other_torch(tmp_path / "elsewhere")
    args = ("nproc=1", "name=torch")
    text = cli.run(*args, f"launch.setup=['export PYTHONPATH={elsewhere}']", code=1)
    (status,) = cli.points("torch").values()
    assert status["status"] == "crashed", text + cli.logs()
    assert status["reason"].startswith("infrastructure: torch 9.9.9, submitted with ") and "(on n" in status["reason"]
    assert not status["ranks"] and not list((cli.out / "torch").glob("*/metrics.jsonl"))
    cli.run(*args)  # with the right one
    assert cli.states("torch") == ["ok"]


@pytest.mark.slow
def test_another_torch_on_the_second_node_is_refused(cli: Cli, tmp_path: Path) -> None:
    elsewhere = other_torch(tmp_path / "elsewhere")
    script = (ROOT / "src/train/launch/slurm/default.sbatch.j2").read_text()
    on_node_1 = f"""bash -c 'test $SLURM_NODEID = 0 || export PYTHONPATH=$PYTHONPATH:{elsewhere}; exec "$@"' x """
    (cli.out / "mine.j2").write_text(script.replace("  {{ python }} -m", "  " + on_node_1 + "{{ python }} -m"))
    args = ("nproc=2", "launch.nodes=2", "launch.cpus=1", "launch.template=mine.j2", "name=second")
    text = cli.run(*args, code=1)
    (status,) = cli.points("second").values()
    assert status["status"] == "crashed", text + cli.logs()
    assert status["reason"].startswith("infrastructure: torch 9.9.9, submitted with "), status["reason"]
    assert status["reason"].endswith("(on n2)")


@pytest.mark.slow
def test_an_interpreter_without_our_packages_is_infrastructure(cli: Cli, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    text = cli.run("nproc=1", "name=bare", f"launch.python={shlex.quote(str(tmp_path / 'bare/bin/python'))}", code=1)
    (status,) = cli.points("bare").values()
    assert status["status"] == "crashed", text
    assert status["reason"].startswith("infrastructure: ") and "No module named" in status["reason"]


@pytest.mark.slow
def test_different_crashes_do_not_stop_the_sweep(cli: Cli) -> None:
    faults = "exception@0:1,segv@0:1,exit@0:1,nan@0:1"
    text = cli.run("nproc=1", f"fault={faults}", "name=mixed", "launch.array_parallelism=1", code=1)
    assert cli.states("mixed") == ["crashed"] * 4 and "stopped:" not in text, text


# ---- endings -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_whole_array_cancelled_from_outside(cli: Cli, when: str) -> None:
    if when == "waiting":
        cli.cluster.drain()
    p = cli.start(*LONG, "seed=1,2,3", "name=outside", "launch.array_parallelism=1")
    # all of it: where no node can start a job, the launcher tries a held one first
    cli.until(lambda: len(cli.cluster.jobs()) == 3, "array")
    if when == "running":
        cli.until(cli.training("outside"), "steps")
    cli.cluster.command("scancel", cli.cluster.jobs()[0].split("_")[0])
    text = p.communicate(timeout=60)[0]
    assert p.returncode == 1 and cli.states("outside") == ["interrupted"] * 3, text + cli.logs()
    reasons = {s["reason"] for s in cli.points("outside").values()}
    never = "the job was cancelled before the point started"
    assert reasons == ({never} if when == "waiting" else {never, "signal SIGTERM"})
    assert not any(attempts(f) for f in (cli.out / "outside").glob("*-*"))


@pytest.mark.slow
def test_an_end_without_a_word_is_seen_within_15_seconds(cli: Cli) -> None:
    """There is no accounting here: files and squeue alone. Supervisor and rank are gone, so no status is written."""
    p = cli.start("nproc=1", "steps=1000000", "name=silent")
    folder = cli.until(cli.training("silent"), "steps")
    status = json.loads((folder / "status.json").read_text())
    os.kill(status["supervisor"]["pid"], signal.SIGKILL)
    job = status["job"]["id"]
    ask = ("squeue", "-h", "-r", "--states=RUNNING,COMPLETING,PENDING", "-o", "%i")
    cli.until(lambda: job not in cli.cluster.command(*ask).split(), "end of the job")
    ended = time.monotonic()
    cli.until(lambda: cli.states("silent") == ["lost"], "status of the point", 15)
    assert time.monotonic() - ended < 15
    text = p.communicate(timeout=60)[0]
    (status,) = cli.points("silent").values()
    assert p.returncode == 1 and "ended without a word" in status["reason"], text
