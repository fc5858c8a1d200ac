"""Reading run folders that nobody promised to keep tidy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from synth import Point, folder_name, identity, metrics_lines, standard_grid, write_point, write_sweep

from analysis.census import census
from analysis.errors import BadInput
from analysis.files import flatten, read_config
from analysis.load import NOT_KNOBS, load
from analysis.rank import rank
from train.config import NOT_IDENTITY


def test_configuration_by_blocks_equals_the_whole(tmp_path):
    for i, point in enumerate(standard_grid()):
        path = tmp_path / f"{i}.yaml"
        path.write_text(yaml.safe_dump(point.configuration(), sort_keys=bool(i % 2)))
        assert read_config(path) == flatten(point.configuration())


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12))
trees = st.recursive(
    scalars,
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=6), kids, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), trees, max_size=5), st.booleans(), st.sampled_from([20, 80]))
def test_any_yaml_by_blocks_equals_the_whole(tmp_path_factory, config, unicode, width):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=unicode, width=width), encoding="utf-8")
    assert str(read_config(path)) == str(flatten(yaml.safe_load(path.read_text("utf-8"))))


@pytest.mark.parametrize(
    "text",
    [
        "a: &x 1\nb: *x\n",
        "a: [1,\n  2]\nb: {c: 3,\n d: 4}\n",
        "---\na: 1\n...\n",
        "# c\na:\n- 1\n- 2\nb: |\n  x\n\n  y\n",
    ],
)
def test_yaml_that_reaches_across_lines(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert read_config(path) == flatten(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text", ["", "a: [", "- 1\n- 2\n", "\x00\x01", "a: b: c", "!!python/object/apply:os.system ['x']"]
)
def test_unreadable_configuration_is_no_configuration(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    assert read_config(tmp_path / "c.yaml") == {}


def test_nothing_in_a_run_folder_executes(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    point = folder / folder_name(Point())
    mark = tmp_path / "executed"
    attack = f"!!python/object/apply:os.system ['touch {mark}']"
    (point / "config.yaml").write_text(f"model: {attack}\nmicro_batch: 4\n")
    (point / "model.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    (point / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    subprocess.run(
        [sys.executable, "-m", "analysis", "table", str(folder)], cwd=Path.cwd(), check=True, stdout=subprocess.DEVNULL
    )
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "folder", "array", "other schema", "not utf-8"])
def test_a_status_that_can_not_be_read_is_pending(tmp_path, damage):
    folder = write_sweep(tmp_path / "s", [Point(4), Point(8)])
    path = folder / folder_name(Point(4)) / "status.json"
    text = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        content = {
            "empty": b"",
            "half": text[:40],
            "array": b"[]",
            "other schema": b'{"state": 3}',
            "not utf-8": b"\xff\xfe{",
        }
        path.write_bytes(content[damage])
    found = census(load(folder).points)
    assert found.counts == {"ok": 1, "pending": 1}
    assert found.reasons[0][1] == ("not started" if damage == "missing" else "no readable status.json")


@pytest.mark.parametrize("missing", ["manifest.json", "config.yaml", "metrics.jsonl"])
def test_other_missing_files_are_tolerated(tmp_path, missing):
    folder = write_sweep(tmp_path / "s", [Point(4, rate=40_000), Point(8, rate=50_000)])
    (folder / folder_name(Point(4, rate=40_000)) / missing).unlink()
    data = load(folder)
    assert len(data.points) == 2 and census(data.points).counts == {"ok": 2}
    assert len(rank(data).rows) == 2


@pytest.mark.parametrize("key", ["summary", "ranks", "started", "ended", "attempt", "identity", "reason", "schema"])
@pytest.mark.parametrize("value", [None, [], {}, "text", 3])
def test_any_key_of_status_may_be_missing_or_odd(tmp_path, key, value):
    folder = write_sweep(tmp_path / "s", [Point()])
    path = folder / folder_name(Point()) / "status.json"
    status = json.loads(path.read_text())
    status[key] = value
    path.write_text(json.dumps(status))
    assert rank(load(folder)).rows.iloc[0]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "key",
    [
        "flops_per_token",
        "peak",
        "rank_peak_mem_gib",
        "rank_step_peak_mem_gib",
        "seconds",
        "telemetry",
        "memory_by_kind",
    ],
)
@pytest.mark.parametrize("value", [None, [], {}, "text", 3, [None, "x"]])
def test_any_key_of_summary_may_be_missing_or_odd(tmp_path, key, value):
    rows = rank(load(write_sweep(tmp_path / "s", [Point(summary={key: value})]))).rows
    assert rows.iloc[0]["tokens_per_s"] > 0


def test_a_renamed_slug_is_found_by_its_hash(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    (folder / folder_name(Point())).rename(folder / f"new-name-{identity(Point())[:8]}")
    assert census(load(folder).points).line() == "1 point: 1 ok"


def test_the_grid_can_not_lead_out_of_the_sweep(tmp_path):
    write_point(tmp_path / "secret", Point())
    folder = write_sweep(tmp_path / "s", [Point(8)])
    meta = json.loads((folder / "sweep.json").read_text())
    meta["grid"].append({"identity": "0" * 64, "folder": "../secret", "overrides": []})
    (folder / "sweep.json").write_text(json.dumps(meta))
    assert census(load(folder).points).counts == {"ok": 1, "pending": 1}


def test_mixtures(tmp_path):
    a = write_sweep(tmp_path / "a", standard_grid())
    b = write_sweep(tmp_path / "b", [Point(6, "ddp", 45_000, seed=9)])
    both = load([a, b])
    assert len(both.points) == 10 and {s.name for s in both.sweeps} == {"a", "b"}
    assert len(load(tmp_path).points) == 10
    assert len(load([a, a]).points) == 9
    assert len(load(a / folder_name(Point(4, "zero2", 40_000))).points) == 1


def test_reads_while_it_grows(tmp_path):
    """Half of the last line, as a reader meets it while the writer is at work."""
    folder = write_sweep(tmp_path / "s", [Point(status="running")])
    path = folder / folder_name(Point()) / "metrics.jsonl"
    text = "".join(line + "\n" for line in metrics_lines(Point()))
    for cut in (0, 1, 50, 150, 301, len(text) // 2, len(text) - 3):
        path.write_text(text[:cut])
        data = load(folder)
        assert data.points.iloc[0]["status"] == "running"
        assert data.points.iloc[0]["steps_done"] == text[:cut].count("\n") + (text[:cut].endswith("}"))


def test_earlier_attempts_do_not_mix_but_cost_time(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    point = folder / folder_name(Point())
    write_point(point / "attempts" / "1", Point(rate=10, status="timeout"))
    row = load(folder).points.iloc[0]
    assert row["tokens_per_s"] == pytest.approx(50_000, rel=0.01)
    assert row["attempts_s"] >= 60


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "no such folder"),
        ("empty", "not a sweep"),
        ("file.txt", "not a folder"),
        ("data.csv", "has none of the columns"),
    ],
)
def test_bad_folders(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=message):
        load(tmp_path / name)


def test_prime_rl_file_monitor(tmp_path):
    """Its lines carry some of the keys each, several lines a step."""
    monitor = tmp_path / "run" / "monitors" / "file"
    monitor.mkdir(parents=True)
    lines = []
    for line in metrics_lines(Point(rate=44_000)):
        row = json.loads(line)
        lines.append({"step": row["step"], "time/step": row["time/step"], "loss/mean": 2.0})
        lines.append(
            {"step": row["step"], "perf/throughput": row["perf/throughput"], "perf/mfu": 30.0, "perf/peak_memory": 61.5}
        )
    (monitor / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    for path in (tmp_path / "run", monitor, monitor / "metrics.jsonl"):
        row = rank(load(path)).rows.iloc[0]
        assert row["tokens_per_s"] == pytest.approx(44_000, rel=0.01)
        assert (row["mfu"], row["peak_mem_gib"], row["steady_steps"]) == (30.0, 61.5, 37)


def test_imported_rows_stand_beside_ours_but_are_not_ranked_with_them(tmp_path):
    ours = write_sweep(tmp_path / "s", [Point(4), Point(8, seed=1)])
    other = tmp_path / "peer.csv"
    other.write_text(
        "# measured by hand\nname,gpus,mb,tps,mfu,mem_gib\npeer a,2,4,61000,22.5,70\npeer b,2,8,59000,21.9,75\n"
    )
    rows = rank(load([ours, other])).rows
    assert list(rows.groupby("group").size()) == [2, 2]
    peer = rows[rows["cfg:name"] == "peer a"].iloc[0]
    numbers = [peer[c] for c in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "cfg:micro_batch")]
    assert numbers == pytest.approx([61_000, 30_500, 22.5, 4])


def test_csv_of_steps(tmp_path):
    import numpy as np
    import pandas as pd
    from synth import step_times

    frames = []
    for run, rate in (("a", 40_000.0), ("b", 50_000.0)):
        seconds = step_times(Point(rate=rate))
        frame = pd.DataFrame({"run": run, "step": np.arange(40), "step_time": seconds, "throughput": 16384 / seconds})
        frames.append(frame.assign(recompute="full"))
    pd.concat(frames).sample(frac=1, random_state=1).to_csv(tmp_path / "steps.csv", index=False)
    rows = rank(load(tmp_path / "steps.csv")).rows
    assert list(rows["point"]) == ["b", "a"] and list(rows["steady_steps"]) == [37, 37]
    assert rows["tokens_per_s"].to_numpy() == pytest.approx([50_000, 40_000], rel=0.01)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_one_line(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    folder.chmod(0)
    try:
        done = subprocess.run([sys.executable, "-m", "analysis", "table", str(folder)], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
    finally:
        folder.chmod(0o755)


@pytest.mark.slow
def test_ten_thousand_runs(tmp_path):
    """In a fresh process: loaded, ranked and printed in less than a gigabyte."""
    reductions = ("zero2", "zero2o")
    points = [Point(1 + i % 50, reductions[i // 50 % 2], 30_000 + i % 997, steps=20, seed=i) for i in range(10_000)]
    for i, point in enumerate(points):
        point.config = {"seed": i // 100}
    folder = write_sweep(tmp_path / "s", points)
    code = (
        f"import resource; from analysis.table import render; text = render({str(folder)!r}); print(text.splitlines()[-1]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    census, memory = done.stdout.splitlines()
    assert census == "10000 points: 10000 ok"
    assert int(memory) < 2**20  # KiB


def test_what_is_no_identity_is_no_knob():
    """Else two copies of one sweep that differ there would be two points."""
    assert set(NOT_IDENTITY) <= set(NOT_KNOBS)
