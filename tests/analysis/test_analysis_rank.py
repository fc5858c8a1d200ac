"""From folders to ranked rows: truths recovered, ties, repeats, provenance, and what must not change a row."""

import json
import math
import random
import shutil

import numpy as np
import pytest
from synth import CAPACITY_GIB, Point, folder_name, standard_grid, write_point, write_sweep

from analysis.answer import answers
from analysis.census import census
from analysis.load import STATUSES, load
from analysis.rank import rank, shared_ranks


def rows_of(folder):
    return rank(load(folder)).rows


def test_truths_come_back_with_their_intervals(tmp_path):
    points = [Point(mb, r, 30_000 + 999 * mb + 2_000 * (r == "zero2o"), seed=mb, phi=0.4, outliers=0.03)
              for r in ("zero2", "zero2o") for mb in range(1, 17)]  # fmt: skip
    rows = rows_of(write_sweep(tmp_path / "s", points))
    truth = [30_000 + 999 * r["cfg:micro_batch"] + 2_000 * (r["cfg:reduction"] == "zero2o") for _, r in rows.iterrows()]
    assert np.abs(rows["tokens_per_s"] / truth - 1).max() < 0.03
    inside = (rows["tokens_per_s_lo"] <= truth) & (truth <= rows["tokens_per_s_hi"])
    assert inside.mean() > 0.8
    assert rows["tokens_per_s"].is_monotonic_decreasing
    assert (rows["steady_steps"] <= 37).all() and (rows["dropped_steps"] >= 3).all()


def test_numbers_are_not_sums_over_steps_or_ranks_nor_the_last_step(tmp_path):
    point = Point(
        8, "zero2", 50_000, noise=0.001, nproc=8, summary={"rank_step_peak_mem_gib": [20.0, 31.5, 22.0] + [20.0] * 5}
    )
    folder = write_sweep(tmp_path / "s", [point])
    path = folder / folder_name(point) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1]) | {"time/step": 99.0, "perf/throughput": 1.0, "perf/mfu": 0.001}
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    row = rows_of(folder).iloc[0]
    assert row["tokens_per_s"] == pytest.approx(50_000, rel=0.002)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(50_000 / 8, rel=0.002)
    assert row["mfu"] == pytest.approx(100 * 50_000 / 8 * 7.2e9 / 989.4e12, rel=0.002)
    assert row["peak_mem_gib"] == 31.5
    assert row["capacity_gib"] == CAPACITY_GIB


def test_mfu_follows_from_flops_where_the_run_did_not_write_it(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(rate=40_000)])
    path = folder / folder_name(Point(rate=40_000)) / "metrics.jsonl"
    kept = [{k: v for k, v in json.loads(line).items() if k in ("step", "time/step", "loss")} for line in path.open()]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    row = rows_of(folder).iloc[0]
    assert row["tokens_per_s"] == pytest.approx(40_000, rel=0.01)
    assert row["mfu"] == pytest.approx(100 * 20_000 * 7.2e9 / 989.4e12, rel=0.01)


def test_census_adds_up_to_the_grid(tmp_path):
    points = [Point(i + 1, status=s, reason=f"why {s}", done=5) for i, s in enumerate(STATUSES)] + [
        Point(99, started=False)
    ]
    folder = write_sweep(tmp_path / "s", points)
    found = census(load(folder).points)
    assert found.counts == {s: 2 if s == "pending" else 1 for s in STATUSES}
    assert found.total == len(points)
    assert {(s, r) for s, r, _ in found.reasons} == {
        (s, f"why {s}") for s in STATUSES if s not in ("ok", "running")
    } | {("pending", "not started")}


def test_a_folder_outside_the_grid_is_counted_apart(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(4)])
    write_point(folder / "stray-12345678", Point(8))
    found = census(load(folder).points)
    assert (found.total, found.extra) == (1, 1)
    assert found.line() == "1 point: 1 ok (and 1 folder outside the grid)"


@pytest.mark.parametrize("status", [s for s in STATUSES if s != "ok"])
def test_adding_a_failed_point_changes_no_finished_row(tmp_path, status):
    good = [Point(mb, "zero2", 30_000 + 1000 * mb, seed=mb, repeat=r) for mb in (4, 8) for r in (0, 1)]
    before = rows_of(write_sweep(tmp_path / "a", good))
    extra = Point(4, "zero2", 99_000, status=status, reason="x", done=20, repeat=2)
    after = rows_of(write_sweep(tmp_path / "b", [extra, *good]))
    finished = after[after["rank"].notna()]
    columns = [c for c in before.columns if c not in ("sweep", "path", "index")]
    assert finished[columns].reset_index(drop=True).astype(str).equals(before[columns].astype(str))
    assert len(after) == len(before) + 1


def test_order_of_files_does_not_matter(tmp_path):
    a = write_sweep(tmp_path / "a" / "s", standard_grid())
    b = tmp_path / "b" / "s"
    b.mkdir(parents=True)
    names = [path.name for path in a.iterdir()]
    random.Random(3).shuffle(names)
    for name in names:
        (shutil.copytree if (a / name).is_dir() else shutil.copy)(a / name, b / name)
    meta = json.loads((b / "sweep.json").read_text())
    meta["grid"].reverse()
    (b / "sweep.json").write_text(json.dumps(meta))
    left, right = rows_of(a).drop(columns="path"), rows_of(b).drop(columns="path")
    assert left.astype(str).equals(right.astype(str))


def test_equal_points_are_ties_and_different_ones_are_not(tmp_path):
    ties = []
    for seed in range(12):
        points = [
            Point(4, "ddp", 50_000, seed=1000 + seed, phi=0.3),
            Point(4, "zero2", 50_000, seed=2000 + seed, phi=0.3),
            Point(4, "fsdp", 40_000, seed=3000 + seed, phi=0.3),
        ]
        rows = rows_of(write_sweep(tmp_path / str(seed), points))
        assert rows.iloc[2]["cfg:reduction"] == "fsdp" and rows.iloc[2]["rank"] == 3 and not rows.iloc[2]["tie"]
        ties.append(rows.iloc[1]["tie"] and list(rows["rank"]) == [1, 1, 3])
    assert np.mean(ties) >= 0.75


def test_two_steps_decide_nothing(tmp_path):
    """Without an interval nothing is known of the noise, which is not the same as none."""
    few = {"steps": 3, "warmup": (8.0,)}
    points = [Point(4, rate=50_000), Point(6, rate=40_000), Point(8, rate=60_000, **few), Point(12, rate=20_000, **few)]
    ranked = rank(load(write_sweep(tmp_path / "s", points)))
    rows = ranked.rows.set_index("cfg:micro_batch")
    assert rows["half"].isna().tolist() == [mb in (8, 12) for mb in rows.index]
    assert "noisy" not in rows.loc[8, "flags"] and "short" in rows.loc[8, "flags"]
    assert (rows["rank"] == 1).all() and rows["tie"].sum() == 3
    (answer,) = answers(ranked)
    assert "faster" not in answer.margin and answer.margin.startswith("A tie: it can't be told apart from"), (
        answer.margin
    )
    alone = rank(load(write_sweep(tmp_path / "t", points[:2])))
    (answer,) = answers(alone)
    assert "faster than the next, micro_batch=6 (95 % interval" in answer.margin and not alone.rows["tie"].any()


def test_repeats_are_one_row_that_knows_the_variation_between_runs(tmp_path):
    """Run-to-run noise of 2 % on steps that vary by 0.1 %: one run's interval is too narrow, the combined one is not."""
    rng = np.random.default_rng(7)
    points = [
        Point(mb, "zero2", 50_000 * math.exp(0.02 * rng.normal()), noise=0.001, steps=20, repeat=repeat, seed=10 * mb + repeat)
        for mb in range(1, 61) for repeat in range(3)
    ]  # fmt: skip
    ranked = rank(load(write_sweep(tmp_path / "s", points)))
    assert ranked.knobs == ["micro_batch"] and len(ranked.rows) == 60 and (ranked.rows["runs"] == 3).all()
    assert 0.88 <= held(ranked.rows, 50_000) <= 1.0
    singles = rows_of(write_sweep(tmp_path / "single", [p for p in points if p.repeat == 0]))
    assert held(singles, 50_000) < 0.3


def held(rows, truth):
    return float(((rows["tokens_per_s_lo"] <= truth) & (rows["tokens_per_s_hi"] >= truth)).mean())


def test_a_copied_folder_is_not_a_repeat(tmp_path):
    folder = write_sweep(tmp_path / "a", [Point(4), Point(8)])
    shutil.copytree(folder, tmp_path / "b")
    data = load([folder, tmp_path / "b"])
    assert len(data.points) == 2 and "copied point" in data.notes[0]
    assert list(rank(data).rows["runs"]) == [1, 1]


def test_the_same_point_in_two_sweeps_is_a_repeat(tmp_path):
    write_sweep(tmp_path / "a", [Point(4, seed=1)])
    write_sweep(tmp_path / "b", [Point(4, seed=2)])
    assert list(rank(load([tmp_path / "a", tmp_path / "b"])).rows["runs"]) == [2]
    assert list(rank(load(tmp_path)).rows["runs"]) == [2]


@pytest.mark.parametrize(
    ("differs", "other"),
    [
        ("code", Point(8, host={"code": {"commit": "ffff", "dirty": False, "src_hash": "other"}})),
        ("torch", Point(8, host={"torch": "2.12.0"})),
        ("driver", Point(8, host={"driver": "570.1"})),
        ("hardware", Point(8, host={"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]})),
        ("conventions", Point(8, summary={"peak": {"flops": 1000e12, "kind": "vendor", "device": "NVIDIA H200"}})),
        ("conventions", Point(8, summary={"peak": {"flops": 1e15, "kind": "vendor", "source": "another sheet"}})),
        ("conventions", Point(8, summary={"peak": {"flops": 989.4e12, "kind": "measured", "device": "NVIDIA H200"}})),
    ],
)
def test_rows_of_other_provenance_are_not_ranked_together(tmp_path, differs, other):
    other.rate = 90_000
    ranked = rank(load(write_sweep(tmp_path / "s", [Point(4), Point(12, seed=1), other])))
    assert ranked.differs == [differs]
    assert list(ranked.rows["group"]) == [0, 0, 1]
    assert ranked.rows.iloc[2]["rank"] == 1 and ranked.rows.iloc[0]["rank"] == 1


def test_fp8_and_bf16_are_ranked_together_and_the_peak_is_said(tmp_path):
    eight = {"flops": 1978.9e12, "kind": "vendor", "source": "vendor sheet", "device": "NVIDIA H200", "dtype": "fp8"}
    ranked = rank(load(write_sweep(tmp_path / "s", [Point(4), Point(8, summary={"peak": eight})])))
    assert ranked.differs == []
    assert sorted("fp8-peak" in flags for flags in ranked.rows["flags"]) == [False, True]


def test_a_measured_peak_that_varies_does_not_split_the_table(tmp_path):
    points = [
        Point(mb, host={"gpus": [], "cpu": "some CPU"}, config={"device": "cpu"},
              summary={"peak": {"flops": 1e11 + mb, "kind": "measured", "device": "cpu"}})
        for mb in (4, 8)
    ]  # fmt: skip
    ranked = rank(load(write_sweep(tmp_path / "s", points)))
    assert ranked.differs == []
    assert all("measured-peak" in flags for flags in ranked.rows["flags"])


@pytest.mark.parametrize(
    ("flag", "point"),
    [
        ("throttled", Point(extra_metrics={"gpu/throttle": 4})),
        ("throttled", Point(summary={"telemetry": {"throttle_reasons": ["sw_power_cap"]}})),
        ("foreign-process", Point(summary={"telemetry": {"foreign_processes": [{"pid": 1}]}})),
        ("replay-mismatch", Point(summary={"replay_match": False})),
        ("short", Point(steps=9)),
        ("noisy", Point(noise=0.3)),
        ("outliers", Point(outliers=0.3, steps=60)),
        ("data-bound", Point(extra_metrics={"time/data": 0.1})),
        ("memory-tight", Point(memory_gib=138.0)),
        ("above-peak", Point(rate=90_000_000)),
        ("forced-balance", Point(summary={"experts": {"load": {}, "forced": True}})),
    ],
)
def test_doubtful_rows_are_flagged(tmp_path, flag, point):
    assert flag in rows_of(write_sweep(tmp_path / "s", [point])).iloc[0]["flags"]


def test_a_clean_row_has_no_flags(tmp_path):
    assert rows_of(write_sweep(tmp_path / "s", [Point()])).iloc[0]["flags"] == ()


def test_wandering_clocks_are_flagged(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    path = folder / folder_name(Point()) / "metrics.jsonl"
    lines = [json.loads(line) | {"gpu/sm_clock_mhz": 1980 - 10 * i} for i, line in enumerate(path.open())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "clocks" in rows_of(folder).iloc[0]["flags"]


def test_one_step_is_no_measurement(tmp_path):
    rows = rows_of(write_sweep(tmp_path / "s", [Point(steps=1), Point(8, steps=4)]))
    assert math.isnan(rows[rows["cfg:steps"] == 1].iloc[0]["tokens_per_s"])
    assert rows[rows["cfg:steps"] == 4].iloc[0]["rank"] == 1


def test_knobs_are_what_the_command_line_swept(tmp_path):
    """grad_accum follows from micro_batch under a fixed global batch; a group's inner keys follow from its name."""
    points = [
        Point(mb, r, config={"grad_accum": 16 // mb, "reduction": {"name": r, "bucket_mb": 25.0 if r == "zero2" else 50.0}})
        for mb in (4, 8) for r in ("zero2", "zero2o")
    ]  # fmt: skip
    for p in points:
        p.given = [f"reduction={p.reduction}", f"micro_batch={p.micro_batch}"]
    assert rank(load(write_sweep(tmp_path / "s", points))).knobs == ["reduction", "micro_batch"]


@pytest.mark.parametrize(
    ("score", "noise", "ranks"),
    [
        ([3.0, 2.0, 1.0], [0.1, 0.1, 0.1], [1, 2, 3]),
        ([1.0, 3.0, 2.0], [0.1, 0.1, 0.1], [3, 1, 2]),
        ([3.0, 2.9, 2.8, 1.0], [0.1, 0.1, 0.1, 0.1], [1, 1, 3, 4]),  # a new rank begins where the first is left behind
        ([3.0, 2.0, 1.9], [0.1, 0.1, 5.0], [1, 2, 2]),  # a wide row shares the rank above it, never jumps over rows
        ([2.0, 2.0, 1.0], [0.0, 0.0, 0.0], [1, 1, 3]),
    ],
)
def test_shared_ranks(score, noise, ranks):
    assert list(shared_ranks(np.array(score), np.array(noise))) == ranks
