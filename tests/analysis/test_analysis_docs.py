"""docs/analysis.md: every command in it works, and what it says about files and flags is so."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from synth import Point, standard_grid, write_sweep

from analysis.__main__ import main
from analysis.flags import MEANING

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "analysis.md").read_text("utf-8")
BLOCK = re.search(r"```bash\n(.*?)```", TEXT, re.S)
COMMANDS = [line for line in (BLOCK[1] if BLOCK else "").splitlines() if line.startswith("python -m analysis ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("docs")
    write_sweep(place / "outputs" / "first", standard_grid()[:8])
    write_sweep(
        place / "outputs" / "second", [Point(p.micro_batch, p.reduction, 1.1 * p.rate) for p in standard_grid()[:6]]
    )
    return place


def test_there_are_commands():
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("line", COMMANDS)
def test_command(place, monkeypatch, line):
    """In this process; `> file` is the only thing of the shell that the page uses."""
    monkeypatch.chdir(place)
    words = shlex.split(line, comments=True)[3:]
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    assert out.getvalue()
    if target:
        Path(target).write_text(out.getvalue())


def test_pictures_exist_and_flags_are_explained():
    docs = Path(__file__).resolve().parents[2] / "docs"
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)
    assert len(pictures) >= 4 and all((docs / picture).is_file() for picture in pictures)
    told = set(re.findall(r"`([a-z0-9-]+)`", TEXT.partition("## Flags")[2].partition("## ")[0]))
    assert set(MEANING) == told
