"""metrics.jsonl into columns: fast where the files are clean, line by line where they are not.

A crash, a full disk or a copy can damage a metrics file in many ways (half a line, NUL bytes, a byte-order mark, two
objects on a line, NaN, invalid UTF-8, huge integers). A damaged line is dropped and counted; it never raises and never
costs the other lines. Three readers, each for what the one before refuses: lines that are alike but for their numbers
(nearly all files) as CSV, many files at a time; clean lines with different keys by pyarrow's JSON reader; anything else
line by line.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from analysis.files import read_bytes

BATCH_BYTES = 8 << 20  # text parsed at once: large enough to keep two cores busy, small enough to bound memory
LARGEST = 1e15  # beyond any metric; such a number sends the file through the careful reader
INT64 = 2**63
NUMBER = b"0123456789.+-E"
EXPONENT = re.compile(rb"\de[-+]?\d")
NOT_CSV = bytes(set(range(256)) - set(NUMBER + b",\n"))

KNOWN = [
    "time/step",
    "time/data",
    "perf/throughput",
    "perf/tokens_per_s_per_gpu",
    "perf/mfu",
    "perf/mfu_causal",
    "perf/hfu",
    "perf/peak_memory",
    "loss",
    "grad_norm",
    "gpu/power_w",
    "gpu/sm_clock_mhz",
    "gpu/temperature_c",
]
Member = tuple[int, bytes, int]  # place in its batch, numbers as CSV, lines
Alike = dict[tuple[str, ...], list[Member]]
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


def read(path: Path | str) -> Metrics:
    """One metrics.jsonl; a missing or unreadable file has no steps."""
    return next(read_many([path]))


def read_many(paths: Iterable[Path | str]) -> Iterator[Metrics]:
    """One `Metrics` a path, in order; a missing or unreadable file has no steps."""
    return parse_many(_batches(paths))


def parse_many(batches: Iterable[list[bytes]]) -> Iterator[Metrics]:
    """One `Metrics` a file's content, in order.

    A batch is parsed in another thread while this one strips the next and the caller works on the one before. Only the
    parsing goes there: it runs without the interpreter's lock, and anything else would wait for the lock at every file.
    """
    with ThreadPoolExecutor(1) as other:
        waiting: tuple[list[bytes], Alike, Future[list[pa.Table | None]]] | None = None
        for files in batches:
            alike = _alike(files)
            parsing = other.submit(_tables, alike)
            if waiting:
                yield from _metrics(*waiting)
            waiting = files, alike, parsing
        if waiting:
            yield from _metrics(*waiting)


def _batches(paths: Iterable[Path | str]) -> Iterator[list[bytes]]:
    """Contents of about BATCH_BYTES together; a missing or unreadable file is empty."""
    batch: list[bytes] = []
    size = 0
    for path in paths:
        batch.append(read_bytes(path))
        size += len(batch[-1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _alike(files: list[bytes]) -> Alike:
    """Files whose lines all look alike, by their keys: (place, numbers, lines) of each."""
    alike: Alike = {}
    for place, data in enumerate(files):
        if uniform := _uniform(data):
            keys, numbers, count = uniform
            alike.setdefault(keys, []).append((place, numbers, count))
    return alike


def _metrics(files: list[bytes], alike: Alike, parsing: "Future[list[pa.Table | None]]") -> list[Metrics]:
    """What the CSV reader made of the files that are alike; the others one by one."""
    found: list[Metrics | None] = [None] * len(files)
    for (keys, members), table in zip(alike.items(), parsing.result(), strict=True):
        for (place, _, _), metrics in zip(members, _slices(keys, members, table), strict=True):
            found[place] = metrics
    return [metrics or _arrow(data) or parse_lines(data) for metrics, data in zip(found, files, strict=True)]


def _uniform(data: bytes) -> tuple[tuple[str, ...], bytes, int] | None:
    """Keys, the numbers as CSV, and the number of lines, if all lines are the same but for their numbers; or else None.

    What is left of a line without its numbers is compared with the first line's, so that any damage shows: a blank or
    half line, NaN, NUL, a second object, another key. Three times as fast as a JSON parser.
    """
    text = data
    count = 0 if EXPONENT.search(data, 0, data.find(b"\n") + 1) else _same_lines(text)
    if not count:
        text = data.replace(b"e-", b"E-").replace(b"e+", b"E+")  # the one letter in a number, told apart from the keys'
        count = _same_lines(text)
        if not count:
            return None
    try:
        row = json.loads(data[: data.index(b"\n")], parse_constant=_refuse)
    except ValueError:
        return None
    if not isinstance(row, dict) or "step" not in row or not all(_is_plain(key) for key in row):
        return None
    if data.count(b":", 0, data.index(b"\n")) != len(row) or any(
        type(value) not in (int, float) for value in row.values()
    ):
        return None  # a key twice, or something that is not a number
    return tuple(row), text.translate(None, NOT_CSV), count


def _same_lines(text: bytes) -> int:
    """The number of lines, if all are the same without their numbers; 0 otherwise."""
    shape = text.translate(None, NUMBER)
    first = shape[: shape.find(b"\n") + 1]
    count = len(shape) // len(first) if first else 0
    return count if shape == first * count else 0


def _is_plain(key: str) -> bool:
    """Whether nothing of the key would be taken for a part of a number."""
    return not set(key.encode()) & set(NUMBER + b",:\n") and "e-" not in key and key.isascii()


def _tables(alike: Alike) -> list[pa.Table | None]:
    """The numbers of each set of files that are alike, parsed in one go; None for what is no table."""
    return [_table(keys, members) for keys, members in alike.items()]


def _table(keys: tuple[str, ...], members: list[Member]) -> pa.Table | None:
    try:
        return pa_csv.read_csv(
            pa.BufferReader(b"".join(numbers for _, numbers, _ in members)),
            read_options=pa_csv.ReadOptions(column_names=list(keys), use_threads=False, block_size=64 << 20),
            convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(keys, pa.float64()), null_values=[""]),
        )
    except pa.ArrowInvalid:
        return None


def _slices(keys: tuple[str, ...], members: list[Member], table: pa.Table | None) -> list[Metrics | None]:
    """Metrics of each of the files in the table; None for what the careful reader has to decide."""
    if table is None:
        return [_slices(keys, [one], _table(keys, [one]))[0] for one in members] if len(members) > 1 else [None]
    ends = np.cumsum([count for _, _, count in members])
    if table.num_rows != ends[-1] or any(column.null_count for column in table.columns):
        return [None] * len(members)
    whole = table.combine_chunks()  # of one chunk already, as a rule: then nothing is copied
    columns = {key: column.chunk(0).to_numpy() for key, column in zip(keys, whole.columns, strict=True)}
    starts = [0, *ends[:-1].tolist()]
    parts = [
        {key: values[start:end] for key, values in columns.items()}
        for start, end in zip(starts, ends.tolist(), strict=True)
    ]
    if _all_good(columns, starts):
        return [Metrics(part, 0) for part in parts]
    return [_checked(part) for part in parts]


def _all_good(columns: dict[str, np.ndarray], starts: list[int]) -> bool:
    """What `_checked` asks of each file, asked of all at once: nothing missing or absurd, steps in order, times positive."""
    if not all(values.max() <= LARGEST and values.min() >= -LARGEST for values in columns.values()):  # false for NaN
        return False
    step = columns["step"]
    rising = step[1:] > step[:-1]
    rising[np.array(starts[1:], int) - 1] = True
    ordered = rising.all() and step[starts].min() >= 0 and (step == np.rint(step)).all()
    return bool(ordered) and ("time/step" not in columns or columns["time/step"].min() > 0)


def _arrow(data: bytes) -> Metrics | None:
    """One file by pyarrow's JSON reader: lines may have different keys, but each is one flat object; or else None."""
    lines = data.count(b"\n")
    flat = data.startswith(b"{") and data.endswith(b"}\n") and data.isascii()
    if not flat or data.count(b"{") != lines or data.count(b"\n{") != lines - 1:
        return None  # blank lines and two objects on a line would be taken in silence
    options = pa_json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="infer")
    try:
        table = pa_json.read_json(
            pa.BufferReader(data), read_options=pa_json.ReadOptions(use_threads=False), parse_options=options
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != lines or table["step"].null_count:
        return None
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
            columns[name] = column.cast(pa.float64()).to_numpy()
            if np.isnan(columns[name]).sum() != column.null_count:
                return None  # NaN in the text, which is not JSON
    return _checked(columns)


def _checked(columns: dict[str, np.ndarray]) -> Metrics | None:
    """One file's slice; None where the careful reader has to decide."""
    present = {}
    for name, values in columns.items():
        largest, smallest = np.fmax.reduce(values), np.fmin.reduce(values)  # NaN only if all are
        if largest == largest:
            present[name] = values
            if largest > LARGEST or smallest < -LARGEST:
                return None
    step = present["step"]
    ordered = step[0] >= 0 and bool((step[1:] > step[:-1]).all()) and bool((step == np.rint(step)).all())
    times = present.get("time/step")
    positive = times is None or np.fmin.reduce(times) > 0
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
