"""A point's identity, its folder, and files that are old or new but never half-written."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Optional

import yaml

from train.config import NOT_IDENTITY, YAML_DUMPER, Train, to_dict

SCHEMA = 1


def write_atomic(path: Path, text: str, sync: bool = True) -> None:
    """Replace `path` by temp file and rename, so that a reader or a kill never meets half of it. Raises OSError.

    `sync` waits for the disk, which only matters when the machine itself goes down: for results, not for progress.
    """
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            if sync:
                f.flush()
                os.fsync(f.fileno())
        os.chmod(temp, 0o644)
        os.replace(temp, path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any, sync: bool = True) -> None:
    """`data` as JSON through write_atomic."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    # bytes of a message or file name that are no UTF-8 are lone surrogates in Python, and in JSON as \udcXX
    write_atomic(path, text.encode(errors="backslashreplace").decode() + "\n", sync)


def read_json(path: Path) -> Optional[dict[str, Any]]:
    """A mapping, or None for a file that is missing, damaged or not a mapping."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def training_config(cfg: Train) -> dict[str, Any]:
    """The part of the resolved configuration that decides what is trained."""
    data = {k: v for k, v in to_dict(cfg).items() if k not in NOT_IDENTITY}
    data["data"] = {k: v for k, v in data["data"].items() if k not in ("path", "tokenizer")}  # by content, not by place
    if cfg.repeats == 1:
        del data["repeat"]
    return data


def identity(cfg: Train) -> str:
    """sha256 over the canonical JSON of `training_config`."""
    text = json.dumps(training_config(cfg), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def slug(swept: list[str], cfg: Train) -> str:
    """Readable part of a folder's name, from the overrides that differ within the grid."""
    pairs = ((key, value.strip("'")) for key, _, value in (s.partition("=") for s in swept))
    parts = [
        v if k in ("reduction", "model", "memory", "compile", "nccl") else f"{k.split('.')[-1]}-{v}" for k, v in pairs
    ]
    if cfg.repeats > 1:
        parts.append(f"r{cfg.repeat}")
    text = re.sub(r"[^A-Za-z0-9.-]+", "-", "_".join(parts) or f"{cfg.model.name}-{cfg.reduction.name}").strip("-.")
    return (text or "point")[:60]


def config_text(cfg: Train) -> str:
    """The frozen config.yaml."""
    return yaml.dump(to_dict(cfg), Dumper=YAML_DUMPER, sort_keys=False, allow_unicode=True, width=10**6)
