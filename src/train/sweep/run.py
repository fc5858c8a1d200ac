"""One command: grid → frozen points → executor → table. Everything is checked before anything is written."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from train.config import ConfigError, Train
from train.launch import environment, local, starters
from train.launch.classify import FAILED
from train.launch.prune import KEPT
from train.launch.slurm import claims
from train.launch.supervisor import Stop
from train.launch.tell import fill_standard_files, say
from train.sweep import ending, folder, grid, points, progress, snapshot
from train.sweep.freeze import read_json
from train.sweep.store import PACKAGE


def probe_host(warm: Optional[starters.Warm]) -> dict[str, Any]:
    """What torch sees, through the warm server when there is one. Raises ConfigError when torch can't be imported."""
    if warm is not None:
        try:
            return warm.probe()
        except EOFError:
            raise ConfigError("torch", "missing", "the rank server could not start; its error is above") from None
    command = [sys.executable, "-m", "train.launch.probe"]
    done = subprocess.run(
        command, env=starters.python_env(PACKAGE.parent), capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError("torch", "missing", f"can't be imported by {sys.executable}: {last}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def install_signals() -> Stop:
    """SIGINT, SIGTERM and SIGHUP end the command at once while nothing is written, later by way of the flag.

    A second one ends it at once too, save that a point whose end is being recorded (0.1 s) is recorded. What was ignored
    from the start (nohup, a shell's background job) stays ignored.
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop = Stop(fd=read)

    def handler(signum: int, _: object) -> None:
        stop.count += 1
        stop.signum = stop.signum or signum
        if stop.nothing_written:
            os.write(2, b"interrupted; nothing was written\n")
        if stop.nothing_written or stop.count > 2 or (stop.count > 1 and not stop.busy):
            os._exit(128 + stop.signum)  # server and ranks die with this process
        try:
            os.write(write, b"x")
        except BlockingIOError:
            pass

    for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) != signal.SIG_IGN:
            signal.signal(s, handler)
    return stop


def sweep(
    loader: ConfigLoader, master: DictConfig, grids: list[dict[str, Any]], arguments: list[str], launcher: Any = None
) -> int:
    """Run the grid; the exit code. Raises ConfigError and Hydra's errors for bad input, before anything is written."""
    began = time.monotonic()
    fill_standard_files()
    stop = install_signals()
    composer = grid.Composer(loader, master)
    cells = list(grid.expand(loader, grids, arguments))
    if not cells:
        raise ConfigError("sweeps", "", "the grid has no points")
    run_cfg = points.checked(composer, iter(cells[:1]))[0][1]
    for name in environment.leftovers():
        say(f"ignored: {name}={environment.USER[name]} is left over from another launcher")
    head, dirty = snapshot.commit()
    environment.PROVENANCE.update(MFU_SWEEP_CODE=snapshot.code_hash(), MFU_SWEEP_COMMIT=head, MFU_SWEEP_DIRTY=dirty)
    several = len(cells) * run_cfg.repeats > 1
    if run_cfg.cancel:
        return int(launcher.cancel(run_cfg, say))
    remote = launcher is not None  # a login node runs nothing and imports no torch
    warm = starters.Warm(PACKAGE.parent) if run_cfg.launch.warm and several and not (run_cfg.plan or remote) else None
    try:  # the server imports torch while the grid is composed
        checked = points.checked(composer, iter(cells))
        if warm is not None and any(c.compile.name != "none" for _, c in checked):
            warm.will_compile()
        host: dict[str, Any] = {}
        if not remote:
            with progress.waiting("looking at this machine, importing torch"):
                host = probe_host(warm)
        frozen = points.freeze_all(checked, host, len(os.sched_getaffinity(0)))
        uuids = [g["uuid"] for g in host.get("gpus", [])]
        return _run(run_cfg, frozen, warm, stop, uuids, began, launcher)
    finally:
        if warm is not None:
            warm.close()


def _run(
    cfg: Train,
    frozen: list[points.Frozen],
    warm: Optional[starters.Warm],
    stop: Stop,
    uuids: list[str],
    began: float,
    launcher: Any,
) -> int:
    merged = sum(len(p.merged) for p in frozen)
    if merged:
        say(f"{merged} equal point{'s' if merged > 1 else ''} merged")
    if cfg.plan:
        for p in frozen:
            known = (read_json(Path(cfg.out, cfg.name, p.folder, "status.json")) or {}) if cfg.name else {}
            status = "invalid" if p.invalid else known["status"] if known.get("status") in KEPT else "pending"
            say(f"{status:<10} {p.folder}  {f'({p.invalid})  ' if p.invalid else ''}{' '.join(p.overrides)}")
        say(f"{len(frozen)} point{'s' * (len(frozen) != 1)}; nothing was written")
    if all(p.invalid for p in frozen):
        reasons = Counter(p.invalid for p in frozen)
        lines = [f"{reason} ({n} points)" if n > 1 else str(reason) for reason, n in reasons.items()]
        sys.stderr.write("error: " + "; ".join(lines[:3]) + "\n")
        return 2
    if cfg.plan:
        return 0
    if launcher is not None:
        launcher.check(cfg, frozen)
    stop.nothing_written = False
    before = ending.existing(Path(cfg.out))
    path = folder.choose(cfg)
    with local.locked(path / ".sweep" / "lock", f"sweep {path.name}", stop) as owned:
        if not owned:
            return 128 + (stop.signum or signal.SIGINT)
        if launcher is None:
            claims.refuse_queued(path, {p.identity for p in frozen})
        try:
            opened = folder.open_sweep(path, frozen, shlex.join(ending.typed()), cfg.code)
        except OSError as e:
            ending.undo(path, frozen, before)
            raise ConfigError("out", cfg.out, f"the run folder can't be written: {e.strerror}") from None
        if launcher is not None:
            executor = launcher.executor(opened, cfg, stop, say)
            if (code := executor.run()) is not None:
                return int(code)
        else:
            with progress.View() as view:
                executor = local.Local(opened, cfg, warm, stop, view.say, uuids)
                executor.on_progress, view.statuses = view.update, executor.statuses
                executor.run()
    statuses = executor.statuses()
    if stop.signum:
        say(ending.interrupted(opened, statuses))
        return 128 + stop.signum
    report(path)
    if launcher is None:  # else it went where the jobs ran
        say(ending.where_time_went(opened, time.monotonic() - began))
    for line in ending.logs(opened):
        say(line)
    return exit_code(statuses, stop)


def exit_code(statuses: list[str], stop: Stop) -> int:
    """The command's exit code from its points' final statuses."""
    if stop.signum:
        return 128 + stop.signum
    if any(s in FAILED for s in statuses):
        return 1
    return 2 if all(s == "invalid" for s in statuses) else 0


def report(path: Path) -> None:
    """Table and report through `analysis`, from the folders alone."""
    import analysis.errors
    import analysis.report
    import analysis.table

    say("")
    try:
        say(analysis.table.render(path))
        say(f"report: {os.path.relpath(analysis.report.write_report(path))}")
    except OSError as e:  # a full disk: the points are what counts
        later = f"python -m analysis report {shlex.quote(os.path.relpath(path))}"
        say(f"report: can't be written: {e.strerror}; later: {later}")
    except analysis.errors.BadInput as e:  # somebody moved or removed the folder meanwhile
        say(f"report: can't be made: {e}")
