"""Replay, checkpoints, rounds and the fabric probe through the real command line."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoints import interrupted, state
from tests.helpers import TINY, points, status, train
from train import checkpoint
from train.replay.compare import merkle_root

FAST = [*TINY, "micro_batch=1", "device=cpu"]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean point and one whose rank 1 flips a bit of its gradient in step 2."""
    cwd = tmp_path_factory.mktemp("replay")
    arguments = [*FAST, "steps=4", "replay=true", "fault=null,bitflip_grad@1:2", "fabric=true", "name=r"]
    done = train("-m", *arguments, cwd=cwd, XDG_CACHE_HOME=str(cwd))  # no record of an earlier day
    assert done.returncode == 0, done.stdout + done.stderr
    (cwd / "stdout").write_text(done.stdout)
    return cwd / "outputs" / "r"


def one(sweep: Path, words: str) -> Path:
    (found,) = (point for name, point in points(sweep).items() if words in name)
    return found


def test_three_passes_are_equal(replayed: Path) -> None:
    point = one(replayed, "fault=null")
    summary = status(point)["summary"]
    assert summary["replay_match"] is True and summary["replay_difference"] is None
    assert set(summary["replay"]["roots"].values()) == {summary["leaf_root"]} and len(summary["replay"]["roots"]) == 3
    lines = [json.loads(line) for line in (point / "leaves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and summary["replay"]["leaves"] == 8
    leaves = [bytes.fromhex(leaf) for line in lines for leaf in line["leaves"]]
    assert len(set(leaves)) == 8 and merkle_root(leaves) == summary["leaf_root"]
    steps = [json.loads(line)["step"] for line in (point / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3], "the other passes are not measured"
    assert summary["engine"]["deterministic"] is True
    assert {"replay", "fresh"} <= summary["seconds"].keys()


def test_a_flipped_bit_is_named_and_shown(replayed: Path) -> None:
    point = one(replayed, "bitflip_grad")
    s = status(point)
    assert s["status"] == "ok" and s["summary"]["replay_match"] is False
    told = "second pass: step 2, rank 1, embed.weight.grad (1 of 2 ranks differ): one rank alone"
    assert s["summary"]["replay_difference"].startswith(told)
    for text in ((replayed.parents[1] / "stdout").read_text(), (replayed / "report.md").read_text()):
        assert told in text and "replay-mismatch" in text


def test_without_a_record_the_result_is_unqualified(replayed: Path) -> None:
    point = one(replayed, "fault=null")
    summary = status(point)["summary"]
    assert summary["attention_qualified"] is False
    log = (point / "logs" / "rank0.log").read_text()
    assert f"attention backend: {summary['attention_backend']} (unqualified" in log
    assert "unqualified" in (replayed / "report.md").read_text()


def test_the_fabric_is_measured_once_a_sweep(replayed: Path) -> None:
    stored = json.loads((replayed / ".sweep" / "fabric.json").read_text())
    assert len(stored) == 1
    (measured,) = stored.values()
    for point in points(replayed).values():
        assert status(point)["summary"]["fabric"] == measured
    for name in ("all_reduce", "all_to_all"):
        assert len(measured[name]) == 3 and all(value > 0 for value in measured[name].values())


@pytest.mark.slow
def test_a_point_that_was_interrupted_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """To the bit where it would have ended without the interruption."""
    common = [*FAST, "steps=100", "nproc=1", "checkpoint.every=20", "checkpoint.keep=100"]
    whole = train(*common, "name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    sweep = tmp_path / "outputs" / "cut"
    interrupted([*common, "name=cut"], sweep, signal.SIGINT)
    (point,) = points(sweep).values()
    assert status(point)["status"] == "interrupted"
    reached = checkpoint.complete(point)[-1][0]
    assert 20 <= reached < 100
    again = train(*common, "name=cut", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert status(point)["summary"]["checkpoint"]["resumed_from"] == reached
    lines = [json.loads(line) for line in (point / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(reached, 100))
    (other,) = points(tmp_path / "outputs" / "whole").values()
    one, two = (state(p / "checkpoints" / "step-00000100") for p in (other, point))
    assert one.keys() == two.keys() and len(one) > 40
    assert [k for k in one if not torch.equal(one[k], two[k])] == []


@pytest.mark.slow
def test_rounds_replay_and_are_recorded(tmp_path: Path) -> None:
    done = train(
        "-m", *FAST, "steps=4", "nproc=4", "round=delta", "round.inner_steps=2", "parallelism.dp_replicate=2",
        "reduction=zero2o,ddp", "replay=true", "name=r", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for point in points(tmp_path / "outputs" / "r").values():
        summary = status(point)["summary"]
        assert summary["replay_match"] is True
        assert summary["round"]["rounds"] == 2 and summary["round"]["islands"] == 2
        assert summary["round"]["compression_ratio"] > 10
        assert all(a <= b for a, b in zip(summary["rank_step_peak_mem_gib"], summary["rank_peak_mem_gib"], strict=True))


@pytest.mark.slow
def test_a_compiled_run_replays(tmp_path: Path) -> None:
    done = train(*FAST, "steps=3", "compile=layer", "replay=true", "name=c", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "c").values()
    assert status(point)["summary"]["replay_match"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nondeterministic@0:1", "step 1, rank 0, embed.weight.grad (2 of 2 ranks differ): all ranks"),
        ("bitflip_weight@1:2", "step 2, rank 1, "),
        ("bitflip_wire@0:1", "step 1, rank 1, embed.weight.grad_sum (1 of 2 ranks differ): one rank alone"),
    ],
)
def test_other_faults_are_told_apart(tmp_path: Path, kind: str, words: str) -> None:
    done = train(*FAST, "steps=4", "replay=true", f"fault={kind}", "name=f", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "f").values()
    assert words in status(point)["summary"]["replay_difference"]
