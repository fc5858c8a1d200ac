"""Where faults are injected: real ranks under a real supervisor in this process, or the real command line."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train import config
from train.config import Train
from train.launch import starters
from train.launch.classify import Verdict
from train.launch.heartbeat import LAYOUT
from train.launch.supervisor import Stop, Supervisor
from train.sweep import freeze, points

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"dim": 32, "layers": 1, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 512}
TINY = [f"model.{k}={v}" for k, v in MODEL.items()] + ["seq_len=16", "micro_batch=1", "device=cpu", "data=fake"]


def wait_for(what: str, ready: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first truthy value of `ready`; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def gone(pid: int) -> bool:
    """Has the process ended? A zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# ---- one point under a supervisor in this process ----------------------------------------------------------------------


class Trial:
    """A point that runs in a thread, while the test breaks things."""

    def __init__(self, lab: "Lab", folder: Path, identity: str) -> None:
        self.folder = folder
        self.stop = Stop()
        self.supervisor = Supervisor(folder, identity, lab.warm, self.stop)
        self.verdict: Verdict | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.verdict = self.supervisor.run()

    def pid(self, rank: int) -> int:
        """The rank's process, once it has been started."""
        return wait_for(
            f"rank {rank} starts",
            lambda: next((p for p, r in list(self.supervisor.pids.items()) if r == rank), None),
        )

    def reach(self, phase: str, step: int = -1) -> None:
        """Wait until every rank is in `phase`, and in `step` or later."""
        order = ("start", "build", "train", "end")
        there_or_later = order[order.index(phase) :]  # a phase that is read while it is written is none of them

        def there() -> bool:
            watches = list(self.supervisor.watches.values()) if hasattr(self.supervisor, "watches") else []
            return len(watches) == 2 and all(w.count and w.phase in there_or_later and w.step >= step for w in watches)

        wait_for(f"{phase} {step}", lambda: there() or self.verdict)
        assert self.verdict is None, self.verdict

    def end(self, seconds: float = 60.0) -> Verdict:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the supervisor never ended"
        assert self.verdict is not None
        left = [pid for pid in self.supervisor.pids if not gone(pid)]
        assert not left, f"ranks left behind: {left}"
        return self.verdict

    @property
    def status(self) -> dict[str, Any]:
        return read(self.folder / "status.json")


class Lab:
    """A warm server for all trials of a test session."""

    def __init__(self) -> None:
        self.warm = starters.Warm(ROOT / "src")
        self.warm.probe()

    def point(self, sweep: Path, **values: Any) -> tuple[Path, str]:
        """A frozen point of two ranks: (folder, identity). `values`: scalars of Train, `launch` a dict."""
        launch = {"name": "local"} | values.pop("launch", {})
        reduction = values.pop("reduction", "ddp")
        cfg = config.from_dict(
            Train,
            {
                "model": {"name": "tiny"} | MODEL, "data": {"name": "fake"}, "parallelism": {"name": "data"},
                "reduction": {"name": reduction}, "memory": {"name": "none"}, "compile": {"name": "none"},
                "nccl": {"name": "default"}, "attention": {"name": "math"}, "precision": {"name": "fp32"},
                "optim": {"name": "adamw"}, "hardware": {"name": "auto", "peak_tflops": 0.1}, "launch": launch,
                "micro_batch": 1, "seq_len": 16, "device": "cpu", "nproc": 2,
            } | values,
        )  # fmt: skip
        assert points.resolve(cfg, {}) is None
        identity = freeze.identity(cfg)
        folder = sweep / f"point-{identity[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        freeze.write_atomic(folder / "config.yaml", freeze.config_text(cfg))
        return folder, identity

    def start(self, sweep: Path, **values: Any) -> Trial:
        if not self.warm.alive():
            self.warm.restart()
        return Trial(self, *self.point(sweep, **values))

    def run(self, sweep: Path, **values: Any) -> Trial:
        trial = self.start(sweep, **values)
        trial.end()
        return trial


# ---- the real command line ---------------------------------------------------------------------------------------------


class Command:
    """`python -m train -m …` with a mark in its environment, by which whatever it leaves behind is found."""

    def __init__(
        self, out: Path, *args: str, wrap: tuple[str, ...] = (), env: dict[str, str] | None = None, **popen: Any
    ):
        self.mark = f"MFU_TEST_MARK={uuid.uuid4()}"
        out.mkdir(parents=True, exist_ok=True)
        self.temp = out / ".tmp"  # locks and scratch folders of its own: tests run side by side
        self.temp.mkdir(exist_ok=True)
        name, _, value = self.mark.partition("=")
        place = str(out).replace("'", "\\'")
        inherited = {
            k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"
        }  # torch exports it, in-process
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        full = inherited | {"PYTHONPATH": path, "TMPDIR": str(self.temp), name: value} | (env or {})
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | popen
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "train", "-m", f"out='{place}'", *args], env=full, cwd=ROOT,
            stdin=subprocess.DEVNULL, start_new_session=True, **options,
        )  # fmt: skip

    def finish(self, seconds: float = 270.0) -> "Command":
        try:
            self.output, _ = self.process.communicate(timeout=seconds)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.code, self.seconds = self.process.returncode, time.monotonic() - self.began
        return self

    def living(self) -> list[int]:
        """Living processes that inherited the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and not gone(int(entry.name)):
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def nothing_left(self, seconds: float = 5.0) -> None:
        """No process and no scratch folder of this command remains."""
        wait_for(f"processes {self.living()} end", lambda: not self.living(), seconds)
        assert not list(self.temp.glob("mfu-sweep-[0-9]*-[0-9]*-*")), "scratch left behind"


class Onlooker(threading.Thread):
    """Sees from outside when the points of a running command took their first step and when they reached their end."""

    def __init__(self, command: Command, folder: Path) -> None:
        super().__init__(daemon=True)
        self.command, self.folder = command, folder
        self.first: dict[str, float] = {}  # scratch folder → monotonic seconds
        self.ended: dict[str, float] = {}  # point folder → monotonic seconds
        self.start()

    def run(self) -> None:
        while self.command.process.poll() is None:
            for beat in self.command.temp.glob("mfu-sweep-[0-9]*/heartbeat-0"):
                if beat.parent.name not in self.first and self._step(beat) >= 0:
                    self.first[beat.parent.name] = time.monotonic()
            for path in self.folder.glob("*/status.json"):
                name = path.parent.name
                if name not in self.ended and read(path).get("status", "running") != "running":
                    self.ended[name] = time.monotonic()
            time.sleep(0.01)

    def _step(self, beat: Path) -> int:
        try:
            data = beat.read_bytes()
        except OSError:
            return -1
        return int(LAYOUT.unpack(data)[1]) if len(data) == LAYOUT.size else -1

    def gaps(self) -> list[float]:
        """Seconds from a point's end to the next one's first step."""
        self.join()
        return [first - end for end, first in zip(self.ended.values(), list(self.first.values())[1:])]


def sweep(out: Path, *args: str, **options: Any) -> Command:
    """The command, to its end."""
    return Command(out, *args, **options).finish()


def statuses(folder: Path) -> dict[str, dict[str, Any]]:
    """Point folder → status.json, for every point of the grid."""
    grid = read(folder / "sweep.json").get("grid", [])
    return {g["folder"]: read(folder / g["folder"] / "status.json") for g in grid}


def steps(folder: Path) -> list[int]:
    """The steps in a point's metrics.jsonl, in order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]
