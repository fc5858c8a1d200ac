"""What a person sees while a sweep runs: on a real pseudo-terminal, in a pipe, and after Ctrl-C."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import left_behind, run
from tests.helpers import TINY, environment, points, status

SMALL = [*TINY, "nproc=1", "micro_batch=1"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def on_terminal(args: list[str], cwd: Path, interrupt_at: str = "", **extra: str) -> tuple[int, str]:
    """Run on a pseudo-terminal; SIGINT to the foreground group, as Ctrl-C does, once `interrupt_at` has been shown."""
    env = environment(TERM="xterm", COLUMNS="120", LINES="40", TMPDIR=str(cwd), MFU_TEST_MARK=str(cwd), **extra)
    env.pop("NO_COLOR", None) if "NO_COLOR" not in extra else None
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "train", *args]
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    shown, deadline = b"", time.monotonic() + 240
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.5)
        if ready:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # EIO: the last writer has closed it
                break
            if not chunk:
                break
            shown += chunk
            if interrupt_at and interrupt_at.encode() in shown:
                os.killpg(process.pid, signal.SIGINT)
                interrupt_at = ""
    code = process.wait(30)
    os.close(master)
    assert not left_behind(str(cwd))
    return code, shown.decode(errors="replace")


def test_live_progress_then_the_table(tmp_path: Path) -> None:
    code, shown = on_terminal([*SMALL, "steps=60", "seed=1,2", "name=x"], tmp_path)
    text = ESCAPES.sub("", shown)
    assert code == 0, text
    assert "\x1b[" in shown, "nothing was redrawn"
    assert re.search(r"step \d+/60 +loss \d\.\d+ +[\d,]+ tokens/s", text), text
    assert re.search(r"1/2 points +\d+ s left", text), text
    assert re.search(r"\[2/2\] seed-2-\w+ +ok", text)
    for words in ("2 points: 2 ok", "report: outputs/x/report.html"):
        assert words in text
    assert re.search(r"time: [\d.]+ s = start [\d.]+ s, build [\d.]+ s, compile [\d.]+ s, train [\d.]+ s, rest", text)


@pytest.mark.slow
def test_no_color_means_plain_lines(tmp_path: Path) -> None:
    code, shown = on_terminal([*SMALL, "steps=3", "name=x"], tmp_path, NO_COLOR="1")
    assert code == 0 and "\x1b[" not in shown, shown


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tmp_path: Path) -> None:
    """The first point ends, the second is interrupted, and the printed command finishes the sweep."""
    args = [*SMALL, "steps=3,100000", "name=with space"]
    code, shown = on_terminal(args, tmp_path, interrupt_at="/100000")
    text = ESCAPES.sub("", shown)
    assert code == 130, text
    assert "interrupted: 1 of 2 points are finished and kept in outputs/with space; go on with" in text, text
    command = text.split("go on with\n")[1].strip().splitlines()[0].strip()
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "train"] and words[-1] == "name=with space"
    before = {k: status(p)["status"] for k, p in points(tmp_path / "outputs" / "with space").items()}
    assert sorted(before.values()) == ["interrupted", "ok"]
    dry = run([*words[3:], "plan=true"], tmp_path)
    assert dry.code == 0 and sorted(line.split()[0] for line in dry.out.splitlines()[:2]) == ["ok", "pending"], dry.out
