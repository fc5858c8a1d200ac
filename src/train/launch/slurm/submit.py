"""Points → arrays → sbatch, through submitit's executor. Nothing is lost: what to run is on disk before sbatch is called."""

import contextlib
import importlib.metadata
import io
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from train.config import ConfigError, Train
from train.launch import environment
from train.launch.slurm import files, queue, script
from train.launch.slurm.claims import COMMENT
from train.launch.slurm.options import Shape, seconds, shape
from train.sweep.freeze import write_json
from train.sweep.points import Frozen

if TYPE_CHECKING:
    from train.sweep.folder import Sweep

#: sbatch's words for faults that pass (its own retries are over by then)
PASSING = re.compile(
    r"Socket timed out|Unable to contact slurm controller|temporarily un(able|available)|Connection (refused|reset)"
    r"|SubmitJob(s)?(PerUser|PerAccount)?Limit|Zero Bytes were transmitted",
    re.IGNORECASE,
)
#: what --test-only says of a request that no node can meet, now or ever
UNAVAILABLE = "Requested node configuration is not available"
#: seconds between tries; the last fault is given back
TRIES = (1.0, 2.0, 5.0, 15.0, 30.0)


@dataclass
class Plan:
    """One array that is to be submitted."""

    shape: Shape
    tasks: list[list[Frozen]]
    after_previous: bool  # a later chunk under launch.array_parallelism

    def points(self) -> list[Frozen]:
        """In order."""
        return [p for task in self.tasks for p in task]


class SubmissionFailed(Exception):
    """sbatch refused, in its own words."""


def plan(points: list[Frozen], cfg: Train, largest: int) -> list[Plan]:
    """Arrays of points of one shape, packed by launch.points_per_job, none longer than `largest` tasks."""
    groups: dict[Shape, list[Frozen]] = {}
    for p in points:
        groups.setdefault(shape(p.cfg), []).append(p)
    plans: list[Plan] = []
    for key, group in groups.items():
        size = cfg.launch.points_per_job
        tasks = [group[i : i + size] for i in range(0, len(group), size)]
        for start in range(0, len(tasks), largest):
            limited = bool(plans) and cfg.launch.array_parallelism is not None
            plans.append(Plan(key, tasks[start : start + largest], limited))
    return plans


def gpu_hours(plans: list[Plan], cfg: Train) -> Optional[float]:
    """GPU-hours (node-hours of CPU points count no GPU) if every task used its whole limit; None without a limit."""
    limit = seconds(cfg.launch.time) if cfg.launch.time else None
    if limit is None:
        return None
    return sum(p.shape.nodes * p.shape.gpus * len(p.tasks) for p in plans) * limit / 3600


def describe(plans: list[Plan], cfg: Train) -> Iterator[str]:
    """Points, arrays, nodes and GPU-hours, in lines."""
    for p in plans:
        nodes = f"{p.shape.nodes} node{'s' if p.shape.nodes > 1 else ''}"
        gpus = f" x {p.shape.gpus} GPUs" if p.shape.gpus else ""
        yield f"array: {len(p.tasks)} tasks, {len(p.points())} points, each on {nodes}{gpus}"
    if plans:
        hours = gpu_hours(plans, cfg)
        total = "unknown without launch.time" if hours is None else f"{hours:g}"
        yield f"{sum(len(p.points()) for p in plans)} points in {len(plans)} arrays, GPU-hours at the time limit: {total}"


def test_only(cfg: Train, points: list[Frozen]) -> None:
    """Let SLURM judge one script per shape before anything is written. Raises ConfigError with sbatch's words."""
    there = shutil.which("sbatch") is not None
    if not there and not cfg.launch.dry_run:
        raise ConfigError("launch", "slurm", "needs sbatch, which is not in PATH (a login node has it)")
    with tempfile.TemporaryDirectory(prefix="mfu-sweep-") as folder:
        for n, key in enumerate(dict.fromkeys(shape(p.cfg) for p in points)):
            array = script.Array(key, 1, "mfu-test", COMMENT, Path(folder), Path(folder))
            file = Path(folder) / f"{n}.sh"
            file.write_text(script.render(cfg.launch, array), encoding="utf-8")
            if not there:
                continue  # a dry run shows the scripts anywhere
            try:
                try:
                    _sbatch("--test-only", str(file))
                except SubmissionFailed as e:
                    if UNAVAILABLE not in str(e):
                        raise
                    # also said of nodes that are only drained or down just now: a held job tells, it can't start
                    job = _sbatch("--hold", "--parsable", "--output=/dev/null", str(file)).split(";")[0].strip()
                    _run("scancel", job)
            except SubmissionFailed as e:
                raise ConfigError("launch", _asked(cfg), f"SLURM refuses it: {e}") from None


def _asked(cfg: Train) -> str:
    names = ("partition", "account", "qos", "constraint", "exclude")
    return " ".join(["slurm", *(f"launch.{n}={v}" for n in names if (v := getattr(cfg.launch, n)) is not None)])


def _sentence(words: str) -> str:
    return re.sub(r"^((allocation failure|sbatch: error|Batch job submission failed): )+", "", words.strip())


def _sbatch(*args: str) -> str:
    return _patiently(lambda: _run("sbatch", *args), lambda: None)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SubmissionFailed(done.stderr)
    return done.stdout


def _patiently(attempt: Callable[[], str], known: Callable[[], Optional[str]]) -> str:
    """attempt() until it works or fails for good; `known` finds out whether a try that timed out had worked after all."""
    for pause in (*TRIES, None):
        try:
            return attempt()
        except SubmissionFailed as e:
            lines = [_sentence(line) for line in str(e).splitlines() if line.strip()]
            words = next((line for line in lines if PASSING.search(line)), "")
            if not words or pause is None:
                raise SubmissionFailed(lines[-1] if lines else "sbatch failed without a word") from None
        print(f"sbatch: {words}; trying again in {pause:g} s", flush=True)
        time.sleep(pause)
        if (found := known()) is not None:
            return found
    raise AssertionError("the last try returns or raises")


class Submitter:
    """Submits the arrays of one open sweep."""

    def __init__(self, sweep: "Sweep", cfg: Train) -> None:
        self.sweep, self.cfg = sweep, cfg
        self.root = sweep.path / ".sweep" / "slurm"
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", sweep.path.name).strip("-")[:40]
        self.prefix = f"mfu-{name}"

    def prepare(
        self, plan: Plan, token: str, folder: Path, after: Optional[str] = None
    ) -> tuple[files.Submission, str]:
        """Write tasks.json into `folder`; it and the script's text. Raises ConfigError (template)."""
        folder.mkdir(parents=True)
        launch = self.cfg.launch
        try:
            torch: Optional[str] = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = None
        told = files.Submission(
            token=token,
            name=f"{self.prefix}-{token[:6]}",
            tasks=[[files.Task(p.folder, p.identity) for p in task] for task in plan.tasks],
            code=self.sweep.code_hash,
            torch=torch if launch.python is None else None,
            warm=launch.warm,
            time=launch.time,
            signal_seconds=launch.signal_seconds,
            requeues=launch.requeues,
            provenance=environment.PROVENANCE,
        )
        array = script.Array(plan.shape, len(plan.tasks), told.name, COMMENT + token, folder, self.sweep.code, after)
        text = script.render(launch, array)
        told.save(folder)
        return told, text

    def dry_run(self, plans: list[Plan]) -> list[Path]:
        """Write every script and tasks.json below .sweep/dry-run; the scripts."""
        root = self.sweep.path / ".sweep" / "dry-run"
        shutil.rmtree(root, ignore_errors=True)
        out = []
        for n, p in enumerate(plans):
            _, text = self.prepare(p, f"dry-run-{n}", root / str(n))
            out.append(root / str(n) / "submission.sh")
            out[-1].write_text(text, encoding="utf-8")
        return out

    def submit(self, plans: list[Plan]) -> Iterator[tuple[str, files.Submission, Path]]:
        """Submit one array after the other: (array id, what was told, its folder). Raises SubmissionFailed; earlier
        arrays stay."""
        previous: Optional[str] = None
        for p in plans:
            token = uuid.uuid4().hex[:12]
            folder = self.root / token
            told, text = self.prepare(p, token, folder, previous if p.after_previous else None)
            previous = self._submit(folder, token, text)
            write_json(folder / "job.json", {"id": previous, "name": told.name})
            yield previous, told, folder

    def _submit(self, folder: Path, token: str, text: str) -> str:
        import submitit.core.utils
        from submitit.slurm.slurm import SlurmExecutor

        class Executor(SlurmExecutor):
            """submitit's, with our script in place of its pickled call."""

            def _make_submission_file_text(self, command: str, uid: str) -> str:
                return text

        executor = Executor(folder)

        def attempt() -> str:
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # submitit prints sbatch's words and raises them too
                    return str(executor._submit_command("").job_id)
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as e:
                raise SubmissionFailed(str(e)) from None

        def known() -> Optional[str]:
            try:
                found = [e.job for e in queue.look().values() if e.comment == COMMENT + token]
            except queue.QueueError:
                return None
            return found[0].split("_")[0] if found else None

        return _patiently(attempt, known)


def shell(path: Path) -> str:
    """A path as it is typed."""
    return shlex.quote(str(path))
