"""metrics.jsonl: good lines kept, damaged ones counted, whatever the damage; the fast readers agree with the careful one."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import jsonl
from analysis.jsonl import parse_lines, read, read_many

GOOD = [
    b'{"step": %d, "time/step": 0.%d, "time/data": 5e-05, "perf/throughput": 1234.5, "loss": 2.5}' % (i, 50 + i)
    for i in range(12)
]

# name → (a line to insert, how many damaged lines it makes)
DAMAGE = {
    "half a line": (b'{"step": 99, "time/st', 1),
    "NUL bytes": (b"\0\0\0\0\0\0", 1),
    "NUL before an object": (b'\0\0{"step": 99, "time/step": 1.0}', 1),
    "two objects": (b'{"step": 98, "time/step": 1.0}{"step": 99, "time/step": 1.0}', 1),
    "two objects with a space": (b'{"step": 98, "time/step": 1.0} {"step": 99, "time/step": 1.0}', 1),
    "blank": (b"", 0),
    "spaces": (b"   \t ", 0),
    "NaN": (b'{"step": 99, "time/step": NaN}', 1),
    "Infinity": (b'{"step": 99, "loss": Infinity}', 1),
    "minus Infinity": (b'{"step": 99, "loss": -Infinity}', 1),
    "overflow": (b'{"step": 99, "loss": 1e999}', 1),
    "invalid UTF-8": (b'{"step": 99, "loss\xff\xfe": 1.0}', 1),
    "lone surrogate byte": (b'\xed\xa0\x80{"step": 99}', 1),
    "huge step": (b'{"step": 123456789012345678901234567890, "loss": 1.0}', 1),
    "huge integer": (b'{"step": 99, "loss": ' + b"9" * 400 + b"}", 1),
    "integer beyond Python's limit": (b'{"step": 99, "loss": ' + b"9" * 5000 + b"}", 1),
    "an array": (b"[1, 2, 3]", 1),
    "a number": (b"17", 1),
    "null": (b"null", 1),
    "deeply nested": (b"[" * 100_000, 1),
    "no step": (b'{"loss": 1.0}', 1),
    "negative step": (b'{"step": -1, "loss": 1.0}', 1),
    "step as text": (b'{"step": "99", "loss": 1.0}', 1),
    "fractional step": (b'{"step": 99.5, "loss": 1.0}', 1),
    "negative time": (b'{"step": 99, "time/step": -0.5}', 1),
    "zero time": (b'{"step": 99, "time/step": 0}', 1),
    "binary": (bytes(range(128, 256)).replace(b"\n", b""), 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_one_damaged_line_costs_nothing_else(tmp_path, kind, place):
    line, damaged = DAMAGE[kind]
    lines = list(GOOD)
    lines.insert({"start": 0, "middle": 6, "end": len(lines)}[place], line)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    metrics = read(path)
    assert metrics.damaged == damaged
    assert metrics.columns["step"].tolist() == list(range(12))
    assert metrics.columns["time/step"].tolist() == [float(f"0.{50 + i}") for i in range(12)]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_truncated_tail(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    text = b"\n".join(GOOD) + b"\n"
    path.write_bytes(text[:-cut])
    metrics = read(path)
    whole = 12 if cut == 1 else 11  # without its newline the last line is still whole
    assert (metrics.steps, metrics.damaged) == (whole, 12 - whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b"\n", b"\n\n"),
        lambda text: text.rstrip(b"\n"),
        lambda text: b"\n\n" + text,
    ],
    ids=["byte-order mark", "CRLF", "blank lines", "no last newline", "leading blank lines"],
)
def test_harmless_variations_lose_nothing(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(change(b"\n".join(GOOD) + b"\n"))
    metrics = read(path)
    assert (metrics.steps, metrics.damaged) == (12, 0)


def test_repeated_steps_are_merged_and_the_later_value_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 0, "loss": 3.0}\n{"step": 1, "time/step": 0.5, "loss": 1.0}\n')
    metrics = read(path)
    assert metrics.columns["step"].tolist() == [0, 1]
    assert metrics.columns["loss"].tolist() == [3.0, 1.0]
    assert np.isnan(metrics.columns["time/step"][0]) and metrics.columns["time/step"][1] == 0.5


def test_missing_folder_and_empty_files_have_no_steps(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name in ("absent", "empty", "folder"):
        metrics = read(tmp_path / name)
        assert (metrics.steps, metrics.damaged, metrics.columns) == (0, 0, {})


def test_a_bad_file_among_good_ones_changes_only_itself(tmp_path):
    texts = [b"\n".join(GOOD) + b"\n"] * 20
    texts[7] = texts[7].replace(b'"loss": 2.5', b'"loss": NaN', 1)
    texts[11] = b'{"step": 0, "loss": 1.0}\n{"step": 1, "other": 2, "loss": 1.0}\n'
    texts[13] = b"\0" * 64
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.jsonl")
        paths[-1].write_bytes(text)
    metrics = list(read_many(paths))
    assert [m.damaged for m in metrics] == [1 if i in (7, 13) else 0 for i in range(20)]
    assert [m.steps for m in metrics] == [11 if i == 7 else 2 if i == 11 else 0 if i == 13 else 12 for i in range(20)]
    assert metrics[11].columns["other"][1] == 2 and np.isnan(metrics[11].columns["other"][0])


number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(min_value=1e-9, max_value=1e7),
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)
keys = st.sampled_from(
    ["time/step", "loss", "grad_norm", "gpu/throttle", "e-x", "e", "k1", "ü", 'a"b', "a,b", "1.5", "Ex"]
)


@settings(max_examples=150, deadline=None)
@given(
    shared=st.lists(keys, unique=True, max_size=4),
    data=st.data(),
    count=st.integers(1, 6),
    separators=st.sampled_from([(", ", ": "), (",", ":")]),
)
def test_fast_readers_agree_with_the_careful_one(shared, data, count, separators):
    """On any valid file: lines alike or not, exponents, odd keys, text, null."""
    lines = []
    for step in range(count):
        row = {"step": step} | {key: data.draw(number) for key in shared if data.draw(st.integers(0, 9))}
        lines.append(json.dumps(row, separators=separators, ensure_ascii=data.draw(st.booleans())))
    text = "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass")
    fast, careful = list(jsonl.parse_many([[text, text]]))[1], parse_lines(text)
    assert fast.damaged == careful.damaged
    numeric = {name for name, values in careful.columns.items() if not np.isnan(values).all()}
    assert numeric <= fast.columns.keys() | {"step"}
    for name in numeric:
        assert np.array_equal(fast.columns[name], careful.columns[name], equal_nan=True), name


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(GOOD), st.binary(max_size=30), st.sampled_from([v[0] for v in DAMAGE.values()])))
)
def test_never_raises_and_agrees_on_any_bytes(pieces):
    text = b"\n".join(pieces)
    fast, careful = next(jsonl.parse_many([[text]])), parse_lines(text)
    assert (fast.damaged, fast.steps) == (careful.damaged, careful.steps)


def test_typical_files_take_the_fast_readers(monkeypatch, tmp_path):
    """Otherwise they would be correct and slow, and nothing would tell."""
    from synth import Point, metrics_lines

    text = "".join(line + "\n" for line in metrics_lines(Point(steps=30))).encode()
    exponents = text.replace(b'"grad_norm": 1.0', b'"grad_norm": 5e-05')
    changing = text + b'{"step": 500, "time/step": 0.5, "gpu/power_w": 600.0}\n'
    monkeypatch.setattr(jsonl, "parse_lines", lambda data: pytest.fail("the careful reader was used"))
    assert [m.steps for m in jsonl.parse_many([[text, exponents, changing]])] == [30, 30, 31]
    monkeypatch.setattr(jsonl, "_arrow", lambda data: pytest.fail("the JSON reader was used"))
    assert [m.steps for m in jsonl.parse_many([[text, exponents]])] == [30, 30]
