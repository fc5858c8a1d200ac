"""Command-line overrides and named grids → points → plain configurations.

Hydra composes once per combination of group options and applies each value override once to it (a compose takes 0.13 s,
so 1,000 points over two reductions take a second instead of minutes).
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Optional

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from train import names
from train.config import ConfigError
from train.sweep.literal import literal


@dataclass
class Point:
    """One cell of the grid: its overrides as written, and which of them differ within the grid."""

    overrides: list[str]
    swept: list[str]


def as_text(value: object) -> str:
    """A grid's value as command-line text: [4, 8] and "4,8" are the same sweep."""
    if isinstance(value, (list, tuple, ListConfig)):
        return ",".join(as_text(v) for v in value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


#: run-level keys: one value for the whole sweep
NOT_SWEPT = (
    "launch", "name", "out", "plan", "repeats", "budget", "retries", "prune", "max_failures", "code", "recipe", "sweeps",
    "cancel",
)  # fmt: skip


def expand(loader: ConfigLoader, grids: list[dict[str, Any]], arguments: list[str]) -> Iterator[Point]:
    """Every combination of every grid; what the command line says wins over a named grid's key.

    Raises ConfigError for a sweep over a key that belongs to the whole sweep, and for what no grid can have.
    """
    _check(grids)
    parser = OverridesParser.create(config_loader=loader)
    given = {o.get_key_element(): o for o in parser.parse_overrides(arguments)}
    for grid in grids:
        lines = [literal(f"{k}={as_text(v)}") for k, v in grid.items() if (k, v) != ("recipe", None)]
        overrides = {o.get_key_element(): o for o in parser.parse_overrides(lines)} | given
        choices: list[list[str]] = []
        swept: list[bool] = []
        for key, o in overrides.items():
            if not o.is_sweep_override():
                choices.append([o.input_line or f"{key}={o.get_value_element_as_str()}"])
                swept.append(False)
                continue
            bare = key.lstrip("+~")
            typed = (o.input_line or "").partition("=")[2]
            if bare in NOT_SWEPT or bare.startswith(("launch.", "budget.")):
                raise ConfigError(bare, typed, "belongs to the whole sweep and can't be swept")
            if not o.is_discrete_sweep():
                raise ConfigError(bare, typed, "must list its values: a,b,c, range(…) or glob(…)")
            try:
                choices.append([f"{key}={v}" for v in o.sweep_string_iterator()])
            except (ValueError, TypeError) as e:  # range(1,2,0)
                raise ConfigError(bare, typed, f"is not a list of values: {e}") from None
            if not choices[-1]:
                raise ConfigError(bare, typed, "has no values")
            swept.append(True)
        for (key, o), lines in zip(overrides.items(), choices, strict=True):
            if f"{key}=null" in lines and names.is_group(bare := key.lstrip("+")):
                raise ConfigError(bare, (o.input_line or "").partition("=")[2], "must be the name of an option")
        for combo in itertools.product(*choices):
            yield Point(list(combo), [c.lstrip("+~") for c, s in zip(combo, swept, strict=True) if s])


def _check(grids: list[dict[str, Any]]) -> None:
    """Keys that no grid, or only the command line, can have. Raises ConfigError."""
    whole: dict[str, str] = {}
    for grid in grids:
        seen: set[str] = set()
        for key, value in grid.items():
            bare, text = key.lstrip("+~"), as_text(value)
            if not bare or key.startswith("~"):
                raise ConfigError(key or "''", text, "is no key of a grid")
            if bare in seen:
                raise ConfigError(bare, text, "is given twice in one grid")
            seen.add(bare)
            if bare in ("launch", "sweeps"):
                raise ConfigError(bare, text, "is for the command line, not for a grid")
            if value == []:
                raise ConfigError(bare, "[]", "has no values")
            if bare in NOT_SWEPT and bare != "recipe" and whole.setdefault(bare, text) != text:
                raise ConfigError(bare, text, f"belongs to the whole sweep, and another grid says {whole[bare]}")


@dataclass
class Base:
    """One combination of group options, composed by Hydra, and what single value overrides do to it."""

    cfg: DictConfig
    plain: dict[str, Any]
    open: bool  # interpolations, or values that an override must give
    effects: dict[str, Any] = field(default_factory=dict)  # override as written → the value that it leaves at its key
    trial: Optional[DictConfig] = None  # a copy on which overrides of single values are tried one after the other

    def effect(self, override: Override, path: list[str]) -> Any:
        """The value that the override leaves at its key. A single value needs no fresh copy: the next one replaces it."""
        before: Any = self.plain
        for name in path:
            before = before.get(name, {}) if isinstance(before, dict) else {}
        if isinstance(before, (dict, list)):  # merged with what is there; or no such key, for Hydra to say
            return _at(_apply(self.cfg, [override]), path)
        if self.trial is None:
            self.trial = copy.deepcopy(self.cfg)
        ConfigLoaderImpl._apply_overrides_to_config([override], self.trial)
        value = OmegaConf.select(self.trial, override.key_or_group, throw_on_missing=True)
        if not OmegaConf.is_config(value):
            return value
        self.trial = None  # the next one would be merged with it
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


class Composer:
    """Turns a point's overrides into the plain nested dict of its configuration, with Hydra's own rules and types.

    What `key=value` does to a base does not depend on the point's other overrides, so Hydra applies each once and points
    are put together from the results (0.2 ms instead of 9 ms a point). Points for which that does not hold (`+`, `++`,
    `~`, overrides inside one another, interpolations) are composed one by one.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self.loader, self.master = loader, master
        self.parser = OverridesParser.create(config_loader=loader)
        self.bases: dict[tuple[str, ...], Base] = {}
        self._parse = cache(self._parse_one)
        self._is_group = cache(self._group)

    def _parse_one(self, line: str) -> Override:
        return self.parser.parse_overrides([line])[0]

    def _group(self, key: str) -> bool:
        return len(self.loader.get_group_options(key)) > 0

    def compose(self, overrides: list[str]) -> dict[str, Any]:
        """Raises what Hydra and OmegaConf raise for wrong keys, options and types."""
        groups: list[Override] = []
        values: list[Override] = []
        for line in overrides:
            o = self._parse(line)
            (groups if self._is_group(o.key_or_group) else values).append(o)
        base = self._base(tuple(o.input_line or "" for o in groups))
        if base.open or not _independent(values):
            return _apply(base.cfg, values)
        out = _copy(base.plain)
        for o in values:
            line = o.input_line or ""
            path = o.key_or_group.split(".")
            if line not in base.effects:
                base.effects[line] = base.effect(o, path)
            _at(out, path[:-1])[path[-1]] = _copy(base.effects[line])
        return out

    def _base(self, key: tuple[str, ...]) -> Base:
        if key not in self.bases:
            cfg = self.loader.load_sweep_config(self.master, list(key))
            with open_dict(cfg):
                del cfg["hydra"]
            plain: Any = OmegaConf.to_container(cfg, resolve=False)
            self.bases[key] = Base(cfg, plain, any("${" in t or t == "???" for t in _texts(plain)))
        return self.bases[key]


def _apply(base: DictConfig, values: list[Override]) -> dict[str, Any]:
    cfg = copy.deepcopy(base)
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)  # Hydra's own rules for +, ++ and ~
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def _independent(values: list[Override]) -> bool:
    """Does each override set one existing key that no other one touches or refers to?"""
    if any(o.is_add() or o.is_force_add() or o.is_delete() or "${" in (o.input_line or "") for o in values):
        return False
    keys = [f"{o.key_or_group}." for o in values]
    return not any(b.startswith(a) for a, b in itertools.permutations(keys, 2))


def _at(data: Any, path: list[str]) -> Any:
    for name in path:
        data = data[name]
    return data


def _copy(data: Any) -> Any:
    """copy.deepcopy for what to_container returns, ten times as fast."""
    if isinstance(data, dict):
        return {k: _copy(v) for k, v in data.items()}
    return [_copy(v) for v in data] if isinstance(data, list) else data


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, (dict, list)):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _texts(value)
    elif isinstance(data, str):
        yield data
