"""Hydra's and OmegaConf's exceptions as one line: key, value, what is valid, nearest name."""

import re
from functools import lru_cache

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from train import names
from train.config import ConfigError
from train.names import nearest
from train.sweep.validate import accepts

#: groups that are no part of a point's configuration
RUN_GROUPS = ("recipe", "sweeps")


def one_line(error: BaseException, args: list[str]) -> str:
    """The message for `error`, raised while handling the command line `args`."""
    if isinstance(error, ConfigError):
        return _flat(str(error))
    if isinstance(error, OverrideParseException):
        return _grammar(error)
    if isinstance(error, yaml.YAMLError):
        return _yaml(error)
    cause = error
    while isinstance(cause, ConfigCompositionException) and (deeper := cause.__cause__ or cause.__context__):
        cause = deeper
    if isinstance(cause, MissingConfigException):
        return _missing(cause)
    if isinstance(cause, yaml.YAMLError):
        return _yaml(cause)
    text = str(error).strip()
    file = re.match(r"In '([^']+)': ", text)
    if isinstance(cause, OmegaConfBaseException):
        return _value(cause, text, args, f"{file[1]}.yaml: " if file else "")
    return _composition(text, args)


def _value(cause: OmegaConfBaseException, text: str, args: list[str], where: str) -> str:
    """A key or value that doesn't fit the schema, on the command line or, with `where`, in a file."""
    found = re.search(r"(?:Could not \w+|Error merging override) '?([^'\s=]+)'?(?:=([^\n]*))?", text)
    key = (found[1] if found else str(cause.full_key or "")).rstrip(".").lstrip("+~")
    if not key and (quoted := re.search(r"Key '([^']+)'", text)):
        key = quoted[1]
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) or "is not in struct" in str(cause):
        full = str(cause.full_key or key)
        return where + _unknown(full if where or full.startswith(f"{key}.") else key, args)  # inside a mapping
    value = _argument(key, args) if not where else ""
    if not value and (shown := re.search(r"Value '(.*?)'", text, re.DOTALL)):
        value = shown[1]
    said = _flat(f"{where}{key}={value}" if value or not where else f"{where}{key}")
    if where and not key:
        return f"{where}{_flat(str(cause).splitlines()[0])}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{where}{key}: has no value; must be {_valid(key)}"
    if isinstance(cause, (InterpolationResolutionError, GrammarParseError, UnsupportedInterpolationType)):
        return f"{said}: {_flat(str(cause).splitlines()[0])}"
    if isinstance(cause, (ValidationError, ConfigTypeError)):
        return f"{said}: must be {_valid(key)}"
    return f"{said}: {_flat(str(cause).splitlines()[0])}"


def _valid(key: str) -> str:
    if key in names.hints():
        return accepts(key)
    parent = key.rpartition(".")[0]
    return "text" if parent in ("env", "nccl.env") else "a value of the schema's type"


def _composition(text: str, args: list[str]) -> str:
    """What Hydra says about groups and overrides as such."""
    group = re.search(r"Could not override '([^'=]+)", text)
    if group and "defaults list" in text:
        return _unknown(group[1].lstrip("+~").partition("@")[0], args)
    if there := re.search(r"An item is already at '([^']+)'", text):
        return f"+{there[1]}: is a key already; write {there[1]}={_argument(there[1], args)}"
    return _flat(text)[:400]


def _flat(text: str) -> str:
    """One line, cut in the middle where a value is pages long."""
    line = " ".join(text.split())
    return line if len(line) <= 700 else f"{line[:300]} … {line[-300:]}"


def _argument(key: str, args: list[str]) -> str:
    """The value that the command line gives `key`, as typed."""
    for arg in args:
        k, eq, v = arg.partition("=")
        if eq and k.lstrip("+~") == key:
            return v
    return ""


def _unknown(key: str, args: list[str]) -> str:
    value = _argument(key, args)
    shown = f"{key}={value}" if value else key
    if "/" in key and (dotted := key.replace("/", ".")) in names.hints():
        return f"{shown}: is not a group; for a value inside one write {dotted}={value}"
    every = [*names.hints(), *RUN_GROUPS]
    parent, _, last = key.rpartition(".")
    if not parent or parent in every:
        siblings = [k for k in names.hints() if k.rpartition(".")[0] == parent]
        prefix = f"{parent}." if parent else ""
        close = nearest(last, [k.rpartition(".")[2] for k in siblings]).replace("mean ", f"mean {prefix}")
        found = close or nearest(key, every)
        listed = ", ".join(sorted(siblings)) if parent else "the groups and keys of `python -m train --help`"
        return f"{shown}: is not a key{found} (valid: {listed})"
    return f"{shown}: is not a key{nearest(key, every)} (valid: those of `python -m train --help`)"


def _missing(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file or "")
    group, _, option = missing.partition("/") if names.is_group(missing.partition("/")[0]) else missing.rpartition("/")
    options = sorted(error.options or [])
    if not group:
        return _flat(str(error))[:300]
    if not options:
        return f"{missing}.yaml: is not in any configuration folder"
    return f"{group}={option}: is not an option{nearest(option, options)} (valid: {', '.join(options)})"


def _yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}: " if mark else ""
    return f"{where}is not YAML: {_flat(str(getattr(error, 'problem', None) or error))}"


@lru_cache(maxsize=1)
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _grammar(error: OverrideParseException) -> str:
    line = error.override
    key, eq, value = line.partition("=")
    if not eq:
        known = f"; write {line}=…" if line in names.hints() else nearest(line, list(names.hints()))
        return _flat(f"{line}: must be key=value{known}")
    bare = key.lstrip("+~")
    hint = names.hints().get(bare)
    if names.plain(hint) in (int, float, bool):
        return _flat(f"{line}: must be {accepts(bare)}")
    try:  # would it parse when quoted?
        _parser().parse_overrides([f"{key}='{value}'"])
        return _flat(f"{line}: has characters that need quotes: \"{key}='{value}'\"")
    except OverrideParseException:
        return _flat(f"{line}: can't be read as key=value ({str(error.message or error).splitlines()[0]})")
