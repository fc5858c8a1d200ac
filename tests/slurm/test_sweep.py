"""The six-point sweep on the cluster, and as it runs on this machine."""

import json
from pathlib import Path

import pytest
import yaml

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
    args = (*GRID[1:], "replay=true")
    slurm = ("launch.nodes=2", "launch.cpus=1", "launch.points_per_job=6")  # one job: torch is imported once a node
    cli.run(*args, GRID[0], "name=two", *slurm, timeout=500)
    cli.local(*args, "reduction=zero2", "name=here", timeout=500)

    def roots(name: str) -> dict[tuple[str, int], str]:
        points = cli.points(name)
        assert all(s["status"] == "ok" and s["summary"]["replay_match"] for s in points.values()), cli.logs()
        frozen = {p: yaml.safe_load((cli.out / name / p / "config.yaml").read_text()) for p in points}
        return {
            (frozen[p]["reduction"]["name"], frozen[p]["micro_batch"]): s["summary"]["leaf_root"]
            for p, s in points.items()
        }

    here = roots("here")
    assert len(here) == len(set(here.values())) == 3  # batches differ
    # zero2o leaves the same bits as zero2, so one local run is the measure of both
    assert roots("two") == {(r, batch): root for (_, batch), root in here.items() for r in ("zero2", "zero2o")}
