"""The real command, killed at random moments and started again until done. Seeded: a failure names its round."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.lab import TINY, Command, statuses, steps, sweep

POINTS, STEPS = 4, 60


def victims(command: Command) -> dict[str, list[int]]:
    """Living processes of the command by role."""
    found: dict[str, list[int]] = {"supervisor": [], "server": [], "rank": []}
    for pid in command.living():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            leader = os.getpgid(pid) == pid
        except OSError:
            continue
        if "train.launch.server" in text and pid != command.process.pid:
            found["rank" if leader and os.getsid(pid) != pid else "server"].append(pid)
        elif pid == command.process.pid:
            found["supervisor"].append(pid)
    return found


def strike(command: Command, draw: random.Random) -> str:
    """Kill one role, or everything."""
    who = draw.choice(["supervisor", "rank", "rank", "server", "everything"])
    there = victims(command)
    pids = [p for group in there.values() for p in group] if who == "everything" else there[who]
    if who == "rank" and pids:
        pids = [draw.choice(pids)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{who} {len(pids)}"


ARGS = ["name=s", *TINY, f"steps={STEPS}", f"seed=range(0,{POINTS})", "retries=1000", "max_failures=1000"]


def storm(tmp_path: Path, seed: int) -> float:
    """Run it; seconds of the last command, the only one that nothing hit."""
    draw = random.Random(seed)
    strikes = 0
    log: list[str] = []
    finished: dict[str, bytes] = {}
    for attempt in range(40):
        command = Command(tmp_path, *ARGS)
        blows = draw.randint(1, 2) if attempt < 5 else 0
        for _ in range(blows):
            # most of a command is its start; aim at all of it, and at the points
            until = time.monotonic() + draw.uniform(0.5, 9.0)
            while time.monotonic() < until and command.process.poll() is None:
                time.sleep(0.01)
            if command.process.poll() is None:
                log.append(f"{attempt}: {strike(command, draw)}")
                strikes += 1
        command.finish()
        log.append(f"{attempt}: exit {command.code}")
        deadline = time.monotonic() + 5
        while command.living() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not command.living(), (seed, log, command.living())
        root = tmp_path / "s"
        for name, status in statuses(root).items():
            if name in finished:
                assert _bytes(root / name) == finished[name], (seed, log, name)
            elif status.get("status") == "ok":
                finished[name] = _bytes(root / name)
        assert "Traceback" not in command.output, (seed, log, command.output)
        if command.code == 0:
            break
    assert len(finished) == POINTS, (seed, log)
    for name in finished:
        assert steps(tmp_path / "s" / name) == list(range(STEPS)), (seed, log, name)
        for old in (tmp_path / "s" / name).glob("attempts/[0-9]*/metrics.jsonl"):
            assert len(old.read_text().splitlines()) <= STEPS, (seed, log, old)
    attempts = sum(s["attempt"] for s in statuses(tmp_path / "s").values())
    assert attempts <= POINTS + strikes, (seed, log)  # a blow costs one attempt, never a finished point
    assert not list((tmp_path / "s").glob("**/.*.json.*")), (seed, log)  # no half-written file is left
    return command.seconds


def _bytes(folder: Path) -> bytes:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return b"\0".join(str(p.relative_to(folder)).encode() + b"\0" + p.read_bytes() for p in files)


@pytest.mark.parametrize("seed", range(3))
def test_storm(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_long_storm(tmp_path: Path, seed: int) -> None:
    """All but the last command were lost; that one takes no longer than the whole sweep without any fault, plus 10 %.

    The machine is shared: a storm that looks slow is held against what a clean sweep takes by now, and if it still looks
    slow it is run again, for what it does by itself it does again.
    """
    for again in range(3):
        last = storm(tmp_path / f"storm{again}", seed)
        if not CLEAN or last > 1.1 * max(CLEAN) + 3:  # 3 s: what a busy machine varies
            done = sweep(tmp_path / f"clean{again}", *ARGS)
            assert done.code == 0
            CLEAN.append(done.seconds)
        if last <= 1.1 * max(CLEAN) + 3:
            return
    raise AssertionError((last, CLEAN))


CLEAN: list[float] = []  # seconds that a sweep without any fault took, in this process
