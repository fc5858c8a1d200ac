"""The report's files: complete, self-contained, the same bytes for the same runs, at any moment of a sweep."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from synth import Point, folder_name, standard_grid, write_point, write_sweep

from analysis.load import load
from analysis.page import content, markdown
from analysis.plots import draw, knob
from analysis.plots.heat import heatmap
from analysis.published import nearby
from analysis.rank import rank
from analysis.report import write_report


def rich_grid() -> list[Point]:
    """Every kind of plot has data here: three knobs, devices, kinds of memory, timed parts."""
    points = []
    for i, (reduction, nproc, mb, recompute) in enumerate(
        (r, n, m, c) for r in ("zero2", "zero2o") for n in (2, 4, 8) for m in (4, 8, 16) for c in ("none", "full")
    ):
        failed = mb == 16 and recompute == "none"
        rate = nproc * 10_000 * mb / (mb + 2) * (0.8 if recompute == "full" else 1) * nproc**-0.05
        memory = 6 + mb * (5 if recompute == "none" else 2)
        points.append(
            Point(
                mb, reduction, rate, "oom" if failed else "ok", "rank 0: 2 GiB requested" if failed else "", nproc=nproc,
                done=1 if failed else None, seed=i, memory_gib=memory, config={"memory": {"recompute": recompute}},
                summary={"memory_by_kind": [{"weights": 4.0, "optimizer": 2.0, "activations": memory - 6}]},
                extra_metrics={"time/compute": 0.8 * mb * 2048 * nproc / rate, "time/comm": 0.15 * mb * 2048 * nproc / rate},
            )
        )  # fmt: skip
    return points


def words(folder: Path) -> str:
    """report.md without its plots, which take most of a report's time."""
    data = load(folder)
    ranked = rank(data)
    return markdown(content(folder.name, data, ranked, [], nearby(ranked)))


def digests(folder: Path) -> dict[str, str]:
    names = ["report.html", "report.md", "summary.csv", "summary.parquet"]
    files = [folder / name for name in names] + sorted((folder / "plots").iterdir())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_all_parts_are_written(tmp_path):
    folder = write_sweep(tmp_path / "s", rich_grid())
    page = write_report(folder)
    assert page == folder / "report.html"
    stems = {
        "mfu_by_micro_batch", "tokens_per_s_by_micro_batch", "peak_memory_by_micro_batch", "memory_by_kind", "pareto",
        "scaling", "step_parts", "step_times", "time_spent", "heatmap_tokens_per_s_micro_batch_reduction",
        "tokens_per_s_by_reduction",
        "tokens_per_s_by_memory_recompute",
    }  # fmt: skip
    assert {p.name for p in (folder / "plots").iterdir()} == {f"{s}.{e}" for s in stems for e in ("svg", "png")}
    for path in (folder / "plots").glob("*.svg"):
        ET.parse(path)
        text = path.read_text()
        assert "<dc:date>" not in text and "matplotlib.org" not in text.partition("<style")[2]
    for path in (folder / "plots").glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and b"Software" not in data
    csv, parquet = pd.read_csv(folder / "summary.csv"), pd.read_parquet(folder / "summary.parquet")
    assert len(csv) == len(parquet) == 36
    assert csv["tokens_per_s"].to_numpy() == pytest.approx(parquet["tokens_per_s"].to_numpy(), nan_ok=True)
    assert list(csv["micro_batch"]) == list(parquet["micro_batch"])


def test_the_load_of_experts_is_a_column_and_a_plot(tmp_path):
    load = {"layers.0": [0.5, 0.25, 0.25, 0.0], "layers.1": [0.25] * 4}
    points = [
        Point(mb, "fsdp", 1000 * mb, extra_metrics={"moe/imbalance": 1 + 1 / mb}, summary={"experts": {"load": load}})
        for mb in (2, 4)
    ]
    folder = write_sweep(tmp_path / "s", points)
    write_report(folder)
    assert (folder / "plots" / "expert_load.svg").exists()
    text = (folder / "report.md").read_text()
    header, _, best, second = [line for line in text.splitlines() if line.startswith("|")][:4]
    column = [c.strip() for c in header.split("|")].index("expert load")
    assert [row.split("|")[column].strip() for row in (best, second)] == ["1.25", "1.5"]
    assert pd.read_csv(folder / "summary.csv")["imbalance"].tolist() == [1.25, 1.5]


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    """The standard grid with its report."""
    folder = write_sweep(tmp_path_factory.mktemp("standard") / "sweep", standard_grid())
    write_report(folder)
    return folder


def test_the_answer_comes_first_with_the_command_that_reruns_it(standard):
    text = (standard / "report.md").read_text()
    assert text.index("## Best: reduction=zero2o micro_batch=12") < text.index("## All points")
    assert re.search(
        r"6\.\d % faster than the next, reduction=zero2o micro_batch=8 \(95 % interval 5\.\d to [67]\.\d %\)", text
    )
    assert "python -m train model=dense_1b reduction=zero2o micro_batch=12 nproc=2\n" in text
    assert "- oom: out of memory on rank 1: 2.0 GiB requested, 0.7 GiB free (zero2-mb48-" in text
    assert "of them (14 %) without a result" in text


def test_rerun_command_leaves_out_what_would_resume_the_sweep(tmp_path):
    given = ["model=dense_1b", "name='my sweep'", "repeats=3", "+env.X='a b'"]
    folder = write_sweep(tmp_path / "s", [Point(4, given=given)])
    assert "python -m train model=dense_1b \"+env.X='a b'\"\n" in words(folder)


def test_a_tie_is_said(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(4, "zero2", noise=0.05), Point(4, "zero2o", noise=0.05, seed=1)])
    assert "A tie: it can't be told apart from reduction=" in words(folder)


def test_each_model_has_its_own_answer(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(4, model="a", rate=90_000), Point(8, model="b", rate=20_000)])
    text = words(folder)
    assert "## Best (model a)" in text and "## Best (model b)" in text and "% faster" not in text


def test_published_results_of_the_same_device_are_shown(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(4), Point(8, seed=1)])
    for path in folder.glob("*/manifest.json"):
        path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    text = words(folder)
    assert "## Published results on this hardware" in text and "llm-foundry" in text and "MPT-1b" in text
    assert "A100" not in text


def test_same_runs_same_bytes(standard, tmp_path):
    """Another folder order, directory, time zone, language, hash seed and process, and over an older report."""
    first, second = standard, tmp_path / "two" / "sweep"
    second.mkdir(parents=True)
    names = sorted(path.name for path in first.iterdir())
    random.Random(5).shuffle(names)
    for name in names:
        (shutil.copytree if (first / name).is_dir() else shutil.copy)(first / name, second / name)
        os.utime(second / name, (1e9, 1e9))
    before = digests(first)
    (second / "report.html").write_text("older")
    environment = os.environ | {
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": str(Path.cwd()),
    }
    command = [sys.executable, "-m", "analysis", "report", "sweep"]
    subprocess.run(command, check=True, cwd=second.parent, env=environment, stdout=subprocess.DEVNULL)
    assert digests(second) == before


def test_report_of_a_running_sweep_and_its_growth(tmp_path):
    late = Point(12, rate=60_000, seed=3)
    unborn = Point(**{**vars(late), "started": False})
    folder = write_sweep(tmp_path / "s", [Point(4), Point(8, rate=55_000, seed=2), unborn])
    write_point(folder / folder_name(late), Point(**{**vars(late), "status": "running", "done": 9}))
    text = words(folder)
    assert "## Best: micro_batch=8" in text and "3 points: 2 ok, 1 running" in text
    shutil.rmtree(folder / folder_name(late))
    write_point(folder / folder_name(late), late)
    write_report(folder)
    assert "## Best: micro_batch=12" in (folder / "report.md").read_text()


@pytest.mark.parametrize("done", [0, 3])
def test_report_before_anything_has_finished(tmp_path, done):
    folder = write_sweep(tmp_path / "s", [Point(4, status="running", done=done), Point(8, started=False)])
    assert "No finished point yet." in write_report(folder).read_text("utf-8")


@pytest.mark.parametrize("status", ["oom", "invalid", "lost"])
def test_report_when_everything_failed(tmp_path, status):
    folder = write_sweep(tmp_path / "s", [Point(mb, status=status, reason="the reason", done=0) for mb in (4, 8)])
    assert "the reason" in words(folder)


def test_old_plots_go(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point()])
    (folder / "plots").mkdir()
    (folder / "plots" / "gone_by_now.svg").write_text("x")
    (folder / "plots" / "notes.txt").write_text("mine")
    write_report(folder)
    assert not (folder / "plots" / "gone_by_now.svg").exists() and (folder / "plots" / "notes.txt").exists()


class Loaded(HTMLParser):
    """What the page would fetch, and script in attributes."""

    def __init__(self):
        super().__init__()
        self.sources, self.handlers = [], []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_nothing_on_the_page_comes_from_a_run_unescaped_or_from_the_net(tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'single' {{ 7*7 }}"
    points = [Point(4), Point(8, status="crashed", reason=attack, done=0, given=[f"data.path={attack}"])]
    folder = write_sweep(tmp_path / "s", points)
    meta = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(meta | {"command": attack}))
    text = write_report(folder).read_text("utf-8")
    assert "<script>alert" not in text and "onerror=alert(2)>" not in text and "{{ 7*7 }}" in text
    assert text.count("<script>") == 1
    loaded = Loaded()
    loaded.feed(text)
    assert len(loaded.sources) > 2 and all(source.startswith("data:") for source in loaded.sources)
    assert loaded.handlers == []
    assert "@import" not in text and "url(" not in text


def test_no_absolute_path_is_told(standard):
    for name in ("report.html", "report.md", "summary.csv"):
        assert str(standard.parent) not in (standard / name).read_text("utf-8")


def test_several_sweeps_in_one_report(tmp_path):
    a = write_sweep(tmp_path / "a", [Point(4)])
    b = write_sweep(tmp_path / "b", [Point(8, rate=60_000)])
    page = write_report([a, b], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html" and "micro_batch=8" in page.read_text("utf-8")
    assert not (a / "report.html").exists()


@pytest.mark.parametrize("count", [2, 4, 50])
@pytest.mark.parametrize("reductions", [("zero2",), ("zero2", "zero2o", "ddp")])
def test_every_point_and_interval_is_inside_the_axes(tmp_path, monkeypatch, count, reductions):
    points = [
        Point(mb, r, 30_000 * mb / (mb + 3) + 500 * i, seed=100 * i + mb, steps=20)
        for i, r in enumerate(reductions) for mb in range(1, count + 1)
    ]  # fmt: skip
    ranked = rank(load(write_sweep(tmp_path / "s", points)))
    figures = []
    monkeypatch.setattr(knob, "finish", lambda fig, *rest: figures.append(fig))
    knob.against(ranked, "micro_batch", "tokens_per_s")
    knob.memory(ranked, "micro_batch")
    for fig, y in zip(figures, ("tokens_per_s", "peak_mem_gib"), strict=True):
        ax = fig.axes[0]
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        drawn = [line for line in ax.lines if line.get_label() in (*reductions, "_child0")]
        assert sum(len(line.get_xdata()) for line in drawn) == count * len(reductions)
        for line in drawn:
            assert left < min(line.get_xdata()) and max(line.get_xdata()) < right
        values = ranked.rows[y]
        assert low < values.min() and values.max() < high
        if y == "tokens_per_s":
            assert low < ranked.rows[f"{y}_lo"].min() and ranked.rows[f"{y}_hi"].max() < high
            assert high - low < 3 * (values.max() - values.min()) + 0.1 * values.max()  # and fills them


def test_an_absurd_interval_does_not_flatten_the_points(tmp_path, monkeypatch):
    ranked = rank(load(write_sweep(tmp_path / "wild", [Point(1, rate=20_000), Point(2, rate=30_000)])))
    ranked.rows.loc[1, "half"] = 12.0  # as a run of few and wildly different steps has it
    largest = ranked.rows["tokens_per_s"].max()
    limits = []
    monkeypatch.setattr(knob, "finish", lambda fig, *texts: limits.append((fig.axes[0].get_ylim(), texts[-1])))
    knob.against(ranked, "micro_batch", "tokens_per_s")
    ((low, high), caption), *_ = limits
    assert low == 0 and high == pytest.approx(2 * largest) and "wider than it can show" in caption


def test_failed_cells_are_hatched(tmp_path):
    ranked = rank(load(write_sweep(tmp_path / "s", standard_grid())))
    plot = heatmap(ranked, "micro_batch", "reduction", "mfu")
    assert plot is not None and "Hatched" in plot.caption
    assert plot.svg.decode().count("url(#h") >= 3  # one hatch pattern for each of oom, infeasible, pending


def test_one_point_has_no_plot_against_a_knob(tmp_path):
    data = load(write_sweep(tmp_path / "s", [Point()]))
    assert {plot.name for plot in draw(rank(data), data.points)} == {"step_times", "time_spent"}
