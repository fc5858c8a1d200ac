"""metrics.jsonl into columns: fast where the files are clean, line by line where they are not.

A crash, a full disk or a copy can damage a metrics file in many ways (half a line, NUL bytes, a byte-order mark, two
objects on a line, NaN, invalid UTF-8, huge integers). A damaged line is dropped and counted; it never raises and never
costs the other lines. Clean files, nearly all of them, go through pyarrow's JSON reader many at a time.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

BATCH_BYTES = 16 << 20  # text parsed at once: large enough to keep two cores busy, small enough to bound memory
LARGEST = 1e15  # beyond any metric; such a number sends the file through the careful reader
INT64 = 2**63

KNOWN = (
    "time/step time/data perf/throughput perf/tokens_per_s_per_gpu perf/mfu perf/mfu_causal perf/hfu perf/peak_memory "
    "loss grad_norm gpu/power_w gpu/sm_clock_mhz gpu/temperature_c"
).split()
SCHEMA = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in KNOWN)])


@dataclass(frozen=True)
class Metrics:
    """One file: `columns[name]` float64 arrays of equal length, NaN where a line has no such key, in order of `step`."""

    columns: dict[str, np.ndarray]
    damaged: int  # lines that were dropped

    @property
    def steps(self) -> int:
        return len(self.columns["step"]) if "step" in self.columns else 0

    def get(self, name: str) -> np.ndarray:
        """The column, or NaN throughout where the run has no such metric."""
        return self.columns[name] if name in self.columns else np.full(self.steps, np.nan)


def read(path: Path) -> Metrics:
    """One metrics.jsonl; a missing or unreadable file has no steps."""
    return next(read_many([path]))


def read_many(paths: Iterable[Path]) -> Iterator[Metrics]:
    """One `Metrics` a path, in order; holds at most one batch in memory."""
    batch: list[bytes] = []
    size = 0
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        batch.append(data)
        size += len(data)
        if size >= BATCH_BYTES:
            yield from _batch(batch)
            batch, size = [], 0
    yield from _batch(batch)


def _batch(files: list[bytes]) -> Iterator[Metrics]:
    clean = [data for data in files if _looks_clean(data)]
    fast = iter(_arrow(clean) or [None] * len(clean))
    for data in files:
        metrics = next(fast) if _looks_clean(data) else None
        # A whole batch that failed has one bad file in it, so each is tried alone before the careful reader.
        if metrics is None and _looks_clean(data) and len(clean) > 1:
            metrics = (_arrow([data]) or [None])[0]
        yield metrics or parse_lines(data)


def _looks_clean(data: bytes) -> bool:
    """Cheap checks for what pyarrow would accept silently or count differently from a line-by-line reader."""
    return (
        data.startswith(b"{")
        and data.endswith(b"}\n")
        and data.isascii()
        and not any(mark in data for mark in (b"\0", b"\r", b"\n\n", b"NaN", b"Infinity", b"}{", b"} {"))
    )


def _arrow(files: list[bytes]) -> list[Metrics | None] | None:
    """Clean files parsed in one go; None for the whole batch if any line is refused, None for a file that is suspicious."""
    if not files:
        return []
    counts = np.array([data.count(b"\n") for data in files])
    options = pa_json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="infer")
    try:
        table = pa_json.read_json(pa.BufferReader(b"".join(files)), parse_options=options)
    except pa.ArrowInvalid:
        return None
    if table.num_rows != counts.sum() or table["step"].null_count:
        return None
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count == len(column):
            continue
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
            columns[name] = column.cast(pa.float64()).to_numpy()
    ends = np.cumsum(counts)
    return [
        _checked({name: values[end - count : end] for name, values in columns.items()})
        for end, count in zip(ends, counts, strict=True)
    ]


def _checked(columns: dict[str, np.ndarray]) -> Metrics | None:
    present = {}
    for name, values in columns.items():
        if not np.isnan(values).all():
            present[name] = values
            if np.nanmax(np.abs(values)) > LARGEST:
                return None
    step = present["step"]
    ordered = (np.diff(step) > 0).all() and step[0] >= 0
    times = present.get("time/step")
    positive = times is None or np.nanmin(times) > 0
    return Metrics(present, 0) if ordered and positive else None


def parse_lines(data: bytes) -> Metrics:
    """Any bytes, line by line. Lines of the same step are merged (prime-rl writes several), the later value winning."""
    rows: dict[int, dict[str, float]] = {}
    damaged = 0
    for raw in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        line = raw.strip(b" \t\r")
        if not line:
            continue
        row = _row(line)
        if row is None:
            damaged += 1
            continue
        rows.setdefault(int(row["step"]), {}).update(row)
    names = sorted({name for row in rows.values() for name in row})
    ordered = [rows[step] for step in sorted(rows)]
    return Metrics({n: np.array([row.get(n, np.nan) for row in ordered], dtype=float) for n in names}, damaged)


def _row(line: bytes) -> dict[str, float] | None:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] < 0:
        return None
    row = {name: float(number) for name, number in value.items() if _is_number(number)}
    if any(isinstance(number, int) and abs(number) >= INT64 for number in value.values()):
        return None
    if any(math.isinf(number) for number in row.values()) or row.get("time/step", 1.0) <= 0:
        return None
    return row


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and (not isinstance(value, int) or abs(value) < INT64)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
