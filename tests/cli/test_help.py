"""Help, completion and the dry run: what a newcomer asks first."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.helpers import ROOT, environment
from train.help import EXAMPLES, groups


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run(["--help"], tmp_path_factory.mktemp("help"))
    assert done.code == 0 and not done.err
    return done.out


def test_fits_two_screens(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100, (len(lines), max(lines, key=len))


def test_shows_every_option_with_its_comment(text: str) -> None:
    found = groups([ROOT / "conf"])
    assert {"model", "reduction", "recipe", "sweeps"} <= set(found)
    for group, options in found.items():
        assert f"  {group} " in text
        for option, comment in options.items():
            assert comment, f"conf/{group}/{option}.yaml has no comment"
            assert any(option in line and comment[:20] in line for line in text.splitlines()), (group, option)


def test_hides_what_is_not_a_choice(text: str) -> None:
    assert "schema" not in text and "hydra/" not in text


def test_own_options_are_listed(tmp_path: Path) -> None:
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("# my very own model\nname: mine\n")
    done = run(["--config-dir", "own", "--help"], tmp_path)
    assert "mine" in done.out and "my very own model" in done.out


@pytest.mark.slow
def test_examples_are_five_and_work(tmp_path: Path) -> None:
    """Each example passes as a dry run, with a folder for the own text."""
    lines = [shlex.split(line, comments=True)[3:] for line in EXAMPLES.splitlines()]
    assert len(lines) == 5
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "a.txt").write_text("Some text.")
    for line in lines:
        args = [a for a in line if a != "plan=true"]
        done = run([*args, "plan=true"], tmp_path)
        assert done.code == 0 and "pending" in done.out, (line, done.out, done.err)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cfg", "job"], "micro_batch: 4"),
        (["--cfg", "job", "-p", "model"], "heads:"),
        (["--info", "searchpath"], "Config search path"),
        (["--hydra-help"], "Flags"),
        (["--version"], "Hydra 1.3"),
    ],
)
def test_hydras_own_flags_stay(tmp_path: Path, args: list[str], words: str) -> None:
    done = run(args, tmp_path)
    assert done.code == 0 and words in done.out
    assert not list(tmp_path.iterdir())


def test_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m train --help | head -1; exit ${{PIPESTATUS[1]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


def complete(line: str, cwd: Path) -> list[str]:
    """What bash offers for `line` once `eval "$(python -m train -sc install=bash)"` has run."""
    script = f"""
python() {{ {sys.executable} "$@"; }}
eval "$(python -m train -sc install=bash)"
COMP_LINE='{line}'; COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_mfu_sweep_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p python | grep -q _mfu_sweep_complete || echo NOT REGISTERED
"""
    done = subprocess.run(["bash", "--norc", "-c", script], cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 or done.returncode == 0
    assert not done.stderr, done.stderr
    return done.stdout.split()


def test_bash_completion(tmp_path: Path) -> None:
    assert "reduction=zero2rs" in complete("python -m train reduction=z", tmp_path)
    assert complete("python -m train micro", tmp_path) == ["micro_batch="]
    assert "model=llama3_8b" in complete("python -m train -m micro_batch=4 model=ll", tmp_path)
    assert complete("python other.py micro", tmp_path) == []


def test_dry_run_lists_points_and_writes_nothing(tmp_path: Path) -> None:
    done = run(["-m", "reduction=zero2o,zero2", "micro_batch=4,8,12", "plan=true"], tmp_path)
    assert done.code == 0 and done.out.count("pending") == 6 and "6 points; nothing was written" in done.out
    assert not list(tmp_path.iterdir())
