"""A wrong command through the real command line, in a folder of its own, and what it must not leave behind."""

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers import environment


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def run(args: list[str], cwd: Path, prefix: tuple[str, ...] = (), timeout: float = 120, **extra: str) -> Done:
    """`python -m train ARGS` in `cwd`; asserts that no process of it is left."""
    mark = uuid.uuid4().hex
    temp = cwd.parent / f"{cwd.name}-tmp"
    temp.mkdir(exist_ok=True)
    env = environment(MFU_TEST_MARK=mark, TMPDIR=str(temp), **extra)
    command = [*prefix, sys.executable, "-m", "train", *args]
    done = subprocess.run(
        [os.fsencode(word) for word in command],
        cwd=cwd, env=env, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert not left_behind(mark), f"processes left: {left_behind(mark)}"
    return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def left_behind(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MFU_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def refused(args: list[str], cwd: Path, *words: str, prefix: tuple[str, ...] = (), **extra: str) -> str:
    """The message of a command that must be refused: exit 2, at most two lines with all of `words`, nothing written."""
    before = tree(cwd)
    done = run(args, cwd, prefix, **extra)
    assert done.code == 2, (done.code, done.out[-2000:], done.err[-2000:])
    lines = [line for line in done.err.splitlines() if line]
    assert 1 <= len(lines) <= 2 and lines[-1].startswith("error: "), done.err
    for word in words:
        assert word in done.err, f"{word!r} is not in {done.err!r}"
    assert tree(cwd) == before, "something was written"
    return done.err


def tree(folder: Path) -> dict[str, int]:
    """Every path below a folder with its size."""
    return {str(p.relative_to(folder)): p.lstat().st_size for p in folder.rglob("*")}
