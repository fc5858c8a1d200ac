"""A cluster for the whole session, and the real command line run against it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing, names_resolve

ROOT = Path(__file__).resolve().parents[2]
#: a model that trains in milliseconds
TINY = (
    "model=debug", "model.dim=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.head_dim=8",
    "model.ffn=32", "seq_len=32", "data=fake", "steps=3", "device=cpu",
)  # fmt: skip


def why_not() -> str | None:
    """Why SLURM tests can't run here, or None."""
    if os.environ.get("CI") != "true" and os.environ.get("SLURM_TESTS") != "1":
        return "SLURM tests run with CI=true or SLURM_TESTS=1"
    if os.geteuid() != 0:
        return "SLURM tests need root: slurmd starts jobs as their user"
    lacking = missing()
    if lacking:
        assert os.environ.get("CI") != "true", f"CI needs slurm-wlm and munge: {lacking} missing"
        return f"apt-get install slurm-wlm munge: {', '.join(lacking)} missing"
    return None


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="mfu-slurm-") as folder,
        names_resolve(),
        Cluster(Path(folder) / "c", max_array=11) as cluster,
    ):
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with an empty queue and two idle nodes, before and after."""
    session_cluster.clear()
    yield session_cluster
    session_cluster.clear()


@dataclass
class Cli:
    """`python -m train` on a cluster, with tiny models, in a folder whose name has spaces and quotes."""

    cluster: Cluster
    out: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def args(self, *args: str) -> list[str]:
        quoted = str(self.out).replace("\\", "\\\\").replace("'", "\\'")
        given = {a.partition("=")[0] for a in args}
        tiny = [a for a in TINY if a.partition("=")[0] not in given and "cancel" not in given]
        return [sys.executable, "-m", "train", *tiny, f"out='{quoted}'", *args]

    def env(self, **more: str) -> dict[str, str]:
        env = self.cluster.env(PYTHONPATH=f"{ROOT}/src:{ROOT}", PYTHONSAFEPATH="1", **more)
        return {k: v for k, v in env.items() if k not in ("CI", "PYTEST_CURRENT_TEST")}

    def start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        p = subprocess.Popen(
            self.args("launch=slurm", *args), env=self.env(**more), cwd=self.out, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(p)
        return p

    def run(self, *args: str, code: int | None = 0, timeout: float = 240, **more: str) -> str:
        """Output of the command, which must leave with `code`."""
        p = self.start(*args, **more)
        try:
            text = p.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {timeout} s:\n{p.communicate()[0]}\n{self.logs()}") from None
        assert code is None or p.returncode == code, f"exit {p.returncode}:\n{text}\n{self.logs()}"
        return text

    def stop(self) -> None:
        """End the commands that still run."""
        for p in self.started:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()

    def local(self, *args: str, timeout: float = 240) -> str:
        """The same on this machine."""
        done = subprocess.run(
            self.args("launch=local", *args),
            env=self.env(),
            cwd=self.out,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def logs(self) -> str:
        """What the jobs said."""
        return "\n".join(
            f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}"
            for p in sorted(self.out.glob("*/.sweep/slurm/*/*.log"))
        )

    def points(self, name: str) -> dict[str, dict[str, Any]]:
        """status.json by point folder; {} before it is there."""
        import json

        out = {}
        for config in sorted((self.out / name).glob("*/config.yaml")):
            status = config.with_name("status.json")
            out[config.parent.name] = json.loads(status.read_text()) if status.exists() else {"status": "pending"}
        return out

    def states(self, name: str) -> list[str]:
        return [s["status"] for s in self.points(name).values()]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
        """The first true value of condition()."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"no {what} within {seconds} s\n{self.logs()}"
            time.sleep(0.1)
        return value

    def training(self, name: str, lines: int = 2) -> Callable[[], Any]:
        """Condition: a point of the sweep has written so many steps; its folder."""

        def look() -> Any:
            for f in (self.out / name).glob("*/metrics.jsonl"):
                if f.read_bytes().count(b"\n") >= lines:
                    return f.parent
            return None

        return look


@pytest.fixture
def cli(cluster: Cluster, tmp_path: Path) -> Iterator[Cli]:
    out = tmp_path / 'out\'s dir "q"'
    out.mkdir()
    it = Cli(cluster, out)
    yield it
    it.stop()
