"""Where a number comes from, and which rows may be ranked together.

Two rows are compared only where code, torch, driver, hardware class and the conventions behind MFU agree; otherwise
the table splits, and says which of these differ.
"""

import json
from collections import Counter
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
        "commit": _join(_commit(host.get("code")) for host in hosts),
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
    keys = list(zip(*(measured[name].astype(str) for name in GATE), strict=True))
    counts = Counter(keys)
    order = {key: i for i, key in enumerate(sorted(counts, key=lambda key: (-counts[key], key)))}
    group.loc[measured.index] = pd.Series([order[key] for key in keys], index=measured.index, dtype="int64")
    return group, [name for name in GATE if len(measured) and measured[name].nunique() > 1]


def _join(values: Any) -> str:
    distinct = sorted({str(value) for value in values if value})
    return " / ".join(distinct) or UNKNOWN


def _code(code: Any) -> str:
    """The hash of the trainer's source where it is known: two commits that differ in a document ran the same code."""
    if not isinstance(code, dict):
        return ""
    commit, source, dirty = (str(code.get(key) or "") for key in ("commit", "src_hash", "dirty"))
    if source:
        return f"src {source[:12]}"
    return f"{commit[:12]}+{dirty[:8]}" if commit and dirty not in ("", "False") else commit[:12]


def _commit(code: Any) -> str:
    """For the reader: the commit, with a + where the tree had changes."""
    commit, dirty = str(dig(code, "commit") or ""), str(dig(code, "dirty") or "")
    return commit[:12] + "+" * (bool(commit) and dirty not in ("", "False", "0"))


def _hardware(hosts: list[Any], gpus: list[Any], summary: dict[str, Any], config: dict[str, Any]) -> str:
    if gpus and config.get("device") != "cpu":
        return _join(gpus)
    device = dig(summary, "peak", "device")
    if device:
        return str(device)
    cpus = [host.get("cpu") for host in hosts]
    return f"CPU {_join(cpus)}" if any(cpus) else "CPU" if hosts else UNKNOWN


def _conventions(manifest: dict[str, Any], summary: dict[str, Any], status: dict[str, Any]) -> str:
    """Everything that MFU is computed from, besides the run: conventions, schema and the source of a vendor's peak.

    A source has a peak for each dtype, so that fp8 and bf16 on one device can be ranked by speed. A measured peak varies a
    little from run to run and is not a convention; that it was measured is.
    """
    parts: dict[str, Any] = {}
    if isinstance(manifest.get("conventions"), (dict, list, str)):
        parts["flops"] = manifest["conventions"]
    if "schema" in status:
        parts["schema"] = status["schema"]
    kind, peak, source = (dig(summary, "peak", key) for key in ("kind", "flops", "source"))
    if kind:
        figure = f"{number(peak) / 1e12:.4g} TFLOP/s"
        parts["peak"] = str(source or figure) if kind == "vendor" else str(kind)
    return json.dumps(parts, sort_keys=True) if parts else UNKNOWN
