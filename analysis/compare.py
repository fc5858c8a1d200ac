"""Two sweeps, or a sweep and a committed baseline, point by point: `python -m analysis compare A B`."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.errors import BadInput
from analysis.load import load
from analysis.provenance import GATE
from analysis.rank import REPEAT_KEYS, Ranked, rank
from analysis.text import cell, table, title

KIND = "mfu-sweep baseline"
SCHEMA = 1
IGNORED = (*REPEAT_KEYS, "data.content", "steps")  # told apart by what was trained on or for how long, not by speed


@dataclass(frozen=True)
class Entry:
    """One row of a sweep, as far as a comparison needs it. `half`: half-width of the interval on the logarithm."""

    settings: dict[str, Any]
    status: str
    tokens_per_s: float
    half: float
    mfu: float
    peak_mem_gib: float


@dataclass(frozen=True)
class Baseline:
    """The rows of a sweep, and where they come from."""

    name: str
    provenance: dict[str, list[str]]
    entries: list[Entry]
    knobs: list[str] = field(default_factory=list)  # as the sweep's own table has them


@dataclass
class Match:
    """A point in both: `ratio` is B over A in tokens/s, with its 95 % interval; `verdict` is one word."""

    settings: dict[str, Any]
    verdict: str
    a: Entry
    b: Entry
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass
class Comparison:
    """`matches` in the order of A; `changed`: settings that differ between A and B throughout."""

    a: Baseline
    b: Baseline
    knobs: list[str]
    matches: list[Match]
    only_a: list[Entry] = field(default_factory=list)
    only_b: list[Entry] = field(default_factory=list)
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def regressions(self) -> list[Match]:
        return [m for m in self.matches if m.verdict == "regression"]


def read(path: Path) -> Baseline:
    """A sweep's folder, or a file that `baseline` wrote. Raises BadInput for anything else."""
    if path.is_file() and path.suffix == ".json":
        return _from_json(path)
    return from_ranked(path.resolve().name, rank(load(path)))


def from_ranked(name: str, ranked: Ranked) -> Baseline:
    """The rows of the largest provenance group, and the unfinished ones."""
    rows = ranked.rows[ranked.rows["group"].isin([0, -1])]
    knobs = [c for c in rows.columns if c.startswith("cfg:") and c.removeprefix("cfg:") not in IGNORED]
    entries = []
    for row in rows.to_dict("records"):
        settings = {k.removeprefix("cfg:"): _plain(row[k]) for k in knobs if _plain(row[k]) is not None}
        numbers = [float(row[k]) for k in ("tokens_per_s", "half", "mfu", "peak_mem_gib")]
        entries.append(Entry(settings, str(row["status"]), *numbers))
    finished = rows[rows["group"] == 0]
    provenance = {k: sorted({str(v) for v in finished[k]}) for k in GATE}
    return Baseline(name, provenance, entries, list(ranked.knobs))


def _plain(value: Any) -> Any:
    """A value that JSON can hold; None for missing."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_json(baseline: Baseline) -> str:
    """A small file for the repository: settings that all rows share are written once, numbers to six digits."""
    every = [e.settings for e in baseline.entries]
    shared = {k: v for k, v in every[0].items() if all(s.get(k) == v for s in every)} if every else {}
    points = []
    for e in baseline.entries:
        numbers = {k: getattr(e, k) for k in ("tokens_per_s", "half", "mfu", "peak_mem_gib")}
        own = {k: v for k, v in e.settings.items() if k not in shared}
        kept = {k: float(f"{v:.6g}") for k, v in numbers.items() if math.isfinite(v)}
        points.append({"settings": own, "status": e.status, **kept})
    content = {
        "kind": KIND, "schema": SCHEMA, "name": baseline.name, "provenance": baseline.provenance, "shared": shared,
        "points": points, "knobs": baseline.knobs,
    }  # fmt: skip
    return json.dumps(content, indent=1, sort_keys=True, default=str) + "\n"


def _from_json(path: Path) -> Baseline:
    try:
        content = json.loads(path.read_bytes())
        if content.get("kind") != KIND or content.get("schema") != SCHEMA:
            raise ValueError("kind or schema")
        entries = [
            Entry(
                content["shared"] | point["settings"],
                str(point["status"]),
                *(float(point.get(k, math.nan)) for k in ("tokens_per_s", "half", "mfu", "peak_mem_gib")),
            )
            for point in content["points"]
        ]
        return Baseline(str(content["name"]), dict(content["provenance"]), entries, list(content.get("knobs", [])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} is not a baseline (make one with: python -m analysis baseline DIR)") from None


def compare(a: Baseline, b: Baseline, tolerance: float = 0.02) -> Comparison:
    """Points matched on every setting that varies within A or within B.

    A regression: B is slower by more than `tolerance`, and surely so (the interval of the ratio lies below one); or A
    finished and B did not. Raises BadInput where nothing matches.
    """
    knobs = sorted(_varying(a) | _varying(b))
    theirs = {_key(e, knobs): e for e in reversed(b.entries)}
    ours = {_key(e, knobs): e for e in reversed(a.entries)}
    matches = [_match(e, theirs[k], knobs, tolerance) for k, e in reversed(ours.items()) if k in theirs]
    if not matches:
        raise BadInput(f"no point of {a.name} matches one of {b.name}" + (f" (by {', '.join(knobs)})" if knobs else ""))
    only_a = [e for k, e in reversed(ours.items()) if k not in theirs]
    only_b = [e for k, e in reversed(theirs.items()) if k not in ours]
    first_a, first_b = matches[0].a.settings, matches[0].b.settings
    changed = {
        k: (cell(first_a.get(k)) or "unset", cell(first_b.get(k)) or "unset")
        for k in sorted(first_a.keys() | first_b.keys())
        if k not in knobs and first_a.get(k) != first_b.get(k)
    }
    return Comparison(a, b, knobs, matches, only_a, only_b, changed)


def _varying(baseline: Baseline) -> set[str]:
    keys = {k for e in baseline.entries for k in e.settings}
    # A point that was never started has only the settings of its command line: what is missing does not vary.
    return {k for k in keys if len({str(e.settings[k]) for e in baseline.entries if k in e.settings}) > 1}


def _key(entry: Entry, knobs: list[str]) -> tuple[str, ...]:
    return tuple(str(entry.settings.get(k)) for k in knobs)


def _match(a: Entry, b: Entry, knobs: list[str], tolerance: float) -> Match:
    settings = {k: a.settings.get(k) for k in knobs}
    match = Match(settings, "unfinished", a, b)
    if a.status == "ok" and b.status not in ("ok", "running", "pending"):
        match.verdict = "regression"
    elif a.status != "ok" and b.status == "ok":
        match.verdict = "new"
    elif a.tokens_per_s > 0 and b.tokens_per_s > 0 and a.status == b.status == "ok":
        log = math.log(b.tokens_per_s / a.tokens_per_s)
        noise = math.hypot(np.nan_to_num(a.half), np.nan_to_num(b.half))
        match.ratio, match.low, match.high = math.exp(log), math.exp(log - noise), math.exp(log + noise)
        if match.ratio < 1 - tolerance and match.high < 1:
            match.verdict = "regression"
        elif match.ratio > 1 + tolerance and match.low > 1:
            match.verdict = "faster"
        else:
            match.verdict = "same"
    return match


def render(c: Comparison, form: str = "text") -> str:
    """The comparison as text or Markdown: the verdict first, then every point."""
    slower = len(c.regressions)
    counts = {v: sum(m.verdict == v for m in c.matches) for v in ("regression", "faster", "same", "new", "unfinished")}
    line = f"{c.b.name} against {c.a.name}: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    ratios = [m.ratio for m in c.matches if m.ratio == m.ratio]
    if ratios:
        line += f"; geometric mean of the ratios {np.exp(np.mean(np.log(ratios))):.4f}"
    head = f"{'**' if form == 'md' else ''}{line}{'**' if form == 'md' else ''}\n"
    knobs = _readable(c)
    header = [*map(title, knobs), "A tokens/s", "B tokens/s", "B/A", "95 % interval", "peak GiB A→B", "verdict"]
    parts = [head, table(header, [_cells(m, knobs) for m in c.matches], form)]
    notes = [f"{k}: {x} → {y}" for k, (x, y) in c.changed.items()]
    for k in GATE:
        x, y = c.a.provenance.get(k, []), c.b.provenance.get(k, [])
        if x != y:
            notes.append(f"{k}: {' / '.join(x) or 'unknown'} → {' / '.join(y) or 'unknown'}")
    if c.only_a or c.only_b:
        notes.append(f"not in both: {len(c.only_a)} only in {c.a.name}, {len(c.only_b)} only in {c.b.name}")
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes) + "\n")
    if slower:
        parts.append(f"{slower} regression{'s' * (slower > 1)}.\n")
    return "\n".join(parts)


def _readable(c: Comparison) -> list[str]:
    """The fewest knobs that tell the matched points apart: those of the sweeps' tables first, keys inside a group last."""
    named = [*c.a.knobs, *c.b.knobs]
    chosen: list[str] = []
    cells = 1
    for knob in sorted(c.knobs, key=lambda k: (k not in named, "." in k, k)):
        distinct = len({tuple(str(m.settings.get(k)) for k in [*chosen, knob]) for m in c.matches})
        if distinct > cells:
            chosen.append(knob)
            cells = distinct
    return chosen


def _cells(m: Match, knobs: list[str]) -> list[str]:
    interval = (
        f"{m.low:.4f} to {f'{m.high:.4f}' if m.high < 100 else '> 100'}" if m.low == m.low and m.low != m.high else ""
    )
    rates = [cell(e.tokens_per_s, "tokens_per_s") if e.status == "ok" else e.status for e in (m.a, m.b)]
    memory = " → ".join(cell(e.peak_mem_gib) or "?" for e in (m.a, m.b))
    ratio = f"{m.ratio:.4f}" if m.ratio == m.ratio else ""
    return [*(cell(m.settings.get(k)) for k in knobs), *rates, ratio, interval, memory, m.verdict]
