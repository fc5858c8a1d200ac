"""The small files of a run folder, read without trusting them: sweep.json, config.yaml, manifest.json, status.json."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

# The C parser is about ten times faster; both loaders build plain values only, so no file can execute anything.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Anchors, aliases, document marks, directives and explicit keys can reach across top-level blocks.
_REACHES_ACROSS = re.compile(r"(?m)^(---|\.\.\.|%|\? )|(?:^|[\s\[{,])[&*]\w")


def read_bytes(path: Path | str) -> bytes:
    """The file's content; nothing where it is missing, unreadable or a folder."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def read_json(path: Path | str) -> dict[str, Any]:
    """The object in the file; an empty one where the file is missing, half-written, a folder or not an object."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_same_json(path: Path | str) -> dict[str, Any]:
    """As `read_json`, for a file that is mostly the same in all points: equal text is parsed once. Not to be changed."""
    try:
        return _parse_json(read_bytes(path))
    except (ValueError, RecursionError):
        return {}


@lru_cache(maxsize=256)
def _parse_json(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    return value if isinstance(value, dict) else {}


def read_config(path: Path | str) -> dict[str, Any]:
    """config.yaml as dotted keys (see `flatten`); empty where it is missing or unreadable.

    The points of a sweep differ in a few lines, so each top-level block of text is parsed once and remembered: a
    thousand configurations take 0.1 s instead of 3 s.
    """
    try:
        text = read_bytes(path).decode("utf-8")
        if _REACHES_ACROSS.search(text):
            value = yaml.load(text, _Loader)
            return flatten(value) if isinstance(value, dict) else {}
        merged: dict[str, Any] = {}
        for block in _blocks(text):
            merged.update(_parse_block(block))
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return merged


def _blocks(text: str) -> list[str]:
    """The text cut before every line that starts a new top-level key."""
    blocks: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        if blocks and (line[0] in " \t\r\n#}]" or line.startswith("- ")):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return ["".join(lines) for lines in blocks]


@lru_cache(maxsize=65536)
def _parse_block(block: str) -> dict[str, Any]:
    value = yaml.load(block, _Loader)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise yaml.YAMLError(f"not a mapping: {block[:40]!r}")
    return flatten(value)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Nested configuration to dotted keys; a group's `name` takes the group's own key, as on the command line.

    >>> flatten({"reduction": {"name": "zero2o", "bucket_mb": 25}, "micro_batch": 4})
    {'reduction': 'zero2o', 'reduction.bucket_mb': 25, 'micro_batch': 4}
    """
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(prefix if prefix and key == "name" else f"{prefix}.{key}" if prefix else str(key), item)
        elif isinstance(value, list):
            flat[prefix] = json.dumps(value, sort_keys=True)
        else:
            flat[prefix] = value

    walk("", config)
    return flat


def dig(value: Any, *keys: str) -> Any:
    """`value[k1][k2]…`, or None as soon as something is missing or not a mapping."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(value: Any) -> float:
    """A float, or NaN for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    return float(value) if abs(value) < float("inf") else float("nan")


def numbers(value: Any) -> list[float]:
    """The finite numbers of a list (one a rank); a lone number counts as a list of one."""
    items = value if isinstance(value, list) else [value]
    return [x for x in map(number, items) if x == x]
