"""The one rule by which an oom spares larger points, here and in jobs."""

from typing import Any

import pytest

from train.config import Train
from train.launch.prune import implies
from train.launch.slurm import files
from train.sweep import freeze


def point(**more: Any) -> Train:
    values = {"micro_batch": 4, "seq_len": 64, "grad_accum": 2, "global_batch": 16, "nproc": 2, "device": "cpu"} | more
    cfg = Train()
    for key, value in values.items():
        setattr(cfg, key, value)
    return cfg


@pytest.mark.parametrize(
    ("more", "implied"),
    [
        ({}, True),
        ({"micro_batch": 8, "global_batch": 32}, True),
        ({"micro_batch": 8, "grad_accum": 1}, True),
        ({"micro_batch": 8, "grad_accum": 1, "global_batch": 8}, False),  # neither is the same
        ({"seq_len": 128}, True),
        ({"seq_len": 32}, False),
        ({"micro_batch": 2, "global_batch": 8}, False),
        ({"seq_len": 128, "seed": 7}, False),
        ({"repeats": 2, "repeat": 1}, True),  # a repeat needs as much as the first run
    ],
)
def test_what_an_oom_implies(more: dict[str, Any], implied: bool, tmp_path: Any) -> None:
    small, large = point(), point(**more)
    assert implies(small, large) is implied
    # the same in a job, from files
    grid = []
    for name, cfg, status in (("small", small, "oom"), ("large", large, "pending")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(freeze.config_text(cfg))
        freeze.write_json(tmp_path / name / "status.json", {"status": status})
        grid.append({"folder": name})
    freeze.write_json(tmp_path / "sweep.json", {"grid": grid})
    assert files.implied_by(tmp_path, "large", large) == ("small" if implied else None)
