"""The real command line: every kind of `fault`, signals, resume, damaged files, two commands on one folder."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from analysis.load import load
from analysis.usage import device_hours, wall_seconds
from tests.faults.lab import ROOT, TINY, Command, Onlooker, gone, read, statuses, steps, sweep, wait_for

KINDS = {
    "exception": ("crashed", "rank 1 at step 2: RuntimeError: injected by fault=exception (consequence on rank 0)"),
    "exceptions": (
        "crashed",
        "rank 1 at step 2: RuntimeError: injected by fault=exceptions, the first"
        " (later: rank 0: ValueError: injected by fault=exceptions, 50 ms later)",
    ),
    "exit": ("crashed", "rank 1 left with exit code 0 at step 2 and no result"),
    "nan": ("crashed", "non-finite loss at step 2, first on rank 1"),
    "inf_grad": ("crashed", "non-finite gradient norm at step 2"),
    "segv": ("crashed", "rank 1 killed by signal 11 (SIGSEGV) at step 2"),
    "oom": ("oom", "rank 1 at step 2: out of host memory: 1.07e+09 GiB requested, "),
    "skip_allreduce": ("crashed|timeout", ""),
    "shape": ("crashed|timeout", ""),
    "hang": ("timeout", "rank 1 gave no sign of life for 2.0 s at step 2 (train), in _hang"),
}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("reduction", ["ddp", *(pytest.param(r, marks=pytest.mark.slow) for r in ("zero2o", "fsdp"))])
def test_every_kind_of_fault_then_resume(tmp_path: Path, reduction: str) -> None:
    faults = ",".join(f"{kind}@1:2" for kind in KINDS)
    args = [
        "name=f", *TINY, f"reduction={reduction}", f"fault=null,{faults}", "steps=8", "max_failures=50",
        "launch.hang_seconds=2", "launch.first_step_timeout=60",
    ]  # fmt: skip
    done = Command(tmp_path, *args)
    seen = Onlooker(done, tmp_path / "f")
    done.finish()
    assert done.code == 1, done.output
    done.nothing_left()
    found = statuses(tmp_path / "f")
    assert len(found) == len(KINDS) + 1
    gaps = seen.gaps()
    assert len(gaps) == len(KINDS) and max(gaps) < 3, gaps  # the next point's first step
    clean = None
    for name, status in found.items():
        kind = str(yaml.safe_load((tmp_path / "f" / name / "config.yaml").read_text())["fault"]).partition("@")[0]
        if kind == "None":
            clean = tmp_path / "f" / name
            assert status["status"] == "ok" and steps(clean) == list(range(8))
            continue
        wanted, reason = KINDS[kind]
        assert status["status"] in wanted.split("|"), (name, status["reason"])
        assert status["reason"].startswith(reason), status["reason"]
        assert status["summary"]["failure"]["step"] >= 2 and status["attempt"] == 1
        if status["status"] == "crashed":
            assert status["summary"]["failure"]["seconds_to_verdict"] < 2
        if status["status"] == "timeout":
            assert (tmp_path / "f" / name / "logs" / "rank1.stack").stat().st_size > 0
    assert clean is not None
    before = bytes_of(clean)
    if reduction != "ddp":
        return
    again = sweep(tmp_path, *args, "retries=0")  # all attempts are used up: nothing runs, nothing changes
    assert again.code == 1 and "retries=0 is used up" in again.output
    assert {n: s["attempt"] for n, s in statuses(tmp_path / "f").items()} == dict.fromkeys(found, 1)
    third = sweep(tmp_path, *args, "retries=1")
    assert third.code == 1
    for name, status in statuses(tmp_path / "f").items():
        rerun = found[name]["status"] in ("crashed", "timeout")
        assert status["attempt"] == (2 if rerun else 1), name
        assert (tmp_path / "f" / name / "attempts" / "1" / "status.json").exists() == rerun
    assert bytes_of(clean) == before  # finished points are unchanged to the byte
    third.nothing_left()
    hours_add_up(tmp_path / "f")


def hours_add_up(root: Path) -> None:
    """The report's device-hours are the sums over all attempts in the run folders."""
    used = wasted = 0.0
    for path in sorted(root.glob("*/**/status.json")):
        status = read(path)
        seconds = status["summary"]["wall_s"] * len(status["ranks"])
        assert status["summary"]["device_hours"] == pytest.approx(seconds / 3600)
        used, wasted = used + seconds, wasted + (status["status"] != "ok") * seconds
    assert 0 < wasted < used
    assert device_hours(load(root).points) == pytest.approx((used / 3600, wasted / 3600))
    unit, scale = ("device-hours", 3600) if used >= 360 else ("device-seconds", 1)
    assert f"{used / scale:.3g} {unit} used, {wasted / scale:.3g} of them" in (root / "report.html").read_text()


def running(folder: Path) -> Path | None:
    """The point that has written its first metrics."""
    return next((p for p in folder.glob("*/metrics.jsonl") if p.stat().st_size), None)


SIGNALS = [
    (signal.SIGINT, 130),
    pytest.param(signal.SIGTERM, 143),
    pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("signum, code", SIGNALS)
def test_signal_during_a_point(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    command = Command(tmp_path, "name=s", *TINY, "steps=1000000", "seed=0,1,2")
    wait_for("the first point trains", lambda: running(tmp_path / "s") or command.process.poll() is not None)
    command.process.send_signal(signum)
    command.finish()
    assert command.code == code, command.output
    command.nothing_left()
    found = sorted((s.get("status"), s.get("reason", "")) for s in statuses(tmp_path / "s").values())
    assert [s for s, _ in found] == ["interrupted", "pending", "pending"], found
    assert found[0][1].startswith(f"{signum.name} at step ") and found[1][1].startswith("not started: interrupted")
    if signum != signal.SIGINT:
        return
    again = sweep(tmp_path, "name=s", *TINY, "steps=1000000", "seed=0,1,2", "budget.hours=0.0005", "retries=0")
    assert again.code == 1 and "budget.hours=0.0005 is used up" in again.output, again.output
    attempts = sorted(s["attempt"] for s in statuses(tmp_path / "s").values())
    assert attempts == [0, 0, 2]  # an interruption is no failed attempt


def test_second_signal_and_signal_while_composing(tmp_path: Path) -> None:
    command = Command(tmp_path, "name=t", *TINY, "steps=1000000", "seed=0,1")
    wait_for("the first point trains", lambda: running(tmp_path / "t") or command.process.poll() is not None)
    command.process.send_signal(signal.SIGINT)
    command.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    command.finish()
    assert command.code == 130 and time.monotonic() - began < 5, command.output
    command.nothing_left()
    assert sorted(s.get("status", "pending") for s in statuses(tmp_path / "t").values()) == ["interrupted", "pending"]
    composing = Command(tmp_path / "c", "name=c", *TINY, "seed=range(0,20000)")
    wait_for(
        "signals are handled", lambda: _catches_sigint(composing.process.pid) or composing.process.poll() is not None
    )
    composing.process.send_signal(signal.SIGINT)
    composing.finish()
    assert composing.code == 130, composing.output
    assert not (tmp_path / "c" / "c").exists()
    composing.nothing_left()


def _catches_sigint(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt")), 16)
    return bool(caught >> (signal.SIGHUP - 1) & 1)  # Python itself never catches SIGHUP: these are ours


def test_supervisor_killed_then_lost_then_done(tmp_path: Path) -> None:
    args = ["name=k", *TINY, "seed=0,1", "steps=40", "retries=0"]
    command = Command(tmp_path, *args, "timeout=600")
    first = wait_for("a point trains", lambda: running(tmp_path / "k"))
    pids = command.living()
    command.process.kill()
    command.finish()
    wait_for("its ranks end by themselves", lambda: all(gone(p) for p in pids), 5)
    left = read(first.parent / "status.json")["status"]
    other = ["name=k", *TINY, "steps=2", "retries=0"]  # a command on the folder whose grid does not have the point
    assert sweep(tmp_path, *other).code == 0
    assert read(first.parent / "status.json")["status"] == ("lost" if left == "running" else left)
    again = sweep(tmp_path, *args)
    assert again.code == 0, again.output
    found = statuses(tmp_path / "k")
    assert len(found) == 3 and {s["status"] for s in found.values()} == {"ok"}
    assert sorted(len(steps(tmp_path / "k" / name)) for name in found) == [2, 40, 40]
    if left == "running":
        lost = read(first.parent / "attempts" / "1" / "status.json")
        assert lost["status"] == "lost" and 0 < wall_seconds(lost) < 60  # what it used is known, and wasted
    again.nothing_left()


def test_damaged_and_edited_files(tmp_path: Path) -> None:
    args = ["name=d", *TINY, "nproc=1", "seed=0,1,2,3,4,5", "steps=3"]
    assert sweep(tmp_path, *args).code == 0
    root = tmp_path / "d"
    folders = [root / n for n in statuses(root)]
    good = bytes_of(folders[5])
    whole = (folders[0] / "status.json").read_text()
    (folders[0] / "status.json").write_text(whole[: len(whole) // 2])
    (folders[1] / "status.json").write_text("")
    (folders[2] / "status.json").write_text(json.dumps(json.loads(whole) | {"schema": 99}))
    (folders[3] / "status.json").unlink()
    (folders[3] / "status.json").mkdir()
    (folders[4] / "status.json").write_text(json.dumps(json.loads(whole)))  # another point's
    again = sweep(tmp_path, *args)
    assert again.code == 0, again.output
    assert again.output.count("is not one of this point; moved to status.damaged-") == 5
    assert {s["status"] for s in statuses(root).values()} == {"ok"}
    assert all(list(f.glob("status.damaged-*")) for f in folders[:5])
    assert bytes_of(folders[5]) == good
    config = folders[0] / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.0003", "lr: 0.0004"))
    refused = sweep(tmp_path, *args)
    assert refused.code == 2
    assert refused.output.count("\n") == 1 and "config.yaml: optim.lr=0.0004" in refused.output, refused.output


@pytest.mark.slow
def test_code_changed(tmp_path: Path) -> None:
    """A checkout whose src/train changes between two commands: refused, both named; code=new goes on with the new one."""
    copy = tmp_path / "checkout"
    for part in ("src", "conf", "sweeps", "analysis"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": f"{copy / 'src'}:{copy}"}
    args = ["name=c", *TINY, "steps=3"]
    out = tmp_path / "out"
    first = sweep(out, *args, "seed=0", env=env)
    assert first.code == 0, first.output
    (copy / "src/train/seeds.py").write_text((copy / "src/train/seeds.py").read_text() + "\n# changed\n")
    refused = sweep(out, *args, "seed=0,1", env=env)
    assert refused.code == 2 and "was run with code " in refused.output and "code=new" in refused.output
    assert refused.output.count("\n") == 1
    new = sweep(out, *args, "seed=0,1", "code=new", env=env)
    assert new.code == 0, new.output
    codes = [s["code"] for s in statuses(out / "c").values()]
    assert len(set(codes)) == 2  # the kept point was measured with the old code, and says so


@pytest.mark.slow
def test_snapshot_runs_whatever_the_checkout_becomes(tmp_path: Path) -> None:
    """The warm server is killed and the checkout broken while a sweep runs: the next points run the snapshot."""
    copy = tmp_path / "checkout"
    for part in ("src", "conf", "sweeps", "analysis"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path / "out"
    command = Command(
        out, "name=c", *TINY, "seed=0,1", "steps=300", "retries=0", env={"PYTHONPATH": f"{copy / 'src'}:{copy}"}
    )
    wait_for("a point trains", lambda: running(out / "c") or command.process.poll() is not None)
    (copy / "src/train/worker.py").write_text("raise SystemExit('the edited checkout runs')\n")
    server = next(p for p in command.living() if b"train.launch.server" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(server, signal.SIGKILL)  # the last child of the command with that name: forks come after it
    command.finish()
    found = sorted(s["status"] for s in statuses(out / "c").values())
    assert "the edited checkout runs" not in command.output
    assert found in (["crashed", "ok"], ["ok", "ok"]), command.output
    command.nothing_left()


def test_two_commands_on_one_folder(tmp_path: Path) -> None:
    args = ["name=w", *TINY, "seed=0,1,2", "steps=5"]
    commands = [Command(tmp_path, *args), Command(tmp_path, *args)]
    for c in commands:
        c.finish()
    assert [c.code for c in commands] == [0, 0], [c.output for c in commands]
    assert any("3 kept" in c.output for c in commands)  # one waited and found all done
    found = statuses(tmp_path / "w")
    for name, status in found.items():
        assert status["status"] == "ok" and status["attempt"] == 1
        assert steps(tmp_path / "w" / name) == list(range(5))


def test_closed_output_does_not_end_a_sweep(tmp_path: Path) -> None:
    """`python -m train … | head -1`."""
    read_end, write_end = os.pipe()
    command = Command(tmp_path, "name=p", *TINY, "seed=0,1", "steps=3", stdout=write_end, stderr=write_end)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    command.finish()
    assert {s["status"] for s in statuses(tmp_path / "p").values()} == {"ok"}
    assert command.code == 0


@pytest.mark.slow
def test_no_standard_output_at_all(tmp_path: Path) -> None:
    closed = sweep(tmp_path, "name=q", *TINY, "steps=3", wrap=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    assert closed.code == 0
    assert {s["status"] for s in statuses(tmp_path / "q").values()} == {"ok"}


@pytest.mark.slow
def test_terminal_closed(tmp_path: Path) -> None:
    """A live view on a terminal that is closed: the point is interrupted, exit code 129, no traceback on the way."""
    import pty

    mark = f"MFU_TEST_MARK={tmp_path}"
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TERM": "xterm", "TMPDIR": str(tmp_path)}
    env.pop("NO_COLOR", None)
    args = ["-m", "train", "-m", f"out={tmp_path}", "name=h", *TINY, "steps=1000000", "seed=0,1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *args], env | dict([mark.split("=", 1)]))
    os.set_blocking(terminal, False)

    def trains() -> bool:
        try:
            os.read(terminal, 65536)  # a full terminal would stop the view
        except OSError:
            pass
        return running(tmp_path / "h") is not None

    wait_for("the first point trains", trains)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    found = sorted(s.get("status", "pending") for s in statuses(tmp_path / "h").values())
    assert found == ["interrupted", "pending"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_signal_at_a_random_moment_of_short_points(tmp_path: Path, seed: int) -> None:
    """Points of a tenth of a second: the signal falls between two of them as often as into one."""
    args = ["name=b", *TINY, "steps=1", "seed=range(0,16)"]
    command = Command(tmp_path, *args)
    wait_for(
        "points end", lambda: len(list(tmp_path.glob("b/*/status.json"))) > 2 or command.process.poll() is not None
    )
    time.sleep(random.Random(seed).uniform(0, 1))
    command.process.send_signal(signal.SIGINT)
    command.finish()
    assert command.code == 130, command.output
    command.nothing_left()
    found = {n: s.get("status", "pending") for n, s in statuses(tmp_path / "b").items()}
    assert len(found) == 16 and set(found.values()) <= {"ok", "interrupted", "pending"}, found
    assert list(found.values()).count("interrupted") <= 1
    kept = {n: bytes_of(tmp_path / "b" / n) for n, s in found.items() if s == "ok"}
    assert 0 < len(kept) < 16
    again = sweep(tmp_path, *args)
    assert again.code == 0 and f"{len(kept)} kept" in again.output, again.output
    assert all(bytes_of(tmp_path / "b" / n) == content for n, content in kept.items())
