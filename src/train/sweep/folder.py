"""A sweep's folder: made or found, locked, with its grid, snapshot and frozen points."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import yaml

from train.config import YAML_LOADER, ConfigError, Train
from train.launch.record import now
from train.launch.tell import say
from train.sweep import freeze, snapshot
from train.sweep.freeze import read_json
from train.sweep.points import Frozen

STATUSES = (
    "running", "pending", "ok", "oom", "invalid", "infeasible", "timeout", "crashed", "lost", "interrupted",
)  # fmt: skip


@dataclass
class Sweep:
    """An open sweep folder."""

    path: Path
    points: list[Frozen]  # of this command
    code_hash: str
    code: Path  # snapshot for PYTHONPATH

    def folder(self, point: Frozen) -> Path:
        """The point's folder."""
        return self.path / point.folder


def choose(cfg: Train) -> Path:
    """outputs/<name>, or a new folder named by the time of day. Raises ConfigError when it can't be made."""
    out = Path(cfg.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if cfg.name:
            path = out / cfg.name
            path.mkdir(exist_ok=True)
        else:
            path = _timestamp(out)
        (path / ".sweep").mkdir(exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as e:
        wrong = e.filename or (out / cfg.name if cfg.name else out)
        key, value = ("name", cfg.name) if cfg.name and out.is_dir() and os.access(out, os.W_OK) else ("out", cfg.out)
        raise ConfigError(key, value, f"{wrong} can't be written: {e.strerror}") from None
    return path.resolve()


def _timestamp(out: Path) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for n in range(1, 1000):
        path = out / (stamp if n == 1 else f"{stamp}_{n}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise FileExistsError(17, "no free name")


def open_sweep(path: Path, points: list[Frozen], command: str, code: Optional[str]) -> Sweep:
    """Freeze the points into `path`; sweep.json is written before the first point starts.

    Raises ConfigError when a folder was edited by hand, or when the code has changed since and `code` is not "new".
    """
    state = path / ".sweep"
    digest = snapshot.code_hash()
    old = read_json(path / "sweep.json") or {}
    before = (old.get("snapshot") or {}).get("hash")
    if before and before != digest and code != "new":
        raise ConfigError(
            "name",
            path.name,
            f"was run with code {before[:8]}, src/train is now {digest[:8]}; continue with code=new or use another name",
        )
    grid = {g["identity"]: g for g in old.get("grid", [])}
    for p in points:
        if p.identity in grid:
            p.folder = grid[p.identity]["folder"]  # found by hash, whatever this command's slug is
        else:
            grid[p.identity] = {"identity": p.identity, "folder": p.folder, "overrides": p.overrides}
    for p in points:
        _check_frozen(path / p.folder, p)
    target = snapshot.take(state, digest)
    freeze.write_json(
        path / "sweep.json",
        {
            "schema": freeze.SCHEMA,
            "command": command,
            "created": old.get("created") or now(),
            "grid": list(grid.values()),
            "jobs": old.get("jobs", []),
            "snapshot": {"hash": digest, "path": str(target.relative_to(path))},
        },
    )
    for p in points:
        folder = path / p.folder
        folder.mkdir(exist_ok=True)
        if not (folder / "config.yaml").exists():
            freeze.write_atomic(folder / "config.yaml", freeze.config_text(p.cfg), sync=False)
        if p.invalid and not (folder / "status.json").exists():
            write_status(folder, p.identity, "invalid", p.invalid, sync=False)
    return Sweep(path, points, digest, target)


def _check_frozen(folder: Path, point: Frozen) -> None:
    """A frozen configuration that was edited is refused, with the key that differs."""
    file = folder / "config.yaml"
    if not file.exists():
        return
    text = freeze.config_text(point.cfg)
    try:
        found = file.read_text(encoding="utf-8")
        if found == text:
            return
        stored = yaml.load(found, YAML_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        raise ConfigError(
            "config.yaml", file, "can't be read as YAML; delete the folder to run the point again"
        ) from None
    wanted = yaml.load(text, YAML_LOADER)
    keys = freeze.training_config(point.cfg)
    for key, mine in _flat(wanted).items():
        theirs = _flat(stored).get(key) if isinstance(stored, dict) else None
        top = key.split(".")[0]
        if top in keys and key not in ("data.path", "data.tokenizer") and theirs != mine:
            raise ConfigError(f"{folder.name}/config.yaml: {key}", theirs, f"was edited, the point's value is {mine}")


def refresh_config(folder: Path, cfg: Train) -> None:
    """Give a point that is about to run this command's run-level settings (timeout, launch.*); the rest is the same."""
    text = freeze.config_text(cfg)
    file = folder / "config.yaml"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        freeze.write_atomic(file, text, sync=False)


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def write_status(
    folder: Path,
    identity: str,
    status: str,
    reason: str,
    summary: Optional[dict[str, Any]] = None,
    sync: bool = True,
) -> None:
    """status.json of a point that is decided without running."""
    freeze.write_json(
        folder / "status.json",
        {
            "schema": freeze.SCHEMA, "identity": identity, "status": status, "reason": reason, "attempt": 0,
            "started": None, "ended": now(), "ranks": [], "summary": summary or {},
        },
        sync,
    )  # fmt: skip


def status_of(folder: Path, identity: str) -> dict[str, Any]:
    """The point's status.json; a damaged one, or one of another point, is moved aside and counts as none (`pending`)."""
    path = folder / "status.json"
    none: dict[str, Any] = {"status": "pending", "reason": "", "attempt": 0}
    if not path.exists():
        return none
    data = read_json(path)
    ours = data is not None and (data.get("schema"), data.get("identity")) == (freeze.SCHEMA, identity)
    if data is None or not ours or data.get("status") not in STATUSES:
        aside = path.with_name(f"status.damaged-{os.getpid()}-{len(list(folder.glob('status.damaged-*')))}")
        path.rename(aside)
        say(f"{folder.name}: status.json is not one of this point; moved to {aside.name}, the point runs again")
        return none
    return data


def failed_attempts(folder: Path, current: dict[str, Any]) -> int:
    """How many attempts at the point crashed or timed out, over all commands."""
    count = int(current.get("status") in ("crashed", "timeout"))
    for old in folder.glob("attempts/*/status.json"):
        count += (read_json(old) or {}).get("status") in ("crashed", "timeout")
    return count
