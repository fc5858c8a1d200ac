"""The six-point sweep on the cluster, and as it runs on this machine."""

import json
from pathlib import Path

import pytest

from tests.slurm.conftest import Cli

GRID = ("reduction=zero2o,zero2", "micro_batch=2,4,6", "nproc=2")


def losses(sweep: Path) -> dict[str, list[tuple[float, float]]]:
    """(loss, gradient norm) of every step by point: equal bits mean equal weights all along."""
    out = {}
    for f in sorted(sweep.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in f.read_text().splitlines()]
        out[f.parent.name] = [(r["loss"], r["grad_norm"]) for r in rows]
    return out


def test_six_points_on_one_node_and_on_two(cli: Cli) -> None:
    text = cli.run(*GRID, "name=two", "launch.nodes=2", "launch.cpus=1", "launch.points_per_job=3")
    assert cli.states("two") == ["ok"] * 6, text + cli.logs()
    assert "submitted: array" in text
    for point, status in cli.points("two").items():
        assert status["job"]["nodes"] == ["n1", "n2"]
        assert [r["rank"] for r in status["ranks"]] == [0, 1]
        assert len(status["summary"]["rank_peak_mem_gib"]) == 2
        manifest = json.loads((cli.out / "two" / point / "manifest.json").read_text())
        assert len(manifest["hosts"]) == 2
    cli.run(*GRID, "name=one", "launch.points_per_job=3", "launch.cpus=2")
    assert cli.states("one") == ["ok"] * 6
    jobs = json.loads((cli.out / "one" / "sweep.json").read_text())["jobs"]
    assert [len(j["points"]) for j in jobs] == [6]
    assert {s["job"]["id"].split("_")[1] for s in cli.points("one").values()} == {"0", "1"}
    cli.local(*GRID, "name=here")
    here = losses(cli.out / "here")
    assert len(here) == 6 and all(len(v) == 3 for v in here.values())
    assert list((cli.out / "two/.sweep/slurm").glob("*/*_1-1.log")), "logs of the second node"
    assert losses(cli.out / "two") == here
    assert losses(cli.out / "one") == here


@pytest.mark.slow
def test_six_points_on_two_nodes_have_the_leaf_roots_of_local_runs(cli: Cli) -> None:
    """Every gradient and every weight of every step, hashed: a Merkle root a point."""
    args = (*GRID, "replay=true")
    slurm = ("launch.nodes=2", "launch.cpus=1", "launch.points_per_job=2", "launch.array_parallelism=1")
    cli.run(*args, "name=two", *slurm, timeout=500)  # one job at a time: they share two cores with other tests
    cli.local(*args, "name=here", timeout=500)

    def roots(name: str) -> dict[str, str]:
        points = cli.points(name)
        assert [s["status"] for s in points.values()] == ["ok"] * 6, cli.logs()
        assert all(s["summary"]["replay_match"] for s in points.values())
        return {point: s["summary"]["leaf_root"] for point, s in points.items()}

    two = roots("two")
    assert len(set(two.values())) >= 3  # zero2 and zero2o agree, batches differ
    assert two == roots("here")
