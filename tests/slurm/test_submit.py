"""Submission: what passes is tried again, what doesn't is said; grouping, packing and chunking of points."""

import stat
from pathlib import Path

import pytest

from train.config import ConfigError, Launch, Train
from train.launch.slurm import submit
from train.sweep.points import Frozen


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sbatch in PATH that says the lines of `answers`, one a call; a line that starts with ! is an error."""
    file = tmp_path / "sbatch"
    file.write_text(
        f'#!/bin/sh\ncd "{tmp_path}"\nline=$(head -n 1 answers)\nsed -i 1d answers\necho "$@" >> calls\n'
        'case "$line" in "!"*) echo "sbatch: error: ${line#!}" >&2; exit 1;; *) echo "$line";; esac\n'
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(submit, "TRIES", (0.01, 0.01, 0.01))
    return tmp_path


def points(**nproc: int) -> list[Frozen]:
    out = []
    for name, n in nproc.items():
        cfg = Train(launch=Launch(name="slurm"))
        cfg.nproc, cfg.device = n, "cpu"
        out.append(Frozen(cfg, name * 8, [], name, folder=name))
    return out


@pytest.mark.parametrize(
    "words",
    ["Batch job submission failed: Socket timed out on send/recv operation",
     "Unable to contact slurm controller (connect failure)",
     "Batch job submission failed: Job violates accounting/QOS policy: QOSMaxSubmitJobPerUserLimit"],
)  # fmt: skip
def test_a_fault_that_passes_is_tried_again(sbatch: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (sbatch / "answers").write_text(f"!{words}\n!{words}\nSubmitted batch job 7\n")
    assert submit._patiently(lambda: submit._run("sbatch", "x.sh"), lambda: None) == "Submitted batch job 7\n"
    assert (sbatch / "calls").read_text().count("x.sh") == 3
    assert words.removeprefix("Batch job submission failed: ") in capsys.readouterr().out


def test_a_fault_that_stays_is_said(sbatch: Path) -> None:
    (sbatch / "answers").write_text("!Socket timed out\n" * 9)
    with pytest.raises(submit.SubmissionFailed, match="^Socket timed out$"):
        submit._patiently(lambda: submit._run("sbatch", "x.sh"), lambda: None)
    assert (sbatch / "calls").read_text().count("x.sh") == 4


def test_a_refusal_is_not_tried_again(sbatch: Path) -> None:
    (sbatch / "answers").write_text(
        "!Batch job submission failed: Invalid account or account/partition combination specified\nok\n"
    )
    with pytest.raises(ConfigError, match="launch=slurm launch.account=nosuch: SLURM refuses it: Invalid account"):
        submit.test_only(Train(launch=Launch(name="slurm", account="nosuch", python="python")), points(a=2))
    assert (sbatch / "calls").read_text().count("--test-only") == 1


def test_a_submission_that_timed_out_but_worked_is_not_repeated(sbatch: Path) -> None:
    (sbatch / "answers").write_text("!Socket timed out\nSubmitted batch job 8\n")
    assert submit._patiently(lambda: submit._run("sbatch", "x.sh"), lambda: "7") == "7"
    assert (sbatch / "calls").read_text().count("x.sh") == 1


def test_without_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch, which is not in PATH"):
        submit.test_only(Train(launch=Launch(name="slurm")), points(a=2))
    submit.test_only(Train(launch=Launch(name="slurm", dry_run=True)), points(a=2))


def test_one_array_per_shape_chunked_and_packed() -> None:
    cfg = Train(launch=Launch(name="slurm", nodes=None, points_per_job=2))
    mixed = points(a=2, b=4, c=2, d=2, e=4)
    for p in mixed:
        p.cfg.device, p.cfg.launch.gpus_per_node = "cuda", 4
    plans = submit.plan(mixed, cfg, 1000)
    assert [[[p.folder for p in task] for task in plan.tasks] for plan in plans] == [[["a", "c"], ["d"]], [["b", "e"]]]
    cfg.launch.points_per_job = 1
    many = points(**{f"p{i}": 2 for i in range(25)})
    plans = submit.plan(many, cfg, 11)
    assert [len(p.tasks) for p in plans] == [11, 11, 3]
    assert [p.after_previous for p in plans] == [False] * 3
    cfg.launch.array_parallelism = 4
    assert [p.after_previous for p in submit.plan(many, cfg, 11)] == [False, True, True]
    assert [p.folder for plan in plans for p in plan.points()] == [p.folder for p in many]


def test_gpu_hours() -> None:
    cfg = Train(launch=Launch(name="slurm", gpus_per_node=8, time="2:00:00"))
    mixed = points(a=16, b=8)
    for p in mixed:
        p.cfg.device, p.cfg.launch.gpus_per_node = "cuda", 8
    assert submit.gpu_hours(submit.plan(mixed, cfg, 100), cfg) == (16 + 8) * 2
    cfg.launch.time = None
    assert submit.gpu_hours(submit.plan(mixed, cfg, 100), cfg) is None
