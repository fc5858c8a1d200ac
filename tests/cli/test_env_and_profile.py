"""env.NAME=value reaches the ranks, is swept and counts as configuration; profile=true leaves a trace and says so."""

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.helpers import TINY, frozen, points, status

SMALL = [*TINY, "nproc=1", "micro_batch=1"]


@pytest.mark.slow
def test_swept_variable_reaches_the_ranks(tmp_path: Path) -> None:
    """OMP_NUM_THREADS is read when a rank starts, so it also proves that such points get a fresh interpreter."""
    args = [*SMALL, "steps=3", "env.MFU_MARK=a,012", "env.NCCL_ALGO=Ring", "name=x"]
    done = run(args, tmp_path)
    assert done.code == 0, done.out + done.err
    found = {frozen(p)["env"]["MFU_MARK"]: p for p in points(tmp_path / "outputs" / "x").values()}
    assert set(found) == {"a", "012"}, "the value is text as it was typed"
    assert len({status(p)["identity"] for p in found.values()}) == 2
    for point in found.values():
        host = json.loads((point / "manifest.json").read_text())["hosts"][0]
        assert host["env"]["NCCL_ALGO"] == "Ring"


@pytest.mark.slow
def test_profile_leaves_a_trace_a_rank_and_a_flag(tmp_path: Path) -> None:
    done = run([*TINY, "micro_batch=1", "steps=6", "profile=true,false", "name=x"], tmp_path)
    assert done.code == 0, done.out + done.err
    by = {frozen(p)["profile"]: p for p in points(tmp_path / "outputs" / "x").values()}
    for rank in range(2):
        with gzip.open(by[True] / "traces" / f"rank{rank}.json.gz") as f:
            events = json.load(f)["traceEvents"]
        assert any("aten::" in str(e.get("name")) for e in events)
    assert status(by[True])["summary"]["profiled_steps"] == [4, 5]
    assert not (by[False] / "traces").exists() and status(by[False])["summary"]["profiled_steps"] == []
    table = done.out.split("rank  ")[1].split("\n\n")[0].splitlines()
    assert [("profiled" in line) for line in table if " True " in line] == [True], done.out
    assert [("profiled" in line) for line in table if " False " in line] == [False], done.out
