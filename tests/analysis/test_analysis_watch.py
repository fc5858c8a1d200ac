"""What `python -m analysis ls` and `watch` show."""

import json
import os
import re
import subprocess
import sys
import threading
import time

from in_process import run
from synth import Point, folder_name, standard_grid, write_sweep


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
