"""Where a step's time goes, by kernel family, from the traces that profile=true leaves.

Every instant of the profiled steps belongs to one family, so the families and `idle` add up to the step: where kernels run
beside each other, compute counts before communication and communication before copies. `communication` is therefore what is
not hidden behind compute. A trace without GPU kernels (CPU ranks) is read by its innermost operators.
"""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis import text
from analysis.errors import BadInput
from analysis.files import read_json
from analysis.scan import find_sweeps

#: not one of those that Inductor generates: pointwise kernels, reductions and small reductions; its matmuls are triton_tem_…
_NOT_FUSED = "^(?!triton_(poi|red|per)_).*"
#: family → names of kernels (cuBLAS, CUTLASS, cuDNN, NCCL, Inductor's Triton, ATen) or operators; the first that matches
FAMILIES = {
    "autograd": r"^autograd::|Backward\d+$|AccumulateGrad$",  # on CPUs: between the operators
    "communication": rf"{_NOT_FUSED}(nccl|gloo:|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv)",
    "attention": rf"{_NOT_FUSED}(flash|fmha|sdpa|attention|cudnn_generated_fort|compute_dot_do_o|convert_dq_to)",
    # Inductor names a fused kernel after all that went into it, and after what it feeds: a cast to fp8 after _scaled_mm
    "matmul": rf"{_NOT_FUSED}(triton_tem|nvjet|gemm|gemv|cutlass|xmma|splitk|aten::(add|b)?mm\b|_scaled_mm|_grouped_mm|mkldnn)",
    "optimizer": r"multi_tensor|adam|_foreach_|sign_sgd|lpnorm_cleanup|squares_kernel|roots_kernel",
    "loss": r"softmax|nll_loss|cross_entropy",
    "norm": r"^(?!triton_poi_).*(rms|layer_norm|GammaBetaBackward|rsqrt|column_sums)",  # a norm needs a reduction
    "copy": r"^(?!triton_).*(memcpy|memset|copy|aten::(fill_|zero_|zeros|cat|contiguous|clone)\b|CatArray|FillFunctor)",
    "elementwise": r"triton|mfu_sweep::|elementwise|reduce_kernel|gather_kernel|aten::|silu|swiglu|rope_kernel|ordered_sum"
    # the embedding's backward: tokens are sorted (CUB), then each one's rows added up
    r"|index|embedding|sum_and_scatter|compute_grad_weight|krn_partial|compute_num_of_partial|cub::",
}
_PATTERNS = {family: re.compile(pattern, re.IGNORECASE) for family, pattern in FAMILIES.items()}
_RANK = {
    "communication": 1,
    "copy": 2,
    "other": 3,
}  # what an instant counts as where several run: lowest first, 0 is compute
COLUMNS = (*FAMILIES, "other", "idle")


@dataclass(frozen=True)
class Interval:
    """Something that ran, in microseconds of the trace's clock."""

    start: float
    end: float
    name: str


def family(name: str) -> str:
    """The family of a kernel or operator; `other` for none."""
    return next((f for f, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def breakdown(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by `COLUMNS` over a trace's events; {} where nothing ran."""
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    ran = [_interval(e) for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not ran:
        ran = [i for thread in _threads(complete) for i in _innermost(thread)]
        ran += [_interval(e) for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith("gloo:")]
    if not ran:
        return {}
    spent = dict.fromkeys(COLUMNS, 0.0)
    covered = np.empty((0, 2))
    for level in range(4):
        here = sorted((i for i in ran if _RANK.get(family(i.name), 0) == level), key=lambda i: (i.start, i.end))
        end = -np.inf
        for i in here:
            start = max(i.start, end)  # the part that no other of its level has taken
            if i.end > start:
                spent[family(i.name)] += (i.end - start - _overlap(covered, start, i.end)) / 1e6
                end = i.end
        covered = _union([*map(tuple, covered), *((i.start, i.end) for i in here)])
    span = max(i.end for i in ran) - min(i.start for i in ran)
    spent["idle"] = span / 1e6 - float((covered[:, 1] - covered[:, 0]).sum()) / 1e6
    return spent


def _interval(event: dict[str, Any]) -> Interval:
    return Interval(float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))


def _threads(events: list[dict[str, Any]]) -> list[list[Interval]]:
    threads: dict[Any, list[Interval]] = {}
    for e in events:
        if e.get("cat") == "cpu_op":
            threads.setdefault((e.get("pid"), e.get("tid")), []).append(_interval(e))
    return list(threads.values())


def _innermost(events: list[Interval]) -> Iterable[Interval]:
    """The stretches in which each operator is the innermost one of its thread."""
    stack: list[Interval] = []
    at = -np.inf
    for event in [*sorted(events, key=lambda e: (e.start, -e.end)), Interval(np.inf, np.inf, "")]:
        while stack and stack[-1].end <= event.start:
            done = stack.pop()
            if done.end > at:
                yield Interval(max(at, done.start), done.end, done.name)
            at = max(at, done.end)
        if stack and event.start > at:
            yield Interval(max(at, stack[-1].start), event.start, stack[-1].name)
        at = max(at, event.start)
        stack.append(event)


def _union(intervals: list[tuple[float, float]]) -> np.ndarray:
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged).reshape(-1, 2)


def _overlap(union: np.ndarray, start: float, end: float) -> float:
    """Length of [start, end] that disjoint sorted intervals [n, 2] cover."""
    first, last = np.searchsorted(union[:, 1], start), np.searchsorted(union[:, 0], end)
    part = union[first:last]
    return float((np.minimum(part[:, 1], end) - np.maximum(part[:, 0], start)).sum())


def read(trace: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace (gzip). Raises BadInput for a file that isn't one."""
    try:
        with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as f:
            events = json.load(f)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"not a trace: {trace} ({error})") from None
    return [e for e in events if isinstance(e, dict)]


def render(folders: list[Path], rank: int, form: str) -> str:
    """A row a profiled point: milliseconds a step by family, of one rank. Raises BadInput where there is no trace."""
    body = []
    for sweep in (s for folder in folders for s in find_sweeps(folder)):
        for point in sweep.points:
            trace = point.path / "traces" / f"rank{rank}.json.gz"
            if not trace.is_file():
                continue
            steps = len((read_json(point.path / "status.json").get("summary") or {}).get("profiled_steps") or ()) or 1
            spent = breakdown(read(trace))
            if spent:
                total = sum(spent.values())
                cells = [f"{1e3 * spent[c] / steps:.2f} ({100 * spent[c] / total:.0f} %)" for c in COLUMNS]
                body.append([point.path.name, f"{1e3 * total / steps:.2f}", *cells])
    if not body:
        raise BadInput(f"no trace of rank {rank} in {', '.join(map(str, folders))}; run with profile=true")
    used = [i for i, c in enumerate(COLUMNS) if any(not row[2 + i].startswith("0.00 ") for row in body)]
    header = ["point", "step ms", *(COLUMNS[i] for i in used)]
    return text.table(header, [[*row[:2], *(row[2 + i] for i in used)] for row in body], form)
