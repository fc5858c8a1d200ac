"""A mixture through the real command line."""

import json
from pathlib import Path

import pytest

from tests.helpers import points, status, train


@pytest.mark.slow
def test_replayed_with_experts_over_two_ranks(tmp_path: Path) -> None:
    """Bit for bit, here and in fresh processes, biases and all; the loads are in every line and in the summary."""
    done = train(
        "model=moe_debug", "reduction=fsdp", "parallelism.ep=2", "seq_len=32", "micro_batch=1", "steps=3", "device=cpu",
        "nproc=2", "replay=true", "name=m", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "m").values()
    summary = status(point)["summary"]
    assert summary["replay_match"] is True
    loads = summary["experts"]["load"]
    assert set(loads) == {f"layers.{i}" for i in range(4)}
    assert all(sum(shares) == pytest.approx(1) and len(shares) == 8 for shares in loads.values())
    assert summary["params_active"] < summary["params"]
    assert summary["traffic"]["bytes"]["ep_all_to_all"] > 0
    for line in map(json.loads, (point / "metrics.jsonl").read_text().splitlines()):
        assert 1 <= line["moe/imbalance"] <= line["moe/imbalance_worst"] <= 8


@pytest.mark.slow
def test_bad_keys_are_named_before_anything_starts(tmp_path: Path) -> None:
    for key, why in {
        "model.balance=even": "must be one of none, aux_loss, aux_loss_free",
        "parallelism.dispatch=deep": "must be one of torch, deepep",
        "model.experts_per_token=9": "must be between 1 and model.experts=8",
        "parallelism.ep=3": "must divide dp_shard x cp x tp = 2 and model.experts=8 (valid: 1, 2)",
    }.items():
        done = train("model=moe_debug", "reduction=fsdp", "nproc=2", "device=cpu", key, cwd=tmp_path)
        assert done.returncode == 2 and key in done.stderr and why in done.stderr, done.stderr
    assert not (tmp_path / "outputs").exists()
