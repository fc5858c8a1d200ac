"""Jobs that are submitted and left, adopted, cancelled, requeued, preempted, out of time: on a real SLURM."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import ROOT, Cli

#: a point that is long enough to be hit in its steps, on one rank
LONG = ("nproc=1", "steps=4000")


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def attempts(folder: Path) -> list[dict[str, Any]]:
    """status.json of earlier attempts."""
    return [json.loads(f.read_text()) for f in sorted(folder.glob("attempts/*/status.json"))]


def test_dry_run_submits_nothing(cli: Cli) -> None:
    text = cli.run(
        "nproc=2,4,8", "seed=range(7)", "name=dry", "launch.dry_run=true", "launch.time=1:30:00",
        "launch.exclude=n[2]", "launch.sbatch.mail_type=END,FAIL",
    )  # fmt: skip
    assert "21 points in 2 arrays" in text and "nothing was submitted" in text
    scripts = sorted((cli.out / "dry/.sweep/dry-run").glob("*/submission.sh"))
    assert len(scripts) == 2
    for line in ("--nodes=1", "--exclude='n[2]'", "--mail-type=END,FAIL", "--time=1:30:00"):
        assert all(f"#SBATCH {line}\n" in s.read_text() for s in scripts)
    assert len(cli.points("dry")) == 21 and cli.states("dry") == ["pending"] * 21
    assert not cli.cluster.jobs()
    text = cli.run(
        "device=cuda",
        "nproc=8,16",
        "name=gpus",
        "launch.dry_run=true",
        "launch.gpus_per_node=8",
        "launch.time=90",
        code=2,
    )
    assert "SLURM refuses it" in text  # this cluster has no GPUs, and says so


@pytest.mark.slow
def test_dry_run_of_1200_points(cli: Cli) -> None:
    text = cli.run("nproc=1", "seed=range(1200)", "name=many", "launch.dry_run=true", timeout=600)
    assert "1200 points in 110 arrays" in text  # MaxArraySize=11
    assert len(list((cli.out / "many/.sweep/dry-run").glob("*/submission.sh"))) == 110


@pytest.mark.slow
def test_an_array_above_max_array_size_is_chunked(cli: Cli) -> None:
    """25 points are queued in three arrays; each array's first and last run, to show which point a task is."""
    cli.cluster.drain()
    p = cli.start("nproc=1", "seed=range(25)", "name=chunks")
    cli.until(lambda: len(cli.cluster.jobs()) == 25, "25 tasks", 150)
    cli.until(lambda: len(json.loads((cli.out / "chunks/sweep.json").read_text())["jobs"]) == 3, "three arrays")
    arrays = json.loads((cli.out / "chunks/sweep.json").read_text())["jobs"]
    assert sorted(len(a["points"]) for a in arrays) == [3, 11, 11]
    inner = [f"{a['id']}_{i}" for a in arrays for i in range(1, len(a["points"]) - 1)]
    cli.cluster.command("scancel", *inner)
    cli.cluster.resume()
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 1 and text.count("submitted: array") == 3, text + cli.logs()
    found = cli.points("chunks")
    assert len(found) == 25
    for array in arrays:
        states = [found[folder]["status"] for folder in array["points"]]
        assert states == ["ok", *["interrupted"] * (len(states) - 2), "ok"], text + cli.logs()
        for index in (0, len(states) - 1):
            assert found[array["points"][index]]["job"]["id"] == f"{array['id']}_{index}"


def test_bad_input_writes_nothing(cli: Cli) -> None:
    text = cli.run("name=bad", "launch.partition=nosuch", code=2)
    assert (
        text.count("\n") == 1 and "launch.partition=nosuch" in text and "partition" in text.partition("refuses it")[2]
    )
    assert not (cli.out / "bad").exists()
    (cli.out / "t.j2").write_text("#!/bin/sh\n{{ nodess }}\n")
    text = cli.run("name=bad", "launch.template=t.j2", code=2)
    assert "launch.template=t.j2" in text and "nodess" in text
    swept = subprocess.run(
        cli.args("launch=local,slurm", "name=bad"), env=cli.env(), cwd=cli.out, text=True, capture_output=True
    )
    assert swept.returncode == 2 and "launch=local,slurm: belongs to the whole sweep" in swept.stderr
    assert "hydra.launcher.nodes=2" in cli.run("hydra.launcher.nodes=2", "name=bad", code=2)
    assert "name=bad" in cli.run("name=bad", "cancel=true", code=2)
    assert not (cli.out / "bad").exists()


def test_submitted_and_left_is_found_again(cli: Cli) -> None:
    cli.cluster.drain()
    try:
        args = ("nproc=1", "seed=1,2", "name=left")
        text = cli.run(*args, "launch.wait=false")
        assert "submitted: array" in text and len(cli.cluster.jobs()) == 2
        (submission,) = (cli.out / "left/.sweep/slurm").glob("*")
        # as if the launcher had been killed between sbatch and its answer
        (submission / "job.json").unlink()
        sweep = cli.out / "left/sweep.json"
        sweep.write_text(json.dumps({**json.loads(sweep.read_text()), "jobs": []}))
        again = cli.start(*args)
        cli.until(lambda: (submission / "job.json").exists(), "adoption")
        time.sleep(1)
        assert len(cli.cluster.jobs()) == 2
        os.killpg(again.pid, signal.SIGKILL)
        assert "2 found in the queue" in again.communicate()[0]
        again = cli.start(*args)
        assert again.stdout is not None
        cli.until(lambda: "2 found in the queue" in again.stdout.readline(), "second adoption")
        os.kill(again.pid, signal.SIGINT)
        text = again.communicate(timeout=60)[0]
        assert again.returncode == 130 and "2 points stay in the queue" in text
        assert len(cli.cluster.jobs()) == 2
    finally:
        cli.cluster.resume()
    text = cli.run(*args)
    assert cli.states("left") == ["ok", "ok"], text + cli.logs()
    jobs = json.loads(sweep.read_text())["jobs"]
    assert len(jobs) == 1 and len(jobs[0]["points"]) == 2
    text = cli.run(*args)
    assert "2 kept" in text and "submitted" not in text


def test_cancel_and_rerun(cli: Cli) -> None:
    args = (*LONG, "seed=1,2,3", "name=cancelled", "launch.array_parallelism=1")
    waiting = cli.start(*args)
    cli.until(cli.training("cancelled"), "steps")
    began = time.monotonic()
    text = cli.run("name=cancelled", "cancel=true")
    assert "3 queued or running tasks cancelled" in text
    assert not cli.cluster.jobs()
    assert cli.states("cancelled") == ["interrupted"] * 3
    text = waiting.communicate(timeout=60)[0]
    assert time.monotonic() - began < 60 and waiting.returncode == 1
    cli.run(*(a if "steps" not in a else "steps=4000" for a in args), "launch.wait=false")
    assert len(cli.cluster.jobs()) == 3


@pytest.mark.slow
def test_one_task_cancelled_while_it_waits_and_one_while_it_runs(cli: Cli) -> None:
    args = ("nproc=1", "steps=400", "seed=1,2,3", "name=tasks", "launch.array_parallelism=1")
    p = cli.start(*args)
    folder = cli.until(cli.training("tasks"), "steps")
    running = json.loads((folder / "status.json").read_text())["job"]["id"]
    array, index = running.split("_")
    cli.cluster.command("scancel", running, f"{array}_{int(index) + 1}")
    text = p.communicate(timeout=200)[0]
    assert p.returncode == 1, text
    assert sorted(cli.states("tasks")) == ["interrupted", "interrupted", "ok"], text + cli.logs()
    before = {n: s for n, s in cli.points("tasks").items() if s["status"] == "ok"}
    text = cli.run(*args)
    assert "1 kept" in text and cli.states("tasks") == ["ok"] * 3
    after = cli.points("tasks")
    assert all(after[n] == s for n, s in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["requeue", "usr2"])
def test_a_requeued_point_starts_a_new_attempt(cli: Cli, how: str, tmp_path: Path) -> None:
    """The job that is requeued from outside can't ask SLURM what the signal means: its next start records it."""
    silent = tmp_path / "scontrol"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    setup = [f"launch.setup=['export PATH={tmp_path}:$PATH']"] if how == "requeue" else []
    p = cli.start("nproc=1", "steps=400", "name=again", *setup)
    folder = cli.until(cli.training("again", 5), "steps")
    job = json.loads((folder / "status.json").read_text())["job"]["raw"]
    if how == "requeue":
        cli.cluster.command("scontrol", "requeue", job)
    else:
        cli.cluster.command("scancel", "--signal=USR2", job)
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 0, text + cli.logs()
    (status,) = cli.points("again").values()
    assert status["status"] == "ok" and status["attempt"] == 2 and status["job"]["restart"] == 1
    assert steps(folder) == list(range(400))
    (first,) = attempts(folder)
    assert first["status"] == "interrupted"
    assert first["job"]["requeued"] == ("signal SIGTERM" if how == "requeue" else "SIGUSR2")
    old = (folder / "attempts/1/metrics.jsonl").read_text()
    assert 5 <= old.count("\n") < 400


@pytest.mark.slow
def test_an_attempt_whose_supervisor_was_killed_stays_lost_when_its_job_runs_again(cli: Cli) -> None:
    cli.run("nproc=1", "steps=400", "name=silent", "launch.wait=false")
    folder = cli.until(cli.training("silent", 5), "steps")
    status = json.loads((folder / "status.json").read_text())
    os.kill(status["supervisor"]["pid"], signal.SIGKILL)
    cli.until(lambda: not cli.cluster.jobs(), "end of the job")
    cli.cluster.command("scontrol", "requeue", status["job"]["raw"])
    cli.until(lambda: cli.states("silent") == ["ok"], "second attempt", 120)
    (first,) = attempts(folder)
    assert (first["status"], first["reason"]) == ("lost", "the supervisor ended without a word")


@pytest.mark.slow
def test_a_packed_point_without_time_left_is_requeued(cli: Cli) -> None:
    """With a limit of one minute every USR2 is the limit's: the second point had only what the first had left of it."""
    p = cli.start(
        "nproc=1", "steps=3,20000", "name=packed", "launch.time=1", "launch.signal_seconds=1", "launch.points_per_job=2"
    )
    (long,) = cli.until(lambda: [f for f in (cli.out / "packed").glob("steps-20000*") if f.is_dir()], "folders")

    def trains(restart: int) -> dict[str, Any]:
        def look() -> Any:
            status = cli.points("packed")[long.name]
            if (
                status["status"] == "running"
                and status["job"]["restart"] == restart
                and (long / "metrics.jsonl").exists()
            ):
                return status
            return None

        return cli.until(look, f"the long point in start {restart}", 120)

    cli.cluster.command("scancel", "--signal=USR2", trains(0)["job"]["raw"])
    cli.cluster.command("scancel", "--signal=USR2", trains(1)["job"]["raw"])
    text = p.communicate(timeout=120)[0]
    assert p.returncode == 1
    assert sorted(cli.states("packed")) == ["ok", "timeout"], text + cli.logs()
    (first,) = attempts(long)
    assert first["status"] == "interrupted" and "by 1 points before it" in first["reason"]
    short = next(s for n, s in cli.points("packed").items() if n != long.name)
    assert short["attempt"] == 1 and short["job"]["restart"] == 0


@pytest.mark.slow
def test_preemption(cli: Cli) -> None:
    p = cli.start("nproc=1", "steps=1500", "name=preempted", "launch.cpus=4", "launch.partition=main")
    folder = cli.until(cli.training("preempted", 5), "steps")
    cli.cluster.command(
        "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    )
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 0, text + cli.logs()
    (status,) = cli.points("preempted").values()
    assert status["status"] == "ok" and status["attempt"] == 2
    assert attempts(folder)[0]["status"] == "interrupted"
    assert steps(folder) == list(range(1500))


@pytest.mark.slow
def test_the_time_limit(cli: Cli) -> None:
    """The shortest limit is a minute; USR2 comes 45 s before it, or up to a minute earlier."""
    text = cli.run("nproc=1", "steps=1000000", "name=late", "launch.time=1", "launch.signal_seconds=45", code=1)
    (status,) = cli.points("late").values()
    assert status["status"] == "timeout" and "launch.time=1" in status["reason"], text + cli.logs()


def test_python_missing_on_the_node_is_infrastructure(cli: Cli) -> None:
    text = cli.run("nproc=1", "name=nopython", "launch.python=/no/such/python", code=1)
    (status,) = cli.points("nopython").values()
    assert status["status"] == "crashed" and status["reason"].startswith("infrastructure: "), text
    assert "/no/such/python" in status["reason"]


def test_the_snapshot_runs_whatever_happens_to_the_checkout(cli: Cli, tmp_path: Path) -> None:
    checkout = tmp_path / "check out"
    for part in ("src", "conf", "sweeps", "analysis"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    cli.cluster.drain()
    path = f"{checkout}/src:{checkout}"
    env = {**cli.env(), "PYTHONPATH": path}
    submit = [*cli.args("launch=slurm", "nproc=1", "name=edited", "launch.wait=false")]
    done = subprocess.run(submit, env=env, cwd=cli.out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    worker = checkout / "src/train/worker.py"
    worker.write_text("raise SystemExit('edited while the job waited')\n")
    (checkout / "src/train/launch/slurm/job.py").unlink()
    (checkout / "conf/train.yaml").write_text("steps: 1\n")
    cli.cluster.resume()
    cli.until(lambda: cli.states("edited") == ["ok"], "point trained by the snapshot", 150)


@pytest.mark.slow
def test_three_identical_crashes_stop_the_sweep(cli: Cli) -> None:
    text = cli.run(
        "nproc=1",
        "seed=range(30)",
        "name=crashes",
        "launch.python=/no/such/python",
        "launch.array_parallelism=1",
        code=1,
    )
    states = cli.states("crashes")
    assert states.count("crashed") >= 3 and "pending" in states, text
    reasons = {s["reason"] for s in cli.points("crashes").values() if s["status"] == "pending"}
    assert all(r.startswith("not started: 3 identical crashes in a row") for r in reasons), reasons
    assert "max_failures" in text and not cli.cluster.jobs()
