"""What the report says, once, and its two forms: Markdown and one self-contained HTML page."""

import base64
import math
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

import pandas as pd

from analysis import published
from analysis.answer import Answer, answers
from analysis.census import Census, census
from analysis.flags import MEANING
from analysis.load import Data
from analysis.plots.style import Plot
from analysis.provenance import GATE
from analysis.rank import Ranked
from analysis.table import notes, own_flags, results, values
from analysis.text import cell, is_number, table, title
from analysis.usage import device_hours

PROVENANCE = ("code", "commit", *GATE[1:], "cuda", "nccl", "python", "hosts", "env", "peak_source")

DEFINITIONS = (
    ("tokens/s", "Tokens of a step over all ranks by the time of the slowest rank; the median of the steady steps."),
    (
        "steady steps",
        "Leading steps that compile, tune or warm up are dropped by a rule (docs/analysis.md); the table says how many.",
    ),
    (
        "±95 %",
        "Half-width of the 95 % interval of the median, autocorrelation counted; with repeats also the variation from "
        "run to run.",
    ),
    (
        "rank, tie",
        "Rows with “=” share a rank: they can't be told apart from the first row of that rank. A tie with the best is a row "
        "that can't be told apart from the best, by the intervals of both.",
    ),
    (
        "MFU",
        "PaLM convention: 6·N + 12·L·H·d·T FLOPs a token over the dense peak for the precision (flag fp8-peak: that for "
        "fp8); N without the embedding lookup, with the LM head, experts at their active share.",
    ),
    ("MFU causal, HFU", "MFU causal credits half of the attention; HFU adds what recomputation really ran."),
    ("peak GiB", "Largest rank inside the training steps; never a sum over ranks. On a CPU: the peak resident set."),
    (
        "expert load",
        "Tokens of a layer's most loaded expert over the mean of its experts, averaged over layers; 1 is even.",
    ),
    ("device-hours", "Devices times wall time of each attempt; wasted: attempts that gave no result."),
)

REFERENCE_NOTE = (
    "“Stated” is the source's own number by its own convention; “here” is recomputed by this page's MFU, where the "
    "source gives the model's shape and tokens/s. Other models and clusters: for orientation, not a ranking."
)


@dataclass
class Content:
    """Everything on the page, as text; rows of `table` are (cells, sort keys, status)."""

    title: str
    line: str  # the census in one line
    hours: str  # device-hours used and wasted
    reference: list[list[str]]  # published rows, in the columns of `reference_header`
    answers: list[Answer]
    header: list[str]
    rows: list[tuple[list[str], list[Any], str]]
    census: Census
    notes: list[str]
    plots: list[Plot]
    provenance: list[tuple[str, list[str]]]
    fixed: list[tuple[str, str]]
    flags: list[tuple[str, str]]
    definitions: list[tuple[str, str]] = field(default_factory=lambda: list(DEFINITIONS))
    command: str = ""
    reference_header: list[str] = field(default_factory=published.header)

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns of the table are numbers throughout."""
        return [all(is_number(cells[i]) for cells, _, _ in self.rows) for i in range(len(self.header))]


def content(name: str, data: Data, ranked: Ranked, plots: list[Plot], reference: pd.DataFrame) -> Content:
    """Collects the page from ranked rows; holds no time of day and no absolute path. `reference`: published rows."""
    rows = ranked.rows
    rows = rows.assign(steady_steps=rows["steady_steps"].where(rows["steady_steps"] > 0))
    seen = [flag for flags in rows["flags"] for flag in flags]
    rows = rows.assign(flags=own_flags(rows))  # what all finished rows share is said once, below the table
    reason = ["reason"] if any(rows["reason"]) else []
    columns = ["rank", *(["group"] if ranked.differs else []), *ranked.knobs, "status", *results(rows), *reason]
    rows = rows.assign(group=[group_name(number) for number in rows["group"]])
    cells = list(zip(*(values(rows, c) for c in columns), strict=True))
    keys = list(zip(*(_sort_keys(rows, c) for c in columns), strict=True))
    found = census(data.points)
    commands = [s.meta.get("command") for s in data.sweeps if isinstance(s.meta.get("command"), str)]
    return Content(
        title=name,
        line=found.line(),
        hours=_hours(data),
        reference=published.cells(reference),
        answers=answers(ranked),
        header=[title(c) for c in columns],
        rows=[(list(c), list(k), s) for c, k, s in zip(cells, keys, rows["status"], strict=True)],
        census=found,
        notes=notes(data, ranked),
        plots=plots,
        provenance=_provenance(ranked),
        fixed=[(k, cell(v)) for k, v in ranked.fixed.items() if cell(v)],
        flags=[(name, MEANING[name]) for name in MEANING if name in seen],
        command=str(commands[0]) if commands else "",
    )


def group_name(number: int) -> str:
    """A, B, … for provenance groups; empty for rows without a result."""
    return "" if number < 0 else chr(ord("A") + number) if number < 26 else f"A{number}"


def _hours(data: Data) -> str:
    used, wasted = device_hours(data.points)
    if not used:
        return ""
    unit, scale = ("device-hours", 1.0) if used >= 0.1 else ("device-seconds", 3600.0)
    share = f"{wasted * scale:.3g} of them ({100 * wasted / used:.0f} %)" if wasted else "none of them"
    return f"{used * scale:.3g} {unit} used, {share} without a result"


def _sort_keys(rows: Any, column: str) -> list[Any]:
    series = rows[column if column in rows else f"cfg:{column}"]
    return [_key(value) for value in series]


def _key(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(float(value)) if math.isfinite(value) else ""
    return cell(value)


def _provenance(ranked: Ranked) -> list[tuple[str, list[str]]]:
    """(column, its value in each provenance group); columns without any value are left out."""
    groups = [part for _, part in ranked.rows[ranked.rows["group"] >= 0].groupby("group")]
    listed = []
    if len(groups) > 1:
        listed.append(("group", [group_name(i) for i in range(len(groups))]))
    for name in PROVENANCE:
        texts = [" / ".join(dict.fromkeys(cell(v) for v in part[name] if cell(v))) for part in groups if name in part]
        if any(text not in ("", "unknown") for text in texts):
            listed.append((name.replace("_", " "), texts))
    return listed


def markdown(c: Content) -> str:
    """report.md."""
    parts = [f"# {c.title}\n", f"{c.line}." + (f" {c.hours}." if c.hours else "") + "\n"]
    for answer in c.answers:
        parts.append(f"## Best{f' ({answer.scope})' if answer.scope else ''}: {answer.setting}\n")
        parts.append(f"{answer.result}. {answer.margin}\n")
        if answer.warnings:
            parts.append(f"Flags: {', '.join(answer.warnings)}.\n")
        if answer.command:
            parts.append(f"```\n{answer.command}\n```\n")
    if not c.answers:
        parts.append("No finished point yet.\n")
    parts += ["## All points\n", table(c.header, [cells for cells, _, _ in c.rows], "md")]
    parts += [f"- {note}\n" for note in c.notes]
    if c.plots:
        parts.append("## Plots\n")
        parts += [f"![{p.title}](plots/{p.name}.svg)\n\n{p.caption}\n" for p in c.plots]
    if c.reference:
        parts.append("## Published results on this hardware\n")
        parts += [table(c.reference_header, c.reference, "md"), f"{REFERENCE_NOTE}\n"]
    parts.append("## What did not finish\n" if c.census.reasons else "")
    for status, reason, names in c.census.reasons:
        parts.append(f"- {status}: {reason} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})\n")
    parts.append("## Provenance\n")
    groups = max((len(texts) for _, texts in c.provenance), default=0)
    header = ["", *[""] * groups]
    parts.append(table(header, [[n, *t] for n, t in c.provenance], "md"))
    if c.fixed:
        parts.append("Same in all points: " + ", ".join(f"{k}={v}" for k, v in c.fixed) + ".\n")
    parts.append("## What the numbers mean\n")
    parts += [f"- **{term}**: {meaning}\n" for term, meaning in c.definitions]
    parts += [f"- **{name}** (flag): {meaning}.\n" for name, meaning in c.flags]
    return "\n".join(part for part in parts if part)


def html(c: Content) -> str:
    """report.html: styles, script and pictures inside, nothing loaded from elsewhere."""
    import jinja2

    folder = resources.files("analysis") / "templates"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((folder / "report.html").read_text("utf-8"))
    pictures = [(p, base64.b64encode(p.svg).decode()) for p in c.plots]
    texts = {name: (folder / name).read_text("utf-8") for name in ("report.css", "report.js")}
    return template.render(c=c, pictures=pictures, css=texts["report.css"], js=texts["report.js"], note=REFERENCE_NOTE)
