"""Numbers and small tables as text, Markdown, CSV and LaTeX. One way to write a number, everywhere."""

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Any

FORMATS = ("text", "md", "csv", "latex")

TITLES = {
    "rank": "rank",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "mfu": "MFU %",
    "mfu_causal": "MFU causal %",
    "hfu": "HFU %",
    "step_s": "step s",
    "imbalance": "expert load",
    "data_s": "data s",
    "peak_mem_gib": "peak GiB",
    "round_peak_mem_gib": "round peak GiB",
    "capacity_gib": "capacity GiB",
    "half": "±95 %",
    "of_best": "of best",
    "determinism_price": "price",
    "steady_steps": "steps",
    "dropped_steps": "dropped",
    "dropped_why": "why dropped",
    "damaged_lines": "damaged",
    "power_w": "power W",
    "sm_clock_mhz": "SM MHz",
    "temperature_c": "°C",
    "micro_batch": "micro-batch",
}


def title(column: str) -> str:
    """What a reader sees at the head of a column."""
    return TITLES.get(column, column)


def cell(value: Any, column: str = "") -> str:
    """One value for a reader; empty for what is missing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)) or str(value) == "<NA>":
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if column == "half":  # 0.004 is the factor exp(±0.004); beyond a factor of two a percentage says nothing
        return f"{100 * value:.2g} %" if value < 0.995 else "> 100 %"
    if column in ("of_best", "determinism_price"):
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        if column.startswith("tokens_per_s"):
            return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value == round(value) and abs(value) < 1e9:
            return str(int(value))
        if column.startswith(("mfu", "hfu")):
            return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
        return f"{value:.4g}"
    return " ".join(str(value).split())


def table(header: Sequence[str], body: Sequence[Sequence[str]], form: str = "text") -> str:
    """Rows of text as a table that ends in a newline. `form`: one of FORMATS. Numbers are aligned to the right."""
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *body])
        return out.getvalue()
    right = [bool(body) and all(is_number(row[i]) for row in body) for i in range(len(header))]
    if form == "latex":
        return _latex(header, body, right)
    if form == "md":
        header, body = [_md(h) for h in header], [[_md(c) for c in row] for row in body]
    widths = [max(len(h), *(len(row[i]) for row in body), 3) if body else len(h) for i, h in enumerate(header)]

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return f"| {' | '.join(cells)} |" if form == "md" else "  ".join(cells).rstrip()

    if form == "md":
        rule = (
            "|"
            + "|".join(f"{'-' * (w + 1)}:" if r else "-" * (w + 2) for w, r in zip(widths, right, strict=True))
            + "|"
        )
    else:
        rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(header), rule, *map(line, body)]) + "\n"


def is_number(text: str) -> bool:
    """Whether a cell is a number or empty, and so aligned to the right."""
    return text == "" or re.fullmatch(r"(> )?[-+±]?[\d,.]+(e[-+]?\d+)?=?( %)?", text) is not None


def _md(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "°": r"$^\circ$",
}
_LATEX |= {c: f"\\{c}" for c in "&%$#_{}"}


def _tex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def _latex(header: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A tabular with booktabs rules."""
    rows = [" & ".join(map(_tex, row)) + r" \\" for row in body]
    columns = "".join("r" if r else "l" for r in right)
    head = " & ".join(map(_tex, header)) + r" \\"
    lines = [
        f"\\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        head,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"
