"""One run's steps to the numbers of its row: medians over the steady part, peaks, flags. Never a mean with warm-up."""

import math
from typing import Any

import numpy as np

from analysis.files import dig, number, numbers
from analysis.flags import flags
from analysis.jsonl import Metrics
from analysis.stats import estimate, median
from analysis.steady import steady

NAN = float("nan")
NO_MEDIAN = ("step", "loss", "grad_norm", "perf/peak_memory")  # told by their last value, or by the largest
MIN_STEPS = 2  # steady steps below which a run has no result: one step is no measurement


def summarise(steps: Metrics, summary: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The result columns of one run; NaN for what the run does not have.

    Units: seconds, tokens/s over all ranks, percent, GiB. `log_median`, `log_error` and `df` are the estimate of
    tokens/s on the logarithm, from which intervals and ties follow.
    """
    pace, timed = _pace(steps)
    when = steady(pace)
    kept = {}
    if len(pace) - when.start >= MIN_STEPS:
        whole = len(pace) == steps.steps
        kept = {name: (values if whole else values[timed])[when.start :] for name, values in steps.columns.items()}
    medians = _medians({name: values for name, values in kept.items() if name not in NO_MEDIAN})
    nproc = number(config.get("nproc"))
    tokens_per_step = number(summary.get("tokens_per_step"))
    if tokens_per_step != tokens_per_step:
        tokens_per_step = _tokens_per_step(config)
    rate = _rate(kept, tokens_per_step)
    fit = estimate(rate) if len(rate) >= MIN_STEPS else None
    tokens_per_s = math.exp(fit.log_median) if fit else NAN
    per_gpu = medians.get("perf/tokens_per_s_per_gpu", NAN)
    row = {
        "tokens_per_s": tokens_per_s,
        "log_median": fit.log_median if fit else NAN,
        "log_error": fit.standard_error if fit else NAN,
        "df": fit.df if fit else NAN,
        "tokens_per_s_per_gpu": per_gpu if per_gpu == per_gpu else tokens_per_s / nproc,
        "step_s": medians.get("time/step", NAN),
        "data_s": medians.get("time/data", NAN),
        **_utilisation(medians, summary, tokens_per_s, nproc),
        **_memory(steps, summary),
        "loss": _last(steps.get("loss")),
        "steps_done": steps.steps,
        "steady_steps": len(rate),
        "dropped_steps": when.start,
        "dropped_why": when.why,
        "rho": fit.rho if fit else NAN,
        "damaged_lines": steps.damaged,
        "steps_s": float(pace.sum()) if "time/step" in steps.columns else NAN,
        "dropped_s": float(pace[: when.start].sum()) if "time/step" in steps.columns else NAN,
        "step_parts": _parts(medians),
        "memory_by_kind": _kinds(summary),
        "digest": _digest(pace),
        **_device(medians),
        **_seconds(summary),
        "bubble": number(dig(summary, "pipeline", "idle")),
        "bubble_theory": number(dig(summary, "pipeline", "idle_theory")),
        "params": number(summary.get("params")),
        "imbalance": medians.get("moe/imbalance", NAN),
        "expert_load": _load(summary),
        "replay_match": summary.get("replay_match"),
        "leaf_root": summary.get("leaf_root"),
        "replay_difference": summary.get("replay_difference"),
        "precision_used": summary.get("precision"),
        "attention_backend": summary.get("attention_backend"),
    }
    row["flags"] = flags(row, kept, pace[when.start :], when.drifts, fit, summary) if fit else ()
    return row


def _pace(steps: Metrics) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the steps that have them, and which steps these are.

    Another system's file may have tokens/s alone: its inverse, not in seconds, shows warm-up as well.
    """
    if "time/step" in steps.columns:
        pace = steps.columns["time/step"]
    else:
        with np.errstate(divide="ignore"):
            pace = 1 / steps.get("perf/throughput")
    timed = (pace > 0) & (pace < np.inf)  # false for NaN
    return (pace, timed) if timed.all() else (pace[timed], timed)


def _rate(kept: dict[str, np.ndarray], tokens_per_step: float) -> np.ndarray:
    """Tokens/s of each steady step, positive and finite; from the step times where the run did not write it."""
    rate = kept.get("perf/throughput")
    if rate is None and "time/step" in kept:
        rate = tokens_per_step / kept["time/step"]
    if rate is None:
        return np.zeros(0)
    good = (rate > 0) & (rate < np.inf)
    return rate if good.all() else rate[good]


def _tokens_per_step(config: dict[str, Any]) -> float:
    """Rows a step over all data-parallel ranks, times the sequence length."""
    shards = 1.0
    for name in ("tp", "pp", "cp"):
        degree = number(config.get(f"parallelism.{name}"))
        shards *= degree if degree >= 1 else 1.0
    rows = number(config.get("micro_batch")) * number(config.get("grad_accum")) * number(config.get("nproc")) / shards
    return rows * number(config.get("seq_len"))


def _utilisation(
    medians: dict[str, float], summary: dict[str, Any], tokens_per_s: float, nproc: float
) -> dict[str, Any]:
    """MFU under each convention: what the run wrote, or else tokens/s times FLOPs per token over the peak."""
    peak = number(dig(summary, "peak", "flops")) * nproc
    row: dict[str, Any] = {}
    for name in ("mfu", "mfu_causal", "hfu"):
        value = medians.get(f"perf/{name}", NAN)
        if value != value and peak > 0:
            value = 100 * tokens_per_s * number(dig(summary, "flops_per_token", name)) / peak
        row[name] = value
    row["peak_tflops"] = number(dig(summary, "peak", "flops")) / 1e12
    row["peak_source"] = dig(summary, "peak", "source")
    return row


def _memory(steps: Metrics, summary: dict[str, Any]) -> dict[str, Any]:
    """The largest over ranks, never their sum; inside the steps, and over the whole round."""
    inside = numbers(summary.get("rank_step_peak_mem_gib"))
    whole = numbers(summary.get("rank_peak_mem_gib"))
    column = steps.columns.get("perf/peak_memory")
    seen = float(np.fmax.reduce(column)) if column is not None else NAN
    return {
        "peak_mem_gib": max(inside) if inside else seen,
        "round_peak_mem_gib": max(whole) if whole else NAN,
        "capacity_gib": number(summary.get("capacity_gib")),
        "memory_kind": summary.get("memory_kind"),
    }


def _parts(medians: dict[str, float]) -> dict[str, float]:
    """Median seconds of every timed part of a step (`time/comm`, `time/compute`, …), where communication is timed."""
    parts = {
        k.removeprefix("time/"): v for k, v in sorted(medians.items()) if k.startswith("time/") and k != "time/step"
    }
    return parts if set(parts) - {"data"} else {}


def _kinds(summary: dict[str, Any]) -> dict[str, float]:
    """From `memory_by_kind`, a list over ranks: GiB of weights, gradients, … on the rank that holds most."""
    ranks = summary.get("memory_by_kind")
    ranks = [r for r in ranks if isinstance(r, dict)] if isinstance(ranks, list) else []
    kinds = max(ranks, key=lambda r: sum(v for v in map(number, r.values()) if v == v), default=None)
    return {str(k): number(v) for k, v in kinds.items() if number(v) >= 0} if isinstance(kinds, dict) else {}


def _load(summary: dict[str, Any]) -> dict[str, list[float]]:
    """From `experts.load`: by layer, each expert's share of the layer's tokens; layers with a damaged list are left out."""
    load = dig(summary, "experts", "load")
    lists = {str(k): numbers(v) for k, v in load.items()} if isinstance(load, dict) else {}
    length = max(map(len, lists.values()), default=0)
    return {k: v for k, v in lists.items() if length and len(v) == length}


def _device(medians: dict[str, float]) -> dict[str, float]:
    names = ("power_w", "sm_clock_mhz", "temperature_c")
    return {name: medians.get(f"gpu/{name}", NAN) for name in names}


def _seconds(summary: dict[str, Any]) -> dict[str, float]:
    return {f"{name}_s": number(dig(summary, "seconds", name)) for name in ("start", "build", "compile", "train")}


def _medians(kept: dict[str, np.ndarray]) -> dict[str, float]:
    """Median of every metric over the steady steps, all sorted together, which is faster; gaps don't count."""
    if not kept:
        return {}
    ordered = np.stack(list(kept.values()))
    gaps = ~np.isfinite(ordered).all(axis=1)
    ordered.sort(axis=1)
    n = ordered.shape[1]
    middle = ((ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2).tolist()
    found = dict(zip(kept, middle, strict=True))
    for name, gap in zip(kept, gaps.tolist(), strict=True):
        if gap:
            finite = kept[name][np.isfinite(kept[name])]
            found[name] = median(finite) if len(finite) else NAN
    return found


def _last(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else NAN


def _digest(pace: np.ndarray) -> str:
    """Equal for copies of a run, and never for two runs: the sum of the step times, to the last bit, and their number."""
    return f"{len(pace)}:{float(pace.sum())!r}:{float(pace[-1])!r}" if len(pace) > 2 else ""
