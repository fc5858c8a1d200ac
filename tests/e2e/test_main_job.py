"""The main job through the real command line: two gloo ranks, real text, six points, a report."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT, TINY, frozen, metrics, points, status, train


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's sweep on the debug model, cut to 6 steps."""
    cwd = tmp_path_factory.mktemp("a folder")
    done = train("-m", "reduction=zero2o,zero2", "micro_batch=4,8,12", "steps=6", "name=grid", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    (cwd / "stdout").write_text(done.stdout)
    return cwd / "outputs" / "grid"


def test_six_points_end_ok(grid: Path) -> None:
    found = points(grid)
    assert len(found) == 6
    for point in found.values():
        s = status(point)
        assert s["status"] == "ok" and s["reason"] == ""
        assert [r["exit_code"] for r in s["ranks"]] == [0, 0]
        assert len({r["pid"] for r in s["ranks"]}) == 2
        assert [m["step"] for m in metrics(point)] == list(range(6))


def test_loss_falls_on_text(grid: Path) -> None:
    for point in points(grid).values():
        losses = [m["loss"] for m in metrics(point)]
        assert losses[-1] < losses[0] - 0.3, losses


def test_zero2_and_zero2o_train_identically(grid: Path) -> None:
    by = {(frozen(p)["reduction"]["name"], frozen(p)["micro_batch"]): metrics(p) for p in points(grid).values()}
    for micro_batch in (4, 8, 12):
        a, b = by["zero2", micro_batch], by["zero2o", micro_batch]
        assert [(m["loss"], m["grad_norm"]) for m in a] == [(m["loss"], m["grad_norm"]) for m in b]


def test_metrics_agree_with_each_other(grid: Path) -> None:
    for point in points(grid).values():
        s, cfg = status(point)["summary"], frozen(point)
        for m in metrics(point):
            tokens = cfg["global_batch"] * cfg["seq_len"]
            assert m["perf/throughput"] == pytest.approx(tokens / m["time/step"])
            assert m["perf/tokens_per_s_per_gpu"] == pytest.approx(m["perf/throughput"] / cfg["nproc"])
            mfu = 100 * m["perf/tokens_per_s_per_gpu"] * s["flops_per_token"]["mfu"] / s["peak"]["flops"]
            assert m["perf/mfu"] == pytest.approx(mfu)
            assert 0 < m["perf/peak_memory"] <= max(s["rank_peak_mem_gib"]) + 1e-9
        assert s["memory_kind"] == "rss" and s["peak"]["kind"] in ("measured", "vendor")


def test_one_peak_for_all_points(grid: Path) -> None:
    assert len({status(p)["summary"]["peak"]["flops"] for p in points(grid).values()}) == 1


def test_run_folder_keeps_the_contract(grid: Path) -> None:
    sweep = json.loads((grid / "sweep.json").read_text())
    assert {"schema", "command", "created", "grid", "jobs", "snapshot"} <= set(sweep)
    assert (grid / sweep["snapshot"]["path"] / "train" / "worker.py").exists()
    for g in sweep["grid"]:
        folder = grid / g["folder"]
        assert g["folder"].endswith(g["identity"][:8]) and status(folder)["identity"] == g["identity"]
        assert {"config.yaml", "manifest.json", "status.json", "metrics.jsonl", "logs"} <= {
            p.name for p in folder.iterdir()
        }
        host = json.loads((folder / "manifest.json").read_text())["hosts"][0]
        assert host["torch"] and host["threads"] >= 1 and host["code"]["src_hash"] == sweep["snapshot"]["hash"]
        assert "attention backend:" in (folder / "logs" / "rank0.log").read_text()


def test_table_and_report(grid: Path) -> None:
    out = (grid.parents[1] / "stdout").read_text()
    assert "6 ok" in out and "report:" in out
    for name in ("report.html", "report.md", "summary.csv"):
        assert (grid / name).stat().st_size > 100
    assert list((grid / "plots").glob("*.svg"))


def test_rerun_keeps_finished_points(grid: Path) -> None:
    before = {p: (p / "metrics.jsonl").read_bytes() for p in points(grid).values()}
    done = train(
        "-m", "reduction=zero2,zero2o", "micro_batch=12,8,4,4", "steps=6", "name=grid", cwd=grid.parents[1]
    )  # another order, one point twice
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kept" in done.stdout and "merged" in done.stdout
    assert {p: (p / "metrics.jsonl").read_bytes() for p in points(grid).values()} == before


def test_single_run_takes_the_same_path(tmp_path: Path) -> None:
    done = train(*TINY, "steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = (tmp_path / "outputs").iterdir()
    (point,) = points(sweep).values()
    assert status(point)["status"] == "ok"


def test_two_ranks_match_one_process(tmp_path: Path) -> None:
    """The same global batch on two ranks, and on one process with two micro-batches, in fp64."""
    common = [*TINY, "precision=fp64", "steps=3", "micro_batch=2", "global_batch=4"]
    done = train("-m", *common, "reduction=ddp,zero2o", "nproc=1,2", "name=x", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = points(tmp_path / "outputs" / "x").values()
    by = {(frozen(p)["reduction"]["name"], frozen(p)["nproc"]): metrics(p) for p in found}
    for reduction in ("ddp", "zero2o"):
        for a, b in zip(by[reduction, 1], by[reduction, 2], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-9)


@pytest.mark.slow
def test_layers_compile(tmp_path: Path) -> None:
    done = train("-m", *TINY, "steps=3", "compile=none,layer", "memory=full_recompute", "name=x", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [metrics(p) for p in points(tmp_path / "outputs" / "x").values()]
    assert len(runs) == 2
    for run in runs[1:]:
        assert [m["loss"] for m in run] == pytest.approx([m["loss"] for m in runs[0]], rel=1e-5)


def test_named_grid_and_command_line_wins(tmp_path: Path) -> None:
    done = train(
        "-m", "sweeps=dp2_reductions", "model=debug", "micro_batch=1,2", "compile=none", "plan=true", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pending") == 12  # 5 reductions x 2, and zero2o with recompute x 2
    assert not (tmp_path / "outputs").exists()


def test_recipe_yields_to_the_command_line(tmp_path: Path) -> None:
    done = train("--cfg", "job", "recipe=dense_1b_h200", "micro_batch=2", cwd=tmp_path)
    cfg = yaml.safe_load(done.stdout)
    assert (cfg["model"]["name"], cfg["compile"]["name"], cfg["seq_len"], cfg["micro_batch"]) == (
        "dense_1b",
        "layer",
        2048,
        2,
    )


@pytest.mark.slow
def test_make_sweep_from_a_plain_copy(tmp_path: Path) -> None:
    """`make sweep` of a checkout elsewhere, with nothing installed, on a path with a space."""
    import subprocess
    import sys

    copy = tmp_path / "a check out"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "outputs", ".whl*", "__pycache__", ".*_cache")
    )
    done = subprocess.run(
        ["make", "sweep", f"PYTHON={sys.executable}"], cwd=copy, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "6 ok" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_dense_1b_on_a_gpu(tmp_path: Path) -> None:
    done = train(
        "model=dense_1b",
        "data=fake",
        "seq_len=2048",
        "micro_batch=16",
        "compile=layer",
        "steps=8",
        "name=x",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = points(tmp_path / "outputs" / "x").values()
    assert status(point)["summary"]["memory_kind"] == "device" and metrics(point)[-1]["perf/mfu"] > 30


@pytest.mark.gpu
def test_compiled_points_fork_from_the_warm_server_on_a_gpu(tmp_path: Path) -> None:
    """Inductor is imported before the fork; nothing of that may touch the GPU."""
    done = train("-m", *TINY, "steps=3", "compile=layer", "micro_batch=1,2", "nproc=1", "name=x", cwd=tmp_path)
    assert done.returncode == 0 and "2 ok" in done.stdout, done.stdout + done.stderr
