"""Two ways to start a rank with one interface: a fresh interpreter, or a fork of a server that has imported torch.

From fork to the first matmul on a GPU takes 0.54 s, a fresh interpreter 4.2 to 5.3 s; the server's own start took 8.3 s
(one H200, torch 2.11), so it pays from the second point on.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Protocol

from train.launch import environment, process, scratch

#: a server that has imported torch forks in milliseconds, and kills what is left in at most 10 s
ANSWER_SECONDS = 30.0


@dataclass
class Exit:
    """A rank's end: exit code (negative: signal) and when, on the monotonic clock."""

    pid: int
    code: int
    at: float


class Starter(Protocol):
    """What a supervisor needs to run ranks."""

    def start(self, folder: Path, scratch: Path, env: dict[str, str], log: Path) -> int:
        """Start one rank for a frozen point folder; its pid."""

    def wait(self, timeout: float, also: list[int]) -> list[Exit]:
        """Ends of ranks, waiting at most `timeout` seconds; returns early when a descriptor of `also` is readable."""

    def clean(self) -> None:
        """Kill and reap everything that the ranks left behind."""

    def close(self) -> None:
        """End the starter itself."""


def python_env(code: Path) -> dict[str, str]:
    """Environment in which `python -m train.…` finds the snapshot `code` first."""
    env = scratch.caches() | environment.base()  # what the user exported wins
    env["PYTHONPATH"] = os.pathsep.join([str(code), *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONSAFEPATH"] = "1"  # a train.py in the user's folder must not be run instead of ours
    return env


class Cold:
    """A fresh interpreter a rank."""

    def __init__(self, code: Path, keep: frozenset[int] = frozenset()) -> None:
        self.code = code
        self.keep = keep  # children of this process that are not ranks: the warm server
        self.running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        process.adopt_orphans()

    def start(self, folder: Path, scratch: Path, env: dict[str, str], log: Path) -> int:
        """See Starter."""
        full = python_env(self.code) | env | {"MFU_SWEEP_PARENT": str(os.getpid())}
        with open(log, "ab") as out:
            p = subprocess.Popen(
                [sys.executable, "-m", "train.worker", str(folder), str(scratch)],
                env=full, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        self.running[p.pid] = (p, os.pidfd_open(p.pid))
        return p.pid

    def wait(self, timeout: float, also: list[int]) -> list[Exit]:
        """See Starter."""
        fds = {fd: pid for pid, (_, fd) in self.running.items()}
        ready, _, _ = select.select([*fds, *also], [], [], timeout)
        exits = []
        for fd in ready:
            if fd in fds:
                p, _ = self.running.pop(fds[fd])
                exits.append(Exit(p.pid, p.wait(), time.monotonic()))
                os.close(fd)
        return exits

    def clean(self) -> None:
        """See Starter."""
        for p in process.strays(self.keep):
            process.kill(p.pid)
        deadline = time.monotonic() + 5
        while self.running and time.monotonic() < deadline:
            self.wait(0.1, [])
        _reap()

    def close(self) -> None:
        """See Starter."""
        self.clean()


def _reap() -> None:
    """Collect adopted orphans that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


class Warm:
    """Forks of train.launch.server."""

    def __init__(self, code: Path) -> None:
        self.code, self.compiles = code, False
        process.adopt_orphans()
        self.restart()

    def restart(self) -> None:
        """Start the server, or another one in place of one that was killed."""
        env = python_env(self.code) | {"MFU_SWEEP_PARENT": str(os.getpid())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "train.launch.server"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.buffer = b""
        self.exits: list[Exit] = []
        self.answered = False
        if self.compiles:
            self.will_compile()

    def will_compile(self) -> None:
        """Points use torch.compile: import Inductor once, 1 s, before the first fork."""
        self.compiles = True
        self._send({"do": "import", "name": "torch._inductor.compile_fx"})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self, timeout: Optional[float], also: list[int]) -> Optional[dict[str, Any]]:
        """The next message, or None when the time is up or `also` is readable. Raises EOFError if the server is gone."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([fd, *also], [], [], timeout)
            if fd not in ready:
                return None
            chunk = os.read(fd, 65536)
            if not chunk:
                code = self.process.wait()
                raise EOFError(f"the rank server ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _ask(self, message: dict[str, Any], reply: str) -> dict[str, Any]:
        """Send and wait for the reply of that kind; ends of ranks that come first are kept."""
        self._send(message)
        limit = ANSWER_SECONDS if self.answered else None  # until then it imports torch, from a slow disk perhaps
        while True:
            got = self._receive(limit, [])
            if got is None:
                self.process.kill()
                self.process.wait()
                raise EOFError(f"the rank server gave no answer for {ANSWER_SECONDS:.0f} s and was ended")
            if reply in got:
                self.answered = True
                return got
            self.exits.append(Exit(got["exit"], got["code"], got["at"]))

    def probe(self) -> dict[str, Any]:
        """What torch sees on this host (train.launch.probe), from a fork, so that the server keeps no CUDA context."""
        result: dict[str, Any] = self._ask({"do": "probe"}, "probe")["probe"]
        return result

    def start(self, folder: Path, scratch: Path, env: dict[str, str], log: Path) -> int:
        """See Starter."""
        message = {"do": "start", "folder": str(folder), "scratch": str(scratch), "env": env, "log": str(log)}
        got = self._ask(message, "started")
        if got.get("error"):
            raise OSError(got["error"])
        return int(got["started"])

    def wait(self, timeout: float, also: list[int]) -> list[Exit]:
        """See Starter."""
        if not self.exits:
            got = self._receive(timeout, also)
            if got is not None:
                self.exits.append(Exit(got["exit"], got["code"], got["at"]))
        while b"\n" in self.buffer:
            got = self._receive(0, [])
            assert got is not None
            self.exits.append(Exit(got["exit"], got["code"], got["at"]))
        out, self.exits = self.exits, []
        return out

    def alive(self) -> bool:
        """Is the server there? When it has been killed, its ranks died with it and a new one is needed."""
        return self.process.poll() is None

    def clean(self) -> None:
        """See Starter."""
        try:
            self._ask({"do": "clean"}, "cleaned")
        except (EOFError, BrokenPipeError):  # its ranks are ours now (adopt_orphans), and get the signal anyway
            self.process.wait()
            while left := process.strays():
                for p in left:
                    process.kill(p.pid)
                _reap()
        self.exits.clear()

    def close(self) -> None:
        """See Starter."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.answered:  # still importing torch, and it has no rank: bad input shall not wait for that
            self.process.kill()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
