"""On a real GPU, through the real command line: replay, recompute and resumption change no bit; a flip is found."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers import frozen, metrics, points, status, train
from tests.record.test_command import state

pytestmark = pytest.mark.gpu

#: flash takes it, and a step is too short to time
SMALL = [
    "model.dim=256", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.head_dim=64", "model.ffn=512",
    "model.vocab=512", "seq_len=256", "micro_batch=2", "device=cuda", "nproc=1", "precision=bf16",
]  # fmt: skip


def test_replay_recompute_and_a_flip(tmp_path: Path) -> None:
    arguments = [*SMALL, "steps=4", "replay=true", "memory=none,full_recompute", "fault=null,bitflip_grad@0:2:3"]
    done = train("-m", *arguments, "name=r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    roots = set()
    for point in points(tmp_path / "outputs" / "r").values():
        summary = status(point)["summary"]
        assert summary["attention_backend"] != "math", "a fused kernel is what is to be proven"
        if frozen(point)["fault"] is None:
            assert summary["replay_match"] is True, summary["replay_difference"]
            roots.add(summary["leaf_root"])
        else:
            assert "step 2, rank 0, embed.weight.grad" in summary["replay_difference"]
    assert len(roots) == 1, "recompute runs the same kernels"


def test_a_compiled_run_replays(tmp_path: Path) -> None:
    done = train(*SMALL, "steps=3", "replay=true", "compile=layer", "name=c", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "c").values()
    assert status(point)["summary"]["replay_match"] is True, status(point)["summary"]["replay_difference"]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    command = [*SMALL, "steps=6", "deterministic=true", "checkpoint.every=2", "checkpoint.keep=9", "name=c"]
    first = train(*command, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    (point,) = points(tmp_path / "outputs" / "c").values()
    last = point / "checkpoints" / "step-00000006"
    whole, losses = state(last), [line["loss"] for line in metrics(point)]
    for lost in (last, point / "checkpoints" / "step-00000004"):
        shutil.rmtree(lost)
    (point / "status.json").unlink()
    again = train(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert status(point)["summary"]["checkpoint"]["resumed_from"] == 2
    resumed = state(last)
    assert whole.keys() == resumed.keys()
    assert [k for k in whole if not torch.equal(whole[k], resumed[k])] == []
    assert [line["loss"] for line in metrics(point)] == losses[2:]


def test_peak_memory_inside_the_steps_and_over_the_round_are_apart(tmp_path: Path) -> None:
    done = train(*SMALL, "steps=4", "round=delta", "round.inner_steps=2", "name=m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "m").values()
    summary = status(point)["summary"]
    assert summary["memory_kind"] == "device"
    assert 0 < summary["rank_step_peak_mem_gib"][0] <= summary["rank_peak_mem_gib"][0]
    assert summary["round"]["rounds"] == 2 and summary["fabric"]["host_to_device"] > 0
