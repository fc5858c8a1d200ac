"""What determinism costs: a row with deterministic=true beside the row that differs from it in nothing else."""

import json
import math

import pandas as pd

FREE = {"deterministic": False, "replay": False}


def price(rows: pd.DataFrame) -> pd.Series:
    """Share of tokens/s that each deterministic row loses against its free twin of the same provenance group; else NaN.

    `rows` needs `key` (the configuration as JSON), `group`, `status` and `tokens_per_s`. The twin has neither
    deterministic nor replay; attention=auto may pick another kernel there, which is part of the price.
    """
    done = rows[rows["status"] == "ok"]
    speed = dict(zip(zip(done["key"], done["group"], strict=True), done["tokens_per_s"], strict=True))
    out = pd.Series(math.nan, index=rows.index, dtype=float)
    for index, key, group in zip(done.index, done["key"], done["group"], strict=True):
        config = _config(key)
        if config.get("deterministic") is not True:
            continue
        free = speed.get((json.dumps(config | FREE, sort_keys=True, default=str), group), math.nan)
        out[index] = 1 - speed[key, group] / free
    return out


def _config(key: str) -> dict[str, object]:
    """The configuration behind a row's key; a run without one has its identity there instead."""
    try:
        config = json.loads(key)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
