"""What `python -m analysis table`, `ls`, `compare`, `baseline`, `reference` and `watch` print, and how they refuse."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from synth import Point, folder_name, standard_grid, write_point, write_sweep

from analysis.__main__ import main
from analysis.published import _read, foundry_mfu, load_published
from analysis.table import render


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("table") / "grid", standard_grid())


def run(capsys, *args):
    """(exit code, lines of stdout, stderr) of one command, in this process."""
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out.splitlines(), out.err


def test_the_default_table(grid, capsys):
    code, lines, _ = run(capsys, "table", grid)
    assert code == 0
    assert " ".join(lines[0].split()) == "rank reduction micro-batch tokens/s ±95 % of best MFU % step s peak GiB steps"
    assert [line.split()[:3] for line in lines[2:8]] == [
        ["1", "zero2o", "12"], ["2", "zero2o", "8"], ["3", "zero2", "12"],
        ["4", "zero2o", "4"], ["5", "zero2", "8"], ["6", "zero2", "4"],
    ]  # fmt: skip
    text = "\n".join(lines)
    assert "zero2               48  oom         out of memory on rank 1: 2.0 GiB requested, 0.7 GiB free" in text
    assert "pending     not started" in text and "implied by zero2-mb48" in text
    assert lines[-1] == "9 points: 6 ok, 1 pending, 1 oom, 1 infeasible"


def test_by_keeps_the_best_of_each_value(grid, capsys):
    _, lines, _ = run(capsys, "table", grid, "--by", "reduction")
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "zero2o", "12"], ["3", "zero2", "12"]]
    assert lines[4] == ""
    _, lines, _ = run(capsys, "table", grid, "--by", "micro_batch", "--columns", "micro_batch,reduction,tokens_per_s")
    assert [line.split()[:2] for line in lines[2:5]] == [["12", "zero2o"], ["8", "zero2o"], ["4", "zero2o"]]


def test_sort_ranks_by_another_column_in_its_own_direction(grid, capsys):
    _, lines, _ = run(capsys, "table", grid, "--sort", "step_s", "--columns", "rank,step_s")
    values = [float(line.split()[1]) for line in lines[2:8]]
    assert values == sorted(values)
    _, lines, _ = run(capsys, "table", grid, "--sort", "peak_mem_gib", "--columns", "rank,peak_mem_gib")
    assert [line.split() for line in lines[2:8]] == [
        ["1=", "20"],
        ["1=", "20"],
        ["3=", "30"],
        ["3=", "30"],
        ["5=", "40"],
        ["5=", "40"],
    ]


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("micro_batch>=8", 4), ("micro_batch=4|12", 4), ("micro_batch=4.0", 2), ("reduction!=zero2", 3),
        ("reduction~ZERO2O", 3), ("status=ok", 6), ("status=ok,micro_batch<8,reduction=zero2", 1),
        ("mfu>16 and micro_batch=12", 2),
        ("model=dense_1b", 6), ("optim.lr<1e-3", 6), ("peak_mem_gib <= 30", 4),
    ],
)  # fmt: skip
def test_where(grid, capsys, condition, count):
    code, lines, _ = run(capsys, "table", grid, "--where", condition, "--columns", "rank")
    assert code == 0
    assert sum(re.fullmatch(r"\s*\d+=?", line) is not None for line in lines) == count
    assert lines[-1].startswith("9 points")


def test_csv_has_full_precision_and_every_row(grid, capsys):
    _, lines, _ = run(
        capsys, "table", grid, "--format", "csv", "--columns", "rank,reduction,micro_batch,status,tokens_per_s,reason"
    )
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    assert len(rows) == 9 and rows[0]["reduction"] == "zero2o" and len(rows[0]["tokens_per_s"]) > 8
    assert [r["status"] for r in rows[6:]].count("oom") == 1


def test_markdown_escapes_what_would_break_the_table(tmp_path, capsys):
    write_sweep(
        tmp_path / "s", [Point(4), Point(8, status="crashed", reason="a | b <script> \\ \n second line", done=0)]
    )
    _, lines, _ = run(capsys, "table", tmp_path / "s", "--format", "md")
    row = next(line for line in lines if "crashed" in line)
    assert "a \\| b &lt;script> \\\\ second line" in row
    tables = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables if "crashed" in line or "reason" in line}) == 1


def test_latex_escapes(grid, capsys):
    _, lines, _ = run(capsys, "table", grid, "--format", "latex", "--by", "reduction")
    assert lines[0].startswith("\\begin{tabular}{r") and lines[-1] == "\\end{tabular}"
    assert all(re.sub(r"\\%", "", line).count("%") == 0 for line in lines)


def test_pivot(grid, capsys):
    _, lines, _ = run(capsys, "table", grid, "--pivot", "micro_batch,reduction", "--sort", "mfu")
    cells = [line.split() for line in lines[2:]]
    assert [row[0] for row in cells] == ["4", "8", "12", "16", "48"]
    assert cells[3][1:] == ["pending"] and cells[4][1:] == ["oom", "infeasible"]
    assert float(cells[2][2]) > float(cells[2][1]) > float(cells[0][1])


def test_groups_are_printed_apart_with_the_reason(tmp_path, capsys):
    write_sweep(tmp_path / "s", [Point(4), Point(8, host={"driver": "570.1"}, rate=60_000)])
    _, lines, _ = run(capsys, "table", tmp_path / "s")
    assert "driver: 570.1" in lines and "driver: 580.159" in lines
    assert "Not ranked together: driver differ between the tables above." in lines


def test_damaged_lines_are_counted_in_the_table(tmp_path, capsys):
    folder = write_sweep(tmp_path / "s", [Point(4), Point(8, seed=2)])
    with (folder / folder_name(Point(4)) / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "time')
    _, lines, _ = run(capsys, "table", folder)
    assert "1 damaged metrics line(s) dropped, in 1 file(s)." in lines
    assert any("damaged-lines" in line for line in lines)


BAD = [
    (["table", "{tmp}/absent"], "no such folder"),
    (["table", "{tmp}"], "not a sweep"),
    (["table", "{grid}/sweep.json"], "not a folder"),
    (["table"], "required"),
    (["tabel", "{grid}"], "invalid choice"),
    (["table", "{grid}", "--columns", "mfuu"], "did you mean 'mfu'?"),
    (["table", "{grid}", "--sort", "tokens"], "unknown column to sort by 'tokens'"),
    (["table", "{grid}", "--sort", "reduction"], "unknown column to sort by"),
    (["table", "{grid}", "--by", "reducton"], "did you mean 'reduction'?"),
    (["table", "{grid}", "--where", "micro_batch"], "cannot read condition 'micro_batch'"),
    (["table", "{grid}", "--where", "micro_bach=4"], "did you mean 'micro_batch'?"),
    (["table", "{grid}", "--where", "micro_batch>many"], "'many' in --where is not a number"),
    (["table", "{grid}", "--where", "micro_batch=5"], "no point matches"),
    (["table", "{grid}", "--where", "__import__('os').system('x')=1"], "cannot read condition"),
    (["table", "{grid}", "--pivot", "micro_batch"], "--pivot needs two columns"),
    (["table", "{grid}", "--format", "xlsx"], "invalid choice: 'xlsx'"),
    (["report", "{tmp}/absent"], "no such folder"),
    (["report", "{grid}", "{grid}"], "--out FOLDER"),
    (["plot", "{grid}", "--x", "micro_batc", "--out", "{tmp}/x.svg"], "did you mean 'micro_batch'?"),
    (["plot", "{grid}", "--x", "micro_batch", "--out", "{tmp}/x.pdf"], "must end in .svg or .png"),
    (["plot", "{grid}", "--x", "model", "--out", "{tmp}/x.svg"], "fewer than two values"),
    (["compare", "{grid}", "{tmp}/absent"], "no such folder"),
    (["compare", "{grid}", "{grid}/sweep.json"], "is not a baseline"),
    (["compare", "{grid}", "{grid}", "--tolerance", "2"], "must be from 0 up to 1"),
    (["ls", "{tmp}/absent"], "no such folder"),
    (["watch", "{tmp}/absent"], "no such folder"),
    (["watch", "{grid}", "--interval", "0"], "must be 0.05 to 3600"),
    (["reference", "--where", "gpuu=H100"], "did you mean 'gpu'?"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(grid, tmp_path, capsys, args, message):
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    code, out, err = run(capsys, *(a.format(grid=grid, tmp=tmp_path) for a in args))
    assert code == 2 and out == []
    assert err.count("\n") == 1 and err.startswith("analysis: ") and message in err, err
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_help_is_short_and_has_examples(capsys):
    code, lines, _ = run(capsys, "--help")
    assert code == 0 and len(lines) <= 35 and sum(line.startswith("  python -m analysis ") for line in lines) >= 5
    for command in ("table", "report", "plot", "compare", "baseline", "ls", "watch", "reference"):
        assert any(line.split()[:1] == [command] for line in lines)


def test_neither_torch_nor_the_trainer_is_imported(grid, tmp_path):
    one = str(write_sweep(tmp_path / "s", [Point()]))
    code = (
        "import sys; from analysis.__main__ import main; "
        f"main(['table', {str(grid)!r}]); main(['report', {one!r}]); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'train', 'hydra', 'omegaconf', 'duckdb'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_error(grid):
    command = f"{sys.executable} -m analysis table {grid} --format csv | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_table_of_a_sweep_that_has_just_begun(tmp_path):
    folder = write_sweep(tmp_path / "s", [Point(4, status="running", done=0), Point(8, started=False)])
    text = render(folder)
    assert text.startswith("no finished point yet") and "2 points: 1 running, 1 pending" in text


# ls, watch


def test_ls_lists_sweeps_with_their_census(tmp_path, capsys):
    write_sweep(tmp_path / "first", standard_grid())
    write_sweep(tmp_path / "second", [Point(4)])
    (tmp_path / "unrelated").mkdir()
    code, lines, _ = run(capsys, "ls", tmp_path)
    assert code == 0 and len(lines) == 4
    assert "6 ok, 1 pending, 1 oom, 1 infeasible" in lines[2] and lines[3].split()[0] == "second"


def test_ls_of_an_empty_folder(tmp_path, capsys):
    assert run(capsys, "ls", tmp_path)[:2] == (0, [f"no sweeps in {tmp_path}"])


def test_watch_follows_a_sweep_to_its_end(tmp_path):
    """A real second process watches while points start, run and end."""
    done, running, waiting = Point(4, rate=40_000), Point(8, status="running", done=7, seed=1), Point(12, seed=2)
    folder = write_sweep(tmp_path / "s", [done, running, waiting])
    later = folder / folder_name(waiting)
    later.rename(tmp_path / "later")
    command = [sys.executable, "-m", "analysis", "watch", str(folder), "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        _until(lambda: any("1 of 3 points done: 1 ok, 1 running, 1 pending" in line for line in lines), lines)
        (tmp_path / "later").rename(later)
        path = folder / folder_name(running) / "status.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "oom", "reason": "rank 1, 2 GiB"}))
        assert process.wait(20) == 0
        reader.join(5)
    assert any(line.startswith(folder_name(running)) and "oom  rank 1, 2 GiB" in line for line in lines)
    assert "3 of 3 points done: 2 ok, 1 oom" in lines[-1]


def _until(condition, lines, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, lines
        time.sleep(0.05)


def test_watch_once_shows_the_running_step(tmp_path, capsys):
    folder = write_sweep(tmp_path / "s", [Point(4, status="running", done=7), Point(8, seed=1)])
    code, lines, _ = run(capsys, "watch", folder, "--once")
    assert code == 0 and "1 of 2 points done" in lines[0]
    assert re.search(r"step 7 of 40  loss 5\.38  [\d,]+ tokens/s", lines[-1])


def test_watch_on_a_terminal(tmp_path):
    """Under a pseudo-terminal the live picture is drawn, and it ends by itself with the sweep."""
    import pty

    folder = write_sweep(tmp_path / "s", [Point(4), Point(8, status="oom", reason="rank 0", done=2)])
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "analysis", "watch", str(folder), "--interval", "0.1"]
    process = subprocess.Popen(
        command, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(master)
    assert process.wait(20) == 0
    assert b"2 of 2 points done" in shown and b"oom" in shown and b"\x1b[" in shown


# compare, baseline


def test_compare_finds_regressions_beyond_the_tolerance(tmp_path, capsys):
    a = write_sweep(tmp_path / "a", [Point(mb, r, 50_000, seed=mb) for r in ("zero2", "zero2o") for mb in (4, 8)])
    rates = {("zero2", 4): 50_000, ("zero2", 8): 46_000, ("zero2o", 4): 49_700, ("zero2o", 8): 54_000}
    b = write_sweep(tmp_path / "b", [Point(mb, r, rate, seed=100 + mb) for (r, mb), rate in rates.items()])
    code, lines, _ = run(capsys, "compare", a, b)
    assert code == 1
    verdicts = {
        tuple(line.split()[:2]): line.split()[-1] for line in lines if line.split()[1:2] in (["zero2"], ["zero2o"])
    }
    assert verdicts == {
        ("4", "zero2"): "same", ("8", "zero2"): "regression", ("4", "zero2o"): "same", ("8", "zero2o"): "faster",
    }  # fmt: skip
    assert run(capsys, "compare", a, b, "--tolerance", "0.1")[0] == 0
    assert run(capsys, "compare", a, a)[0] == 0


def test_compare_needs_to_be_sure(tmp_path, capsys):
    """5 % slower, but so noisy that it may be chance."""
    a = write_sweep(tmp_path / "a", [Point(4, rate=50_000, noise=0.15, steps=20, seed=3)])
    b = write_sweep(tmp_path / "b", [Point(4, rate=47_500, noise=0.15, steps=20, seed=4)])
    assert run(capsys, "compare", a, b)[0] == 0


def test_a_point_that_no_longer_finishes_is_a_regression(tmp_path, capsys):
    a = write_sweep(tmp_path / "a", [Point(4), Point(8)])
    b = write_sweep(tmp_path / "b", [Point(4), Point(8, status="oom", reason="x", done=1)])
    code, lines, _ = run(capsys, "compare", a, b, "--format", "md")
    assert code == 1 and any("| oom" in line and "regression" in line for line in lines)
    assert run(capsys, "compare", b, a)[0] == 0


def test_baselines_are_small_and_stand_for_their_sweep(grid, tmp_path, capsys):
    _, lines, _ = run(capsys, "baseline", grid)
    text = "\n".join(lines) + "\n"
    assert len(text) < 8_000 and "/" not in json.loads(text)["name"]
    (tmp_path / "base.json").write_text(text)
    assert run(capsys, "compare", tmp_path / "base.json", grid)[0] == 0
    slower = [
        Point(p.micro_batch, p.reduction, 0.9 * p.rate, p.status, p.reason, seed=p.seed) for p in standard_grid()[:6]
    ]
    code, lines, _ = run(capsys, "compare", tmp_path / "base.json", write_sweep(tmp_path / "b", slower))
    assert code == 1 and lines[-1] == "6 regressions."


def test_compare_says_what_else_changed(tmp_path, capsys):
    a = write_sweep(tmp_path / "a", [Point(4), Point(8)])
    b = write_sweep(
        tmp_path / "b", [Point(mb, config={"compile": {"name": "none"}}, host={"driver": "600.1"}) for mb in (4, 8)]
    )
    _, lines, _ = run(capsys, "compare", a, b)
    assert "- compile: layer → none" in lines and "- driver: 580.159 → 600.1" in lines


def test_nothing_to_compare(tmp_path, capsys):
    a, b = write_sweep(tmp_path / "a", [Point(4)]), write_sweep(tmp_path / "b", [Point(8), Point(16)])
    code, _, err = run(capsys, "compare", a, b)
    assert code == 2 and "no point of a matches one of b (by micro_batch)" in err


# published results


def test_every_llm_foundry_row_gives_its_published_mfu():
    rows = _read("llm_foundry.csv")
    assert len(rows) == 154
    assert (foundry_mfu(rows) / rows["MFU"] - 1).abs().max() < 1e-3


def test_known_rows_under_our_convention():
    rows = load_published()
    llama = rows[(rows["model"] == "Llama3.1-8B") & (rows["precision"] == "bf16") & (rows["gpus"] == 8)].iloc[0]
    assert llama["mfu"] == pytest.approx(39.0, abs=0.1) and llama["mfu_published"] == 39
    large = rows[(rows["model"] == "Llama3.1-405B") & rows["gpu"].eq("H100-94G")].iloc[0]
    assert large["mfu"] == pytest.approx(large["mfu_published"], abs=0.1)
    foundry = rows[rows["source"].str.startswith("llm-foundry")]
    assert (foundry["mfu"] / foundry["mfu_published"] - 1).abs().max() < 2e-3
    assert (rows["convention"].str.len() > 0).all() and (rows["source"].str.len() > 0).all()


def test_reference_command(capsys):
    code, lines, _ = run(capsys, "reference", "--where", "gpu~h200,precision=bf16", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    assert code == 0 and rows and all("H200" in row["gpu"] for row in rows)


def test_names_of_every_kind_survive(tmp_path, capsys):
    """Spaces, quotes, commas, =, &, non-ASCII in folder names and overrides."""
    folder = tmp_path / "a b,c=d&é'\"ü"
    point = Point(4, given=["model=dense_1b", "+env.X='a b;c'", 'data.path=/tmp/ü "x"'])
    write_sweep(folder, [point, Point(8)])
    code, lines, _ = run(capsys, "report", folder)
    assert code == 0 and Path(lines[0]).read_text("utf-8").count("<h1>") == 1
    assert run(capsys, "table", folder)[0] == 0


def test_a_point_folder_alone(tmp_path, capsys):
    write_point(tmp_path / "p", Point(rate=33_000))
    code, lines, _ = run(capsys, "table", tmp_path / "p")
    assert code == 0 and lines[-1] == "1 point: 1 ok"
