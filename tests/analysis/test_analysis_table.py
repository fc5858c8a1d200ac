"""What `python -m analysis table` prints, and how every command refuses."""

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run
from synth import Point, folder_name, standard_grid, write_point, write_sweep

from analysis.table import render


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("table") / "grid", standard_grid())


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
