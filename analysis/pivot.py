"""A pivot of two knobs: the best result in each cell, or the status where there is none."""

from analysis.errors import BadInput
from analysis.plots.style import ordered_values
from analysis.query import available, known
from analysis.rank import Ranked
from analysis.text import cell, table, title


def pivot(ranked: Ranked, text: str, value: str, form: str) -> str:
    """`text`: `micro_batch,reduction` (rows, columns). Raises BadInput for anything but two known columns."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) != 2:
        raise BadInput(f"--pivot needs two columns, as in micro_batch,reduction; got '{text}'")
    valid = available(list(ranked.rows.columns))
    down, across = (known(name, valid, "column in --pivot") for name in names)
    rows = ranked.rows[ranked.rows["group"].isin([0, -1])]
    a, b = ((name if name in rows else f"cfg:{name}") for name in (down, across))
    rows = rows[rows[a].notna() & rows[b].notna()]
    columns = ordered_values(rows[b])
    body = []
    for key in ordered_values(rows[a]):
        line = [cell(key)]
        for column in columns:
            part = rows[(rows[a] == key) & (rows[b] == column)]  # best first
            finished = part[part["rank"].notna()]
            if len(finished):
                line.append(cell(finished.iloc[0][value], value))
            else:
                line.append(str(part.iloc[0]["status"]) if len(part) else "")
        body.append(line)
    return table([f"{title(down)} \\ {title(across)}", *(cell(c) for c in columns)], body, form)
