"""Order, pruning, repeats, stopping early and the budget: the real command line."""

import json
import re
from pathlib import Path

import pytest

from tests.faults import lab
from tests.faults.lab import statuses, sweep

TINY = [*lab.TINY, "nproc=1"]  # the order of points does not depend on their ranks
BARE = [a for a in TINY if not a.startswith(("micro_batch", "seq_len"))]


def ran(output: str) -> list[str]:
    """Point folders in the order in which they were run."""
    return re.findall(r"^\[\d+/\d+\] (\S+)", output, flags=re.M)


def test_cheapest_first_and_pruned(tmp_path: Path) -> None:
    """micro_batch 2 is out of memory: larger ones with all else equal are implied, another reduction is not."""
    args = ["name=p", *BARE, "seq_len=16,32", "steps=4", "reduction=ddp,zero2o"]
    done = sweep(tmp_path, *args, "micro_batch=4,2", "fault=oom@0:1")
    assert done.code == 0, done.output
    found = statuses(tmp_path / "p")
    assert sorted(s["status"] for s in found.values()) == ["infeasible"] * 6 + ["oom"] * 2
    order = ran(done.output)
    assert len(order) == 2 and all("micro-batch-2" in o and "seq-len-16" in o for o in order), done.output
    for name, status in found.items():
        if status["status"] == "infeasible":
            cause = re.fullmatch(r"implied by (\S+)", status["reason"])
            assert cause and found[cause[1]]["status"] == "oom"
            assert ("ddp" in name) == ("ddp" in cause[1])  # all else equal
    again = sweep(
        tmp_path, *args, "micro_batch=4,2,8", "fault=oom@0:1"
    )  # a new, larger knob is implied by the old result
    assert again.code == 0 and ran(again.output) == [], again.output
    assert sorted(s["status"] for s in statuses(tmp_path / "p").values()) == ["infeasible"] * 10 + ["oom"] * 2


@pytest.mark.slow
def test_prune_false_runs_all(tmp_path: Path) -> None:
    args = ["name=p", *BARE, "seq_len=16", "steps=4", "reduction=ddp", "micro_batch=1,2", "fault=oom@0:1"]
    assert sorted(s["status"] for s in _run(tmp_path, *args).values()) == ["infeasible", "oom"]
    assert [s["status"] for s in _run(tmp_path, *args, "prune=false").values()] == ["oom", "oom"]


def _run(out: Path, *args: str) -> dict[str, dict[str, object]]:
    sweep(out, *args)
    return statuses(out / "p")


def test_repeats_are_shuffled(tmp_path: Path) -> None:
    done = sweep(tmp_path, "name=r", *BARE, "seq_len=16", "micro_batch=1,2,4", "repeats=4", "steps=2")
    assert done.code == 0, done.output
    order = ran(done.output)
    assert len(order) == len(set(order)) == 12
    sizes = [re.search(r"micro-batch-(\d)", o)[1] for o in order]  # type: ignore[index]
    assert sizes != sorted(sizes) and sizes[:4] != ["1"] * 4
    rounds = [sizes[i : i + 3] for i in range(0, 12, 3)]
    assert any(r != rounds[0] for r in rounds)
    again = sweep(tmp_path, "name=r", *BARE, "seq_len=16", "micro_batch=1,2,4", "repeats=4", "steps=2")
    assert again.code == 0 and ran(again.output) == [] and "12 kept" in again.output


def test_identical_crashes_stop_the_sweep_different_ones_do_not(tmp_path: Path) -> None:
    same = sweep(tmp_path, "name=s", *TINY, "steps=4", "seed=0,1,2,3,4", "fault=exception@0:2")
    assert same.code == 1
    found = [s["status"] for s in statuses(tmp_path / "s").values()]
    assert sorted(found) == ["crashed"] * 3 + ["pending"] * 2
    assert "stopped: 3 identical crashes in a row (max_failures=3): rank 0 at step 2: RuntimeError" in same.output
    reasons = {s["reason"] for s in statuses(tmp_path / "s").values() if s["status"] == "pending"}
    assert len(reasons) == 1 and reasons.pop().startswith("not started: 3 identical crashes in a row")
    faults = "exception@0:2,segv@0:2,exit@0:1,nan@0:1"
    mixed = sweep(tmp_path, "name=m", *TINY, "steps=4", "seed=0", f"fault={faults}")
    assert [s["status"] for s in statuses(tmp_path / "m").values()] == ["crashed"] * 4, mixed.output


def test_budget_and_estimate(tmp_path: Path) -> None:
    """Ten seconds for points of three: some run, the rest stays pending and says why; the report has the device-hours."""
    args = ["name=b", *TINY, "steps=1000000", "seed=range(0,8)", "timeout=1.5", "max_failures=100"]
    done = sweep(tmp_path, *args, "budget.hours=0.0015")
    assert done.code == 1 and "stopped: budget.hours=0.0015 is used up" in done.output, done.output
    assert re.search(r"about \d+ s to go", done.output)
    found = list(statuses(tmp_path / "b").values())
    pending = [s for s in found if s["status"] == "pending"]
    assert pending and len(pending) < 8
    assert all(s["reason"] == "not started: budget.hours=0.0015 is used up" for s in pending)
    spent = sum(s["summary"].get("wall_s", 0) for s in found)
    assert spent <= 0.0015 * 3600 + 1
    for s in found:
        if s["status"] == "timeout":
            assert s["summary"]["device_hours_wasted"] == s["summary"]["device_hours"] > 0


@pytest.mark.slow
def test_cold_start_is_forced_by_what_is_read_at_import(tmp_path: Path) -> None:
    """env.OMP_NUM_THREADS needs a fresh interpreter, env.NCCL_* does not; both reach the rank."""
    (tmp_path / "own/sweeps").mkdir(parents=True)
    grids = [{"env.OMP_NUM_THREADS": 1}, {"+env.NCCL_DEBUG": "WARN"}]
    named = f"# @package _global_\nhydra: {{sweeper: {{grids: {json.dumps(grids)}}}}}\n"
    (tmp_path / "own/sweeps/starts.yaml").write_text(named)
    done = sweep(tmp_path, "--config-dir", str(tmp_path / "own"), "name=e", "sweeps=starts", *TINY, "steps=2")
    assert done.code == 0, done.output
    start = {}
    for name, status in statuses(tmp_path / "e").items():
        env = json.loads((tmp_path / "e" / name / "manifest.json").read_text())["hosts"][0]["env"]
        start[env.get("OMP_NUM_THREADS"), env.get("NCCL_DEBUG")] = status["summary"]["seconds"]["start"]
        assert Path(env["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)  # node-local, shared over the sweep
    cold, warm = start.pop(("1", None)), start.pop((None, "WARN"))
    assert not start and cold > 3 * warm, (cold, warm)  # an interpreter with torch against a fork
