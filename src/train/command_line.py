"""The command line before Hydra reads it: flags first, one mode, and text that is meant literally kept literal."""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from train import names
from train.config import ConfigError
from train.names import nearest
from train.sweep.grid import NOT_SWEPT
from train.sweep.literal import literal

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
