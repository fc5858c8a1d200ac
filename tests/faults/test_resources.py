"""Disks, memory, process limits and clocks that run out or jump."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.lab import TINY, Command, Lab, statuses, steps, sweep, wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a 4 MB tmpfs can't be mounted here (needs root and mount)")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Use up what is left, to the last block."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as f:
        try:
            while True:
                f.write(b"\0" * 4096)
        except OSError:
            return ballast


def test_full_disk_then_space(lab: Lab, small_disk: Path) -> None:
    trial = lab.start(small_disk, steps=10**6)
    trial.reach("train", 5)
    ballast = fill(small_disk)
    verdict = trial.end()
    assert verdict.status == "crashed"
    assert re.search("No space left on device|can't be written", verdict.reason), verdict.reason
    assert trial.status["status"] == "crashed" and trial.status["reason"] == verdict.reason  # room was reserved for it
    assert (trial.folder / "status.json").read_text().endswith("}\n")
    ballast.unlink()
    again = lab.run(small_disk, steps=10**6, timeout=1.0)  # the supervisor of the next point is none the worse
    assert again.verdict is not None and again.verdict.status == "timeout"
    shutil.rmtree(again.folder)
    assert lab.run(small_disk, steps=5).status["status"] == "ok"


@pytest.mark.slow
def test_full_temporary_folder(small_disk: Path, tmp_path: Path) -> None:
    """No room for a rank's result, nor for the record of its failure: the log's last line says what it was."""
    args = ["name=t", *TINY, "seed=0,1", "steps=300"]
    command = Command(tmp_path, *args, env={"TMPDIR": str(small_disk)})
    wait_for("a point trains", lambda: list(tmp_path.glob("t/*/metrics.jsonl")) or command.process.poll() is not None)
    ballast = fill(small_disk)
    command.finish()
    ballast.unlink()
    assert command.code == 1 and "Traceback" not in command.output, command.output
    found = statuses(tmp_path / "t")
    assert "running" not in {s.get("status") for s in found.values()}, found
    assert any("No space left on device" in s.get("reason", "") for s in found.values()), found
    again = sweep(tmp_path, *args)
    assert again.code == 0, again.output


def test_disk_vanishes(lab: Lab, small_disk: Path) -> None:
    """The file system is gone mid-run, as when a server's export is withdrawn: the point crashes, the supervisor lives."""
    trial = lab.start(small_disk, steps=10**6)
    trial.reach("train", 5)
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    verdict = trial.end()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small_disk)], check=True)
    assert verdict.status == "crashed" and "No such file or directory" in verdict.reason, verdict.reason
    assert lab.run(small_disk, steps=5).status["status"] == "ok"


def test_full_disk_does_not_stop_the_command_with_a_traceback(small_disk: Path, tmp_path: Path) -> None:
    args = ["name=e", *TINY, "seed=0,1"]
    command = Command(small_disk, *args, "steps=1000000", env={"TMPDIR": str(tmp_path)})
    wait_for("a point trains", lambda: list(small_disk.glob("e/*/metrics.jsonl")) or command.process.poll() is not None)
    ballast = fill(small_disk)
    command.finish()
    assert command.code == 1 and "Traceback" not in command.output, command.output
    assert "No space left on device" in command.output
    left = {s.get("status", "pending") for s in statuses(small_disk / "e").values()}
    assert "running" not in left and "crashed" in left, left
    assert not list(small_disk.glob("e/*/.reserve")), "the reserve outlives its point"
    ballast.unlink()
    for path in small_disk.glob("e/*/config.yaml"):
        assert path.stat().st_size  # whole, or a rerun would refuse it
    again = sweep(small_disk, *args, "steps=1000000", "timeout=1", "retries=5", env={"TMPDIR": str(tmp_path)})
    assert again.code == 1 and {s["status"] for s in statuses(small_disk / "e").values()} == {"timeout"}, again.output


def cgroup(kind: str) -> Path:
    """A new cgroup of ours, v1; skips where there is none."""
    base = Path("/sys/fs/cgroup") / kind
    group = base / f"mfu-test-{os.getpid()}"
    try:
        if not base.is_dir():
            raise OSError
        group.mkdir(exist_ok=True)
    except OSError:
        pytest.skip(f"no writable v1 {kind} cgroup on this machine")
    return group


def test_host_memory_used_up(tmp_path: Path) -> None:
    """The kernel ends the rank that fills a memory cgroup: oom, not crashed; what is larger is not run."""
    group = cgroup("memory")
    (group / "memory.limit_in_bytes").write_text(str(2200 << 20))
    inside = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    args = [a for a in TINY if not a.startswith("micro_batch")]
    try:
        done = sweep(
            tmp_path,
            "name=m",
            *args,
            "steps=5",
            "fault=host_oom@1:2",
            "micro_batch=1,2",
            "launch.hang_seconds=60",
            wrap=inside,
        )
    finally:
        time.sleep(0.2)
        group.rmdir()
    found = sorted(statuses(tmp_path / "m").values(), key=lambda s: s["status"])
    assert [s["status"] for s in found] == ["infeasible", "oom"], done.output
    assert found[1]["reason"] == "rank 1: out of host memory, killed by the kernel at step 2"
    assert found[0]["reason"].startswith("implied by micro-batch-1")
    assert done.code == 0
    done.nothing_left()


def test_no_more_processes(lab: Lab, tmp_path: Path) -> None:
    """A pids cgroup around the server: the second rank can't be forked; the first does not stay behind."""
    group = cgroup("pids")
    server = lab.warm.process.pid
    before = Path(f"/proc/{server}/cgroup").read_text()
    home = Path("/sys/fs/cgroup/pids") / next(li for li in before.splitlines() if ":pids:" in li).split(":")[2].lstrip(
        "/"
    )
    (group / "cgroup.procs").write_text(str(server))
    (group / "pids.max").write_text("2")
    try:
        trial = lab.run(tmp_path, steps=3)
    finally:
        (home / "cgroup.procs").write_text(str(server))
        group.rmdir()
    assert trial.verdict is not None and trial.verdict.status == "crashed"
    assert "can't be started" in trial.verdict.reason or "can't start new thread" in trial.verdict.reason
    assert "(limits: processes " in trial.verdict.reason, trial.verdict.reason
    assert lab.run(tmp_path, steps=3, seed=1).status["status"] == "ok"


@pytest.mark.slow
def test_file_size_limit(tmp_path: Path) -> None:
    """A limit above every file of the code's snapshot: metrics.jsonl hits it first."""
    done = sweep(tmp_path, "name=z", *TINY, "steps=1000", "seed=0,1", wrap=("prlimit", "--fsize=60000"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    for status in statuses(tmp_path / "z").values():
        assert status["status"] == "crashed" and "File too large" in status["reason"], status


#: shifts the time of day alone. Debian's faketime also shifts absolute sleeps on the monotonic clock, which is how Python 3.11
#: sleeps: its time.sleep then fails with EINVAL
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, t);
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int fd = clock == CLOCK_REALTIME && path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        char text[32] = {0};
        if (read(fd, text, sizeof text - 1) > 0) t->tv_sec += atol(text);
        close(fd);
    }
    return result;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("jump", ["3600", "-3600"])
def test_clock_jumps(tmp_path: Path, jump: str) -> None:
    """The child's time of day jumps by an hour while a point trains; durations and `lost` do not notice."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler for the shim that shifts the clock")
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    offset.write_text("0")
    env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    shifted = [sys.executable, "-c", "import time; print(time.time())"]
    there = subprocess.check_output(
        shifted, env=os.environ | {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    )
    offset.write_text(jump)
    moved = subprocess.check_output(
        shifted, env=os.environ | {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    )
    assert abs(float(moved) - float(there) - int(jump)) < 60  # the shim works
    offset.write_text("0")
    command = Command(tmp_path, "name=j", *TINY, "seed=0,1,2", "steps=300", env=env)
    wait_for("a point trains", lambda: list(tmp_path.glob("j/*/metrics.jsonl")) or command.process.poll() is not None)
    offset.write_text(jump)
    command.finish()
    assert command.code == 0 and "lost" not in command.output, command.output
    for name, status in statuses(tmp_path / "j").items():
        assert status["status"] == "ok" and 0 < status["summary"]["wall_s"] < 200
        assert steps(tmp_path / "j" / name) == list(range(300))
        for line in (tmp_path / "j" / name / "metrics.jsonl").read_text().splitlines():
            assert 0 < float(re.search(r'"time/step": ([\d.e-]+)', line)[1]) < 60  # type: ignore[index]


NAMES = ["with space", "it's", "a=b,c", "x&y", "größe-速度", 'q"q']


def test_awkward_paths(tmp_path: Path) -> None:
    """One folder with all of it: the path goes through the shell, the snapshot, the ranks and the report."""
    out = tmp_path
    for name in NAMES:
        out = out / name
    done = sweep(out, "name=n", *TINY, "steps=3", "seed=0,1")
    assert done.code == 0, done.output
    assert {s["status"] for s in statuses(out / "n").values()} == {"ok"}


@pytest.mark.slow
def test_long_paths(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120) / ("y" * 120) / ("z" * 60)
    assert sweep(deep, "name=n", *TINY, "steps=2").code == 0
    too_long = sweep(tmp_path, f"name={'x' * 300}", *TINY, "steps=2")
    assert too_long.code == 2 and too_long.output.count("\n") == 1, too_long.output


@pytest.mark.slow
def test_rendezvous_ports_and_four_sweeps_at_once(tmp_path: Path) -> None:
    """Four commands, each with its own lock folder, so that their ranks really run side by side."""
    commands = [Command(tmp_path / str(i), "name=r", *TINY, "steps=3", "launch.warm=false") for i in range(4)]
    for c in commands:
        c.finish(280)
    assert [c.code for c in commands] == [0] * 4, [c.output for c in commands]
