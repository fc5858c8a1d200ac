"""Checkpoints: a resumed run equals an uninterrupted one, and what is not complete does not count."""

from pathlib import Path

import pytest

from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.record import cases
from train import checkpoint, config

ROUNDS = config.Round("delta", inner_steps=3, topk=0.5, bits=8, outer_lr=0.7, outer_momentum=0.9)


@pytest.mark.parametrize(
    ("reduction", "rounds"), [("ddp", None), ("zero2o", None), ("zero2rs", None), ("fsdp", None), ("ddp", ROUNDS)]
)
def test_resumed_equals_uninterrupted_on_two_ranks(
    two: Ranks, tmp_path: Path, reduction: str, rounds: config.Round | None
) -> None:
    case = Case(reduction, "bf16", beta1=0.9, steps=6)
    assert two.run(cases.resumed, case, tmp_path, rounds) == [[], []]


def test_resumed_equals_uninterrupted_on_four_ranks(four: Ranks, tmp_path: Path) -> None:
    assert four.run(cases.resumed, Case("zero2o", "fp32", beta1=0.9, steps=6), tmp_path, None) == [[]] * 4
    kept = [path.name for _, path in checkpoint.complete(tmp_path / "6")]
    assert kept == ["step-00000004", "step-00000006"], "checkpoint.keep=2"


def test_what_is_not_complete_does_not_count(tmp_path: Path) -> None:
    for name in ("step-00000002", ".step-00000004", "step-00000006", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-00000002", ".step-00000004", "step-x"):
        (tmp_path / "checkpoints" / name / ".metadata").write_bytes(b"x")
    assert [steps for steps, _ in checkpoint.complete(tmp_path)] == [2]
    assert checkpoint.complete(tmp_path / "nothing") == []
