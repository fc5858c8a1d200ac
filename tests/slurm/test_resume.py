"""checkpoint.every on a cluster: a requeued, preempted or timed-out point goes on from its newest complete checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cli
from tests.slurm.test_jobs import attempts, steps
from train import saved

pytestmark = pytest.mark.slow
POINT = ("nproc=1", "steps=600", "checkpoint.every=50")


def rows(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step: equal bits mean equal weights."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in lines}


@pytest.mark.parametrize("how", ["requeue", "preempted"])
def test_a_point_resumes_and_appends_nothing(cli: Cli, how: str) -> None:
    p = cli.start(*POINT, "name=resumed", "launch.cpus=4", "launch.partition=main")
    folder = cli.until(cli.training("resumed", 60), "steps")
    cli.until(lambda: saved.steps_done(folder), "a checkpoint")
    if how == "requeue":
        cli.cluster.command("scontrol", "requeue", json.loads((folder / "status.json").read_text())["job"]["raw"])
    else:
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
        cli.cluster.command("sbatch", *urgent)
    cli.until(lambda: cli.states("resumed") == ["interrupted"] or attempts(folder), "the end of the first attempt")
    text = p.communicate(timeout=240)[0]
    assert p.returncode == 0, text + cli.logs()
    (status,) = cli.points("resumed").values()
    resumed = status["summary"]["checkpoint"]["resumed_from"]
    assert (status["status"], status["attempt"], status["job"]["restart"]) == ("ok", 2, 1)
    assert resumed >= 50 and resumed % 50 == 0
    assert steps(folder) == list(range(resumed, 600))
    (first,) = attempts(folder)
    assert first["status"] == "interrupted" and first["job"]["requeued"]
    old = rows(folder / "attempts/1")
    assert list(old) == list(range(len(old))) and len(old) >= resumed
    if how == "requeue":
        end = min(resumed + 100, 600)  # where it went on is what could differ, and not by when it was to end
        cli.local("nproc=1", f"steps={end}", "name=here")
        (here,) = (cli.out / "here").glob("*/metrics.jsonl")
        assert {s: r for s, r in rows(folder).items() if s < end} == {
            s: r for s, r in rows(here.parent).items() if s >= resumed
        }


def test_a_point_that_saved_something_outlives_its_time_limit(cli: Cli) -> None:
    """With a limit of one minute every USR2 is the limit's. Nothing new saved, or no requeue left: timeout."""
    args = ("nproc=1", "steps=1000000", "checkpoint.every=50", "name=limit", "launch.time=1", "launch.signal_seconds=1")
    p = cli.start(*args, "launch.requeues=2")
    folder = cli.until(cli.training("limit", 60), "steps")

    def signalled(restart: int) -> None:
        def trains() -> Any:
            (status,) = cli.points("limit").values()
            running = status["status"] == "running" and status["job"]["restart"] == restart
            return status if running and (folder / "metrics.jsonl").exists() else None

        status = cli.until(trains, f"start {restart}", 120)
        before = saved.steps_done(folder) if restart else 0
        cli.until(lambda: saved.steps_done(folder) > before, "a newer checkpoint")
        cli.cluster.command("scancel", "--signal=USR2", status["job"]["raw"])

    for restart in range(3):
        signalled(restart)
    text = p.communicate(timeout=120)[0]
    (status,) = cli.points("limit").values()
    assert p.returncode == 1 and status["status"] == "timeout", text + cli.logs()
    first, second = attempts(folder)
    assert [first["status"], second["status"]] == ["interrupted"] * 2
    assert first["reason"].startswith("launch.time=1 is used up; goes on after step ")
    assert steps(folder / "attempts/2")[0] >= 50 and steps(folder)[0] > steps(folder / "attempts/2")[0]
