"""Qualification records: which attention paths were seen to be reproducible bit for bit, on what. Made by train.qualify.

A record file holds one device and torch: {schema, device, capability, torch, cuda, driver, made, records: [{path, dtype, group,
head_dim, deterministic, bitwise, ...evidence}]}. The package ships those that were made; a user's own lie in the cache folder.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


@dataclass(frozen=True)
class Stack:
    """What a record holds for: a kernel is a function of hardware and torch. The driver is for the reader."""

    capability: str  # "9.0" of a GPU, "cpu <name>" of a processor
    torch_version: str

    @classmethod
    def here(cls, device: torch.device) -> "Stack":
        """Of `device` in this process."""
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            return cls(f"{major}.{minor}", torch.__version__)
        from train.measure.manifest import cpu_name

        return cls(f"cpu {cpu_name()}", torch.__version__)


def shipped() -> Path:
    """The package's own records."""
    return Path(__file__).parent


def cache() -> Path:
    """Where a user's records are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mfu-sweep" / "qualified"


def load(*folders: Path) -> list[dict[str, Any]]:
    """All readable record files; others are passed over with a word, since a run must not end for them."""
    found = []
    for path in sorted(file for folder in folders for file in folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["schema"] == SCHEMA and isinstance(content["records"], list):
                found.append(content)
        except (OSError, ValueError, KeyError, TypeError):
            print(f"{path}: not a qualification record, ignored", flush=True)
    return found


def paths(
    files: list[dict[str, Any]], stack: Stack, dtype: str, group: int, head_dim: int, deterministic: bool
) -> dict[str, dict[str, Any]]:
    """{path: its record} of the paths that are reproducible for these shapes under this setting."""
    wanted = {"dtype": dtype, "group": group, "head_dim": head_dim, "deterministic": deterministic, "bitwise": True}
    return {
        record["path"]: record
        for file in files
        if (file.get("capability"), file.get("torch")) == (stack.capability, stack.torch_version)
        for record in file["records"]
        if all(record.get(key) == value for key, value in wanted.items())
    }
