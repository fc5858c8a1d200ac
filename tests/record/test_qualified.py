"""Qualification records: what makes one, and what attention=auto does with it."""

import json
from pathlib import Path

import pytest
import torch

from train import config, qualify
from train.model import attention, qualified
from train.model.qualified import Stack

CPU = torch.device("cpu")
ORDER = ("cudnn", "flash", "efficient", "math")
PROBED = {"cudnn": "refused", "flash": None, "efficient": None, "math": None}


def test_a_record_of_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by two real processes, found again by a run's look-up."""
    content = qualify.make(CPU, "fp32", 16, [(4, 2, 8)])
    (tmp_path / qualify.file_name(content)).write_text(json.dumps(content))
    by = {(r["path"], r["deterministic"]): r for r in content["records"]}
    assert len(by) == 8
    math = by["math", True]
    assert math["bitwise"] and math["processes"] == 2 and math["runs"] == 2 * qualify.REPEATS and math["results"] == 1
    assert all(0 <= error < 1e-5 for error in math["error"].values())
    assert by["efficient", False]["rejected"] and not by["efficient", False]["bitwise"]
    found = qualified.paths(qualified.load(tmp_path), Stack.here(CPU), "fp32", 2, 8, True)
    assert "math" in found and "efficient" not in found
    assert attention.select_replayable("auto", attention.probe(CPU, torch.float32, 4, 2, 8), ORDER, found)[1] is True


def entry(digest: str) -> dict[str, object]:
    return {"path": "flash", "digests": [["o", digest, "k", "v"]], "error": {}}


def test_a_path_that_differs_between_processes_or_repeats_is_not_qualified() -> None:
    (same,) = qualify.judge([[entry("q")], [entry("q")]])
    (other,) = qualify.judge([[entry("q")], [entry("x")]])
    assert same["bitwise"] is True and same["differ"] == []
    assert other["bitwise"] is False and other["differ"] == ["dq"] and other["results"] == 2


def test_auto_takes_the_first_qualified_path_that_accepts() -> None:
    assert attention.select_replayable("auto", PROBED, ORDER, {"cudnn", "math"}) == ("math", True)
    assert attention.select_replayable("auto", PROBED, ORDER, {"cudnn"}) == ("flash", False)
    assert attention.select_replayable("efficient", PROBED, ORDER, {"math"}) == ("efficient", False)
    with pytest.raises(config.ConfigError, match=r"attention=cudnn: rejected here \(refused\); set attention=flash"):
        attention.select_replayable("cudnn", PROBED, ORDER, {"cudnn"})


def test_records_hold_for_their_device_torch_and_shapes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"path": "flash", "dtype": "bf16", "group": 2, "head_dim": 128, "deterministic": True, "bitwise": True}
    content = {"schema": 1, "capability": "9.0", "torch": "2.11.0+cu130", "records": [record]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "b.json").write_text("{")
    files = qualified.load(tmp_path)
    assert "b.json: not a qualification record" in capsys.readouterr().out
    here = Stack("9.0", "2.11.0+cu130")
    assert set(qualified.paths(files, here, "bf16", 2, 128, True)) == {"flash"}
    for args in (
        (Stack("10.0", "2.11.0+cu130"), "bf16", 2, 128, True), (Stack("9.0", "2.12.0"), "bf16", 2, 128, True),
        (here, "fp32", 2, 128, True), (here, "bf16", 4, 128, True), (here, "bf16", 2, 64, True), (here, "bf16", 2, 128, False),
    ):  # fmt: skip
        assert not qualified.paths(files, *args)


def test_shipped_records_are_whole() -> None:
    for file in qualified.load(qualified.shipped()):
        assert {"device", "capability", "torch", "driver", "made"} <= file.keys()
        for record in file["records"]:
            assert record["bitwise"] is (record.get("results") == 1), "the evidence says what the record says"


@pytest.mark.gpu
def test_flash_is_bitwise_under_the_deterministic_setting_and_fast_paths_are_not_silently_replaced() -> None:
    content = qualify.make(torch.device("cuda"), "bf16", 1024, [(16, 8, 128)])
    by = {(r["path"], r["deterministic"]): r for r in content["records"]}
    assert by["flash", True]["bitwise"] is True
    assert all(error < 0.02 for error in by["flash", True]["error"].values())
    assert by["math", True]["bitwise"] is True
