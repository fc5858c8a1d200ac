"""The real command line for tests, and what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
#: a model that takes milliseconds a step; the other defaults stay those of conf/train.yaml
TINY = [
    "model.dim=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.ffn=64",
    "seq_len=32",
]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a plain checkout: nothing installed, `src` and the root on the path."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"} | extra


def train(*args: str, cwd: Path, timeout: float = 240, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m train ...` in `cwd`, where outputs/ then is."""
    command = [sys.executable, "-m", "train", *args]
    return subprocess.run(command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout)


def points(sweep: Path) -> dict[str, Path]:
    """The point folders of a sweep by their grid overrides, joined by spaces."""
    grid = json.loads((sweep / "sweep.json").read_text())["grid"]
    return {" ".join(g["overrides"]): sweep / g["folder"] for g in grid}


def status(point: Path) -> dict[str, Any]:
    """A point's status.json."""
    data: dict[str, Any] = json.loads((point / "status.json").read_text())
    return data


def frozen(point: Path) -> dict[str, Any]:
    """A point's config.yaml."""
    data: dict[str, Any] = yaml.safe_load((point / "config.yaml").read_text())
    return data


def metrics(point: Path) -> list[dict[str, float]]:
    """A point's metrics.jsonl, line by line."""
    return [json.loads(line) for line in (point / "metrics.jsonl").read_text().splitlines()]
