"""Overrides whose value is meant as text, written so that Hydra's grammar takes it as that.

`name=1_1_1`, `out=it's here` and `env.A=012` are text to a user and numbers or syntax errors to Hydra.
"""

import re
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

#: one value for the whole sweep, so that a comma is a character and not a list
LITERAL = (
    "name", "out", "launch.time", "launch.memory", "launch.partition", "launch.account", "launch.qos", "launch.constraint",
    "launch.exclude", "launch.template", "launch.python",
)  # fmt: skip
#: may be a list of paths, but a path that is there is meant as it stands
PATHS = ("data.path", "data.tokenizer")
PLAIN = re.compile(r"[\w.+-]+")


def literal(override: str) -> str:
    """One override with its value quoted where it is meant as text."""
    key, eq, value = override.partition("=")
    bare = key.lstrip("+")
    variable = bare.startswith(("env.", "nccl.env."))
    if not eq:
        return override
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return f"++{bare}={value}" if variable else override
    if bare in LITERAL:
        return override if value in ("null", "") else f"{key}={quoted(value)}"
    if bare in PATHS and (Path(value).expanduser().exists() or not _parses(override)):
        return f"{key}={quoted(value)}"
    if bare.startswith("launch.sbatch."):
        return f"++{bare}={quoted(value)}"
    if variable:  # its mapping is typed, and closed but for ++
        parts = value.split(",")
        as_text = all(PLAIN.fullmatch(p) for p in parts) or not _parses(override)
        text = ",".join(quoted(p) for p in parts) if as_text else value
        return f"++{bare}={text}"
    return override


def _parses(override: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    return True


def quoted(text: str) -> str:
    """`text` in Hydra's quotes, its own quotes escaped."""
    return QuotedString(text, Quote.single).with_quotes()
