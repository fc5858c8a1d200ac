"""The command line before Hydra reads it: flags first, one mode, and text that is meant literally kept literal.

`name=1_1_1`, `out=it's here` and `env.A=012` are text to a user and numbers or syntax errors to Hydra's grammar.
"""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from train import names
from train.config import ConfigError
from train.names import nearest
from train.sweep.grid import NOT_SWEPT

#: one value for the whole sweep, so that a comma is a character and not a list
LITERAL = (
    "name", "out", "launch.time", "launch.memory", "launch.partition", "launch.account", "launch.qos", "launch.constraint",
    "launch.exclude", "launch.template", "launch.python",
)  # fmt: skip
#: may be a list of paths, but a path that is there is meant as it stands
PATHS = ("data.path", "data.tokenizer")
PLAIN = re.compile(r"[\w.+-]+")
#: Hydra's own run settings: points are started by our sweeper and by launch.*
NOT_OURS = re.compile(r"hydra(/launcher|/sweeper|\.launcher|\.sweeper|\.mode|\.run|\.sweep|\.job|\.output_subdir)\b")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class UsageError(Exception):
    """A flag that can't be used."""


def parse(args: list[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides, wherever they stand. Raises UsageError and ConfigError."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError:
            shown = arg.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise UsageError(f"{shown}: is not text in this locale's encoding") from None
    parser = get_args_parser()
    parser.__class__, parser.allow_abbrev = _Parser, False
    try:
        found = parser.parse_intermixed_args(args)
    except UsageError as e:
        raise UsageError(_flag(str(e), parser)) from None
    if found.experimental_rerun is not None:
        raise UsageError("--experimental-rerun: points are run again by name=SWEEP")
    if found.config_dir is not None and not Path(found.config_dir).is_dir():
        raise UsageError(f"--config-dir={found.config_dir}: is not a folder")
    return found


def _flag(message: str, parser: argparse.ArgumentParser) -> str:
    unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message)
    if not unknown:
        return message
    flags = [s for a in parser._actions for s in a.option_strings if s.startswith("--")]
    name = unknown[1].partition("=")[0]
    return (
        f"{unknown[1]}: is not a flag{nearest(name, flags)} (settings are key=value; flags: {', '.join(sorted(flags))})"
    )


def prints_only(found: argparse.Namespace) -> bool:
    """Whether Hydra is only asked to show something."""
    return bool(found.help or found.hydra_help or found.cfg or found.info or found.shell_completion)


def for_hydra(found: argparse.Namespace) -> list[str]:
    """The arguments as Hydra gets them. Raises ConfigError for a key that is given twice or is Hydra's to set."""
    overrides = found.overrides
    if not found.shell_completion:
        _check(overrides)
        overrides = [literal(o) for o in overrides if o not in ("recipe=null", "sweeps=null")]  # as they are
    flags = []
    for name, value in vars(found).items():
        if name == "overrides" or value in (None, False) or (name in ("run", "multirun") and not prints_only(found)):
            continue
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [f"{flag}={value}"]
    return ([] if prints_only(found) else ["--multirun"]) + flags + overrides


def _check(overrides: list[str]) -> None:
    seen: dict[str, str] = {}
    for override in overrides:
        key, eq, value = override.partition("=")
        bare = key.lstrip("+~")
        if eq and (not bare or bare.endswith(".")):
            raise UsageError(f"{bare}={value}: is not key=value")
        if NOT_OURS.match(bare):
            raise ConfigError(bare, value, "is not a setting here; where and how points run is launch=…, name=, out=")
        if key.startswith("~") and not bare.startswith(("env.", "nccl.env.")):
            raise UsageError(f"{override}: a key can't be removed; give it another value")
        if eq and names.is_group(bare) and (value in ("null", "") or value[:1] in "[{"):
            raise ConfigError(bare, value, "must be the name of an option")
        if eq and bare in seen:
            sweep = f"; a sweep is {bare}={seen[bare]},{value}" if bare not in NOT_SWEPT else ""
            raise ConfigError(bare, value, f"is given twice, {bare}={seen[bare]} before{sweep}")
        seen[bare] = value


def literal(override: str) -> str:
    """One override with its value quoted where it is meant as text."""
    key, eq, value = override.partition("=")
    bare = key.lstrip("+")
    if not eq or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return override
    if bare in LITERAL:
        return override if value in ("null", "") else f"{key}={quoted(value)}"
    if bare in PATHS and (Path(value).expanduser().exists() or not _parses(override)):
        return f"{key}={quoted(value)}"
    if bare.startswith("launch.sbatch."):
        return f"++{bare}={quoted(value)}"
    if bare.startswith(("env.", "nccl.env.")):
        parts = value.split(",")
        as_text = all(PLAIN.fullmatch(p) for p in parts) or not _parses(override)
        text = ",".join(quoted(p) for p in parts) if as_text else value
        return f"++{bare}={text}"  # a typed mapping is closed otherwise
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
