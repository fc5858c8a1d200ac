"""The schema's own words: every dotted key, what its type accepts, and the nearest name for a misspelt one. No Hydra here."""

import dataclasses
import difflib
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from train.config import Degree, Train

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

LISTED = {int: "integers", float: "numbers", str: "names"}


def nearest(word: str, valid: list[str]) -> str:
    """`; did you mean X?` for a close name, else nothing."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


@lru_cache(maxsize=1)
def hints() -> dict[str, Any]:
    """Dotted key → type, groups (dataclasses) included."""
    return dict(_walk(Train, ""))


def _walk(cls: Any, prefix: str) -> list[tuple[str, Any]]:
    out = []
    for name, hint in get_type_hints(cls).items():
        out.append((prefix + name, hint))
        if dataclasses.is_dataclass(hint):
            out += _walk(hint, f"{prefix}{name}.")
    return out


def is_group(key: str) -> bool:
    """Whether a key is a group of options that every point has."""
    return "." not in key and dataclasses.is_dataclass(hints().get(key))


@lru_cache(maxsize=1)
def _groups() -> list[Any]:
    return [hint for key, hint in hints().items() if is_group(key)]


def optional(hint: Any) -> bool:
    """Whether null is a value of that type."""
    return get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint)


def plain(hint: Any) -> Any:
    """int of Optional[int]; other types as they are."""
    rest = tuple(a for a in get_args(hint) if a is not type(None))
    return Union[rest] if optional(hint) else hint


def words(hint: Any) -> str:
    """`an integer`, `a number`, …, for the type of a key."""
    inner = plain(hint)
    if dataclasses.is_dataclass(inner):
        known = ", ".join(f.name for f in dataclasses.fields(inner))
        return "the name of an option" if inner in _groups() else f"a mapping of {known}"
    if inner == Degree:
        return "an integer or auto"
    if get_origin(inner) is Union:
        return ", ".join(words(each) for each in get_args(inner))
    if get_origin(inner) is list:
        return f"a list of {LISTED.get(get_args(inner)[0], 'values')}"
    return WORDS.get(inner) or "a mapping {NAME: value, …}"
