"""Pipelines by the real command line: what a run leaves, replay, faults, checkpoints."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoints import interrupted, state
from tests.helpers import TINY, frozen, metrics, points, status, train

FAST = [a.replace("layers=2", "layers=4") for a in TINY] + ["nproc=2", "global_batch=8", "micro_batch=2", "data=fake"]
PP = [*FAST, "parallelism.pp=2"]


def by_schedule(sweep: Path) -> dict[str, Path]:
    return {frozen(p)["parallelism"]["pp_schedule"]: p for p in points(sweep).values()}


@pytest.mark.slow
def test_layouts_agree_and_the_schedule_is_kept(tmp_path: Path) -> None:
    args = ["reduction=fsdp", "steps=6", "profile=true", "name=x"]
    done = train(*PP, "parallelism.pp_schedule=1f1b,zbv", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = train(*FAST, *args[:-2], "name=y", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    (flat,) = points(tmp_path / "outputs" / "y").values()
    for name, point in by_schedule(tmp_path / "outputs" / "x").items():
        for ours, theirs in zip(metrics(point), metrics(flat), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        summary, other = status(point)["summary"], status(flat)["summary"]
        assert summary["flops_per_token"] == other["flops_per_token"]
        assert summary["tokens_per_step"] == other["tokens_per_step"] == 8 * 32
        assert summary["rank_stages"] == ([[0], [1]] if name == "1f1b" else [[0, 3], [1, 2]])
        assert len(summary["rank_peak_mem_gib"]) == 2
        line = summary["pipeline"]
        theory = 1 / 5 if name == "1f1b" else 1 / 25  # (p - 1) / (m + p - 1); (p - 1) / (3 x 2 m + p - 1)
        assert line["idle_theory"] == pytest.approx(theory)
        assert all(0 < share < 1 for share in summary["rank_idle"])
        assert line["idle"] == pytest.approx(sum(summary["rank_idle"]) / 2)
        kept = json.loads((point / "schedule.json").read_text())
        assert [each["rank"] for each in kept["ranks"]] == [0, 1]
        for place, each in enumerate(kept["ranks"]):
            kinds = [action[2] for action in each["actions"]]
            assert kinds.count("F") == 4 * line["virtual"]
            assert {action[0] for action in each["actions"]} == set(summary["rank_stages"][place])
            times = [t for action in each["actions"] for t in action[3:]]
            assert times == sorted(times) and times[-1] <= kept["seconds"]
    assert (tmp_path / "outputs" / "x" / "plots" / "schedule.svg").stat().st_size > 1000
    assert "The pipeline as executed" in (tmp_path / "outputs" / "x" / "report.md").read_text()
    rows = (tmp_path / "outputs" / "x" / "summary.csv").read_text().splitlines()
    assert {"bubble", "bubble_theory"} <= set(rows[0].split(","))


@pytest.mark.slow
def test_replay(tmp_path: Path) -> None:
    args = ["parallelism.pp_schedule=1f1b,interleaved_zero_bubble", "fault=null,bitflip_weight@1:2", "steps=4"]
    done = train(*PP, *args, "reduction=ddp", "replay=true", "name=r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for point in points(tmp_path / "outputs" / "r").values():
        summary = status(point)["summary"]
        assert summary["replay_match"] is (frozen(point)["fault"] is None), done.stdout + done.stderr
        if frozen(point)["fault"]:
            assert "step 2" in summary["replay_difference"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan@0:2", "non-finite loss at step 2, first on rank 1"),  # it starts on the first stage and reaches the loss
        ("inf_grad@1:2", "non-finite gradient norm at step 2, on every rank"),
        ("exception@1:2", "injected by fault=exception"),
    ],
)
def test_faults(tmp_path: Path, fault: str, reason: str) -> None:
    done = train(*PP, f"fault={fault}", "reduction=ddp", "steps=4", "name=f", cwd=tmp_path)
    assert done.returncode == 1
    (point,) = points(tmp_path / "outputs" / "f").values()
    assert reason in status(point)["reason"]


@pytest.mark.slow
def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """To the bit where it would have ended, every stage with what is its own."""
    common = [*PP, "reduction=fsdp", "steps=60", "checkpoint.every=10", "checkpoint.keep=100"]
    whole = train(*common, "name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    interrupted([*common, "name=cut"], tmp_path / "outputs" / "cut", signal.SIGTERM)
    again = train(*common, "name=cut", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    (point,), (other,) = (points(tmp_path / "outputs" / name).values() for name in ("cut", "whole"))
    assert 10 <= status(point)["summary"]["checkpoint"]["resumed_from"] < 60
    one, two = (state(p / "checkpoints" / "step-00000060") for p in (other, point))
    assert one.keys() == two.keys()
    first = frozen(point)["parallelism"]["pp_split"][0]
    assert {int(k.split("layers.")[1].split(".")[0]) for k in one if k.startswith("rank1/layers")} == {*range(first, 4)}
    assert [k for k in one if not torch.equal(one[k], two[k])] == []
