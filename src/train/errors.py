"""Hydra's and OmegaConf's exceptions as one line: key, value, what is valid, nearest name."""

import difflib
import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from train.config import ConfigError, Train


def nearest(word: str, valid: list[str]) -> str:
    """`; did you mean X?` for a close name, else nothing."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def keys(cls: Any = Train, prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    import dataclasses
    from typing import get_type_hints

    out = []
    for name, hint in get_type_hints(cls).items():
        out.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            out += keys(hint, f"{prefix}{name}.")
    return out


def _argument(key: str, args: list[str]) -> str:
    """The value that the command line gives `key`, as typed."""
    for arg in args:
        k, eq, v = arg.partition("=")
        if eq and k.lstrip("+~") == key:
            return v
    return ""


def one_line(error: Exception, args: list[str]) -> str:
    """The message for `error`, raised while handling the command line `args`."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return _grammar(error)
    if isinstance(error, MissingConfigException):
        return _missing(error, args)
    cause: BaseException = error
    while isinstance(cause, ConfigCompositionException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, MissingConfigException):
        return _missing(cause, args)
    text = str(error).strip()
    match = re.search(r"(?:Could not override|Error merging override) '?([^'\s=]+)'?(?:=([^\n]*))?", text)
    key = match[1].rstrip(".").lstrip("+~") if match else str(getattr(cause, "full_key", "") or "")
    if isinstance(error, ConfigCompositionException) and "defaults list" in text and match:
        return _unknown(key, args)
    if isinstance(cause, ConfigKeyError) or "is not in struct" in str(cause):
        return _unknown(key or str(getattr(cause, "full_key", "")), args)
    value = _argument(key, args) or (match[2] if match and match[2] else str(getattr(cause, "value", "") or ""))
    if isinstance(cause, (MissingMandatoryValue,)):
        return f"{key}: has no value; give one"
    if isinstance(cause, InterpolationKeyError):
        return f"{key}={value}: {str(cause).splitlines()[0]}"
    if isinstance(cause, (ValidationError, ConfigTypeError)):
        return f"{key}={value}: must be {_expected(cause)}"
    if isinstance(cause, OmegaConfBaseException):
        return f"{key}={value}: {str(cause).splitlines()[0]}" if key else str(cause).splitlines()[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:400]


def _expected(cause: OmegaConfBaseException) -> str:
    text = str(cause)
    for pattern, words in (("Integer", "an integer"), ("Float", "a number"), ("Boolean", "true or false")):
        if pattern in text:
            return words
    if "None" in text or "non-optional" in text:
        return "given (null is not valid)"
    if "String" in text or "Cannot convert" in text or "str" in text:
        return "text"
    return f"of the schema's type ({text.splitlines()[0]})"


def _unknown(key: str, args: list[str]) -> str:
    value = _argument(key, args)
    shown = f"{key}={value}" if value else key
    if "/" in key:
        dotted = key.replace("/", ".")
        return f"{shown}: is not a group; for a value inside one write {dotted}={value}"
    valid = keys()
    parent = key.rpartition(".")[0]
    siblings = [k for k in valid if k.rpartition(".")[0] == parent] if parent in ("", *valid) else valid
    names = siblings if key.count(".") else [*siblings, "recipe", "sweeps"]
    return f"{shown}: is not a key{nearest(key, [*valid, 'recipe', 'sweeps'])} (valid: {', '.join(sorted(names))})"


def _missing(error: MissingConfigException, args: list[str]) -> str:
    missing = str(error.missing_cfg_file or "")
    group, _, option = missing.rpartition("/")
    options = sorted(error.options or [])
    if not group:
        return " ".join(str(error).split())[:300]
    return f"{group}={option}: is not an option{nearest(option, options)} (valid: {', '.join(options)})"


def _grammar(error: OverrideParseException) -> str:
    line = error.override
    key, eq, value = line.partition("=")
    if not eq:
        return f"{line}: must be key=value"
    try:  # would it parse when quoted?
        OverridesParser.create().parse_overrides([f"{key}='{value}'"])
        return f"{key}={value}: has characters that need quotes: \"{key}='{value}'\""
    except Exception:
        detail = str(error.message or error).splitlines()[0]
        return f"{line}: can't be read as key=value ({detail})"
