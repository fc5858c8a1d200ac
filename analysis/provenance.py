"""Where a number comes from, and which rows may be ranked together.

Two rows are compared only where code, torch, driver, hardware class and the conventions behind MFU agree; otherwise
the table splits, and says which of these differ.
"""

import json
from typing import Any

import pandas as pd

from analysis.files import dig, number

GATE = ("code", "torch", "driver", "hardware", "conventions")
UNKNOWN = "unknown"


def columns(
    manifest: dict[str, Any], summary: dict[str, Any], config: dict[str, Any], status: dict[str, Any]
) -> dict[str, str]:
    """The `GATE` columns and some more of one point, as short text; `unknown` where nothing was recorded."""
    listed = manifest.get("hosts")
    hosts = [host for host in listed if isinstance(host, dict)] if isinstance(listed, list) else []
    gpus = [gpu.get("name") for host in hosts for gpu in host.get("gpus") or [] if isinstance(gpu, dict)]
    return {
        "code": _join(_code(host.get("code")) for host in hosts),
        "torch": _join(host.get("torch") for host in hosts),
        "driver": _join(host.get("driver") or "none" for host in hosts),
        "hardware": _hardware(hosts, gpus, summary, config),
        "conventions": _conventions(manifest, summary, status),
        "cuda": _join(host.get("cuda") or "none" for host in hosts),
        "nccl": _join(host.get("nccl") or "none" for host in hosts),
        "python": _join(host.get("python") for host in hosts),
        "env": _join(f"{k}={v}" for host in hosts for k, v in (dig(host, "env") or {}).items()),
        "hosts": ", ".join(dict.fromkeys(str(host.get("host", "?")) for host in hosts)),
    }


def split(points: pd.DataFrame) -> tuple[pd.Series, list[str]]:
    """Group number of each row, largest group first, and the names of the columns in which the groups differ.

    Only rows with a result take part; the others get the number of no group, -1.
    """
    group = pd.Series(-1, index=points.index)
    measured = points[points["tokens_per_s"].notna()]
    keys = measured[list(GATE)].astype(str).agg("\x1f".join, axis=1) if len(measured) else pd.Series(dtype=str)
    order = sorted(keys.unique(), key=lambda key: (-(keys == key).sum(), key))
    group.loc[keys.index] = keys.map({key: i for i, key in enumerate(order)}).astype(int)
    return group, [name for name in GATE if len(measured) and measured[name].nunique() > 1]


def _join(values: Any) -> str:
    distinct = sorted({str(value) for value in values if value})
    return " / ".join(distinct) or UNKNOWN


def _code(code: Any) -> str:
    if not isinstance(code, dict):
        return ""
    commit, source = str(code.get("commit") or ""), str(code.get("src_hash") or "")
    dirty = code.get("dirty")
    text = commit[:10] or (f"src-{source[:10]}" if source else "")
    # A dirty tree is told apart by the hash of its difference, or else by the hash of the source.
    return f"{text}+{str(dirty)[:8] if isinstance(dirty, str) else source[:8] or 'dirty'}" if dirty else text


def _hardware(hosts: list[Any], gpus: list[Any], summary: dict[str, Any], config: dict[str, Any]) -> str:
    if gpus and config.get("device") != "cpu":
        return _join(gpus)
    device = dig(summary, "peak", "device")
    if device:
        return str(device)
    cpus = [host.get("cpu") for host in hosts]
    return f"CPU {_join(cpus)}" if any(cpus) else "CPU" if hosts else UNKNOWN


def _conventions(manifest: dict[str, Any], summary: dict[str, Any], status: dict[str, Any]) -> str:
    """Everything that MFU is computed from, besides the run: conventions, schema and a vendor's peak.

    A measured peak varies a little from run to run and is not a convention; that it was measured is.
    """
    parts: dict[str, Any] = {}
    if isinstance(manifest.get("conventions"), (dict, list, str)):
        parts["flops"] = manifest["conventions"]
    if "schema" in status:
        parts["schema"] = status["schema"]
    kind, peak = dig(summary, "peak", "kind"), number(dig(summary, "peak", "flops"))
    if kind:
        parts["peak"] = f"{peak / 1e12:.4g} TFLOP/s" if kind == "vendor" and peak == peak else str(kind)
    return json.dumps(parts, sort_keys=True) if parts else UNKNOWN
