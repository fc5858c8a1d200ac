"""`make proof` on a machine without a GPU: it runs, finds what is missing and claims nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import proof
from tests.helpers import ROOT, TINY, environment


def report(path: Path, *cases: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_a_skip_or_no_test_fails(tmp_path: Path) -> None:
    good = '<testcase classname="a" name="b"/>'
    assert proof.gpu_tests(report(tmp_path / "1", good)) == []
    assert proof.gpu_tests(report(tmp_path / "2", good, '<testcase classname="a" name="c"><skipped/></testcase>')) == [
        "a.c: skipped"
    ]
    assert proof.gpu_tests(report(tmp_path / "3")) == ["no GPU test ran"]
    assert "no report" in proof.gpu_tests(tmp_path / "4")[0]


def test_leaves_that_do_not_give_the_root_are_found(tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    leaf = "00" * 32
    summary = {
        "replay_match": True,
        "leaf_root": proof_root(leaf),
        "attention_backend": "flash",
        "attention_qualified": True,
    }
    (point / "status.json").write_text(json.dumps({"status": "ok", "reason": "", "summary": summary}))
    (point / "leaves.jsonl").write_text(json.dumps({"step": 0, "leaves": [leaf]}) + "\n")
    assert proof.replayed(tmp_path, True)[0] == []
    (point / "leaves.jsonl").write_text(json.dumps({"step": 0, "leaves": ["01" * 32]}) + "\n")
    assert "the leaves give root" in proof.replayed(tmp_path, True)[0][0]
    summary["attention_backend"], summary["attention_qualified"] = "math", False
    (point / "status.json").write_text(json.dumps({"status": "ok", "reason": "", "summary": summary}))
    assert len(proof.replayed(tmp_path, True)[0]) == 3


def proof_root(leaf: str) -> str:
    from train.replay.compare import merkle_root

    return merkle_root([bytes.fromhex(leaf)])


@pytest.mark.slow
def test_the_command_without_a_gpu_claims_nothing(tmp_path: Path) -> None:
    overrides = [f"--override={o}" for o in [*TINY, "nproc=1", "model=debug", "compile=none", "micro_batch=1"]]
    options = ["--device", "cpu", "--steps", "2", "--out", str(tmp_path), "--tests", "tests/record/test_replay.py"]
    command = [sys.executable, "benchmarks/proof.py", *options, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split("\t") for line in (tmp_path / "steps.tsv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["qualify", "gpu_tests", "replayed", "evidence"]
    assert rows[2][1] == "0", done.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"] is False and verdict["qualified"] is False and "nothing is claimed" in verdict["claim"]
    assert any(line.endswith((": error", ": failure")) for line in verdict["wrong"])
