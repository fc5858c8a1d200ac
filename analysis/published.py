"""Published results (analysis/reference/*.csv) as reference points, their MFU recomputed under one convention.

Every row keeps what its source states; `mfu` is ours: (6·N + 12·L·H·d·T)·tokens/s/GPU over the vendor's dense peak for
the precision, N the matmul parameters (LM head counted, embedding lookup not). It is NaN where the source does not give
the model's shape or the tokens/s.
"""

import io
from importlib import resources

import numpy as np
import pandas as pd

from analysis.foreign import read_csv
from analysis.models import family, parameters, peak_tflops, shape
from analysis.query import filtered
from analysis.rank import Ranked
from analysis.text import cell, table, title

COLUMNS = [
    "source",
    "model",
    "gpu",
    "gpus",
    "seq_len",
    "micro_batch",
    "precision",
    "recompute",
    "tokens_per_s_per_gpu",
    "mfu_published",
    "mfu",
    "peak_tflops",
    "peak_mem_gib",
    "convention",
    "note",
]
SHOWN = [
    "source",
    "model",
    "gpu",
    "gpus",
    "seq_len",
    "precision",
    "tokens_per_s_per_gpu",
    "mfu_published",
    "mfu",
    "peak_mem_gib",
]


def load_published() -> pd.DataFrame:
    """All reference rows with the columns of `COLUMNS`."""
    parts = [_llm_foundry(), _torchtitan(), _prime_rl(), _seed(), _playbook()]
    return pd.concat([part.reindex(columns=COLUMNS) for part in parts], ignore_index=True)


def nearby(ranked: Ranked, most: int = 8) -> pd.DataFrame:
    """Published rows on the sweep's device and of a model of similar size (a factor of three), the best of each."""
    finished = ranked.rows[ranked.rows["rank"].notna()]
    names = {name for name in map(family, finished["hardware"].astype(str)) if name}
    sizes = finished["params"].dropna()
    if not names or sizes.empty:
        return pd.DataFrame(columns=COLUMNS)
    rows = load_published()
    size = rows["model"].map(parameters)
    fits = rows["gpu"].map(family).isin(names) & size.between(sizes.min() / 3, sizes.max() * 3) & rows["mfu"].notna()
    best = rows[fits].sort_values("mfu", ascending=False).drop_duplicates(["source", "model", "gpu", "precision"])
    return best.head(most).reset_index(drop=True)


def render(where: str | None, form: str) -> str:
    """The reference table as text, Markdown, CSV or LaTeX. Raises BadInput for a wrong condition."""
    rows = load_published()
    if where:
        rows = filtered(rows, where)
    if form == "csv":
        return rows.to_csv(index=False, lineterminator="\n", float_format="%.6g")
    return rows_table(rows, form)


def rows_table(rows: pd.DataFrame, form: str) -> str:
    """Reference rows as a table of the columns in `SHOWN`."""
    return table(header(), cells(rows), form)


def header() -> list[str]:
    """Titles of the columns in `SHOWN`."""
    return [{"mfu_published": "MFU % stated", "mfu": "MFU % here"}.get(c, title(c)) for c in SHOWN]


def cells(rows: pd.DataFrame) -> list[list[str]]:
    """The columns in `SHOWN` as text."""
    return [[cell(row[c], c) for c in SHOWN] for row in rows.to_dict("records")]


def _read(name: str) -> pd.DataFrame:
    text = (resources.files("analysis") / "reference" / name).read_text("utf-8")
    return read_csv(io.StringIO(text))


def _foundry_flops(rows: pd.DataFrame) -> pd.Series:
    # In floating point: FLOPs times tokens/s pass 2^63.
    return 6.0 * rows["NumParams"] + 12.0 * rows["layers"] * rows["d_model"] * rows["SeqLen (T)"]


def _llm_foundry() -> pd.DataFrame:
    rows = _read("llm_foundry.csv")
    rate = rows["Throughput (T/s)"] / rows["# GPUs"]
    peak = pd.Series([peak_tflops(g, p) for g, p in zip(rows["GPU"], rows["Precision"], strict=True)], index=rows.index)
    return pd.DataFrame(
        {
            "source": "llm-foundry scripts/train/benchmarking",
            "model": "MPT-" + rows["Model"],
            "gpu": rows["GPU"],
            "gpus": rows["# GPUs"],
            "seq_len": rows["SeqLen (T)"],
            "micro_batch": rows["MicroBatchSize"],
            "precision": rows["Precision"],
            "recompute": rows["Activation Checkpointing"].map({True: "full", False: "none"}),
            "tokens_per_s_per_gpu": rate,
            "mfu_published": rows["MFU"],
            "mfu": 100 * _foundry_flops(rows) * rate / (peak * 1e12),
            "peak_tflops": peak,
            "convention": "6·N + 12·L·d·T, all parameters (tied embedding)",
        }
    )


def _torchtitan() -> pd.DataFrame:
    rows = _read("torchtitan.csv")
    frame = pd.DataFrame(
        {
            "source": "torchtitan " + rows["source"],
            "model": rows["model"],
            "gpu": rows["gpu"],
            "gpus": _first_number(rows["ngpus"]),
            "seq_len": _first_number(rows["seq_len"]),
            "micro_batch": _first_number(rows["local_bs"]),
            "precision": rows["precision"],
            "recompute": rows["ac"],
            "tokens_per_s_per_gpu": pd.to_numeric(rows["tps_per_gpu"], errors="coerce"),
            "mfu_published": _first_number(rows["mfu_pct_published"]),
            "peak_mem_gib": _first_number(rows["mem_gib"]),
            "convention": "6·N + 12·L·H·d·T, N without the embedding lookup",
        }
    )
    return _recomputed(frame)


def _prime_rl() -> pd.DataFrame:
    """Full fine-tuning rows that ran; tokens/s from the step time, since the stated one is an average with warm-up."""
    rows = _read("prime_rl.csv")
    rows = rows[rows["ok"].astype(bool) & rows["lora"].isna() & (rows["step"] > 0)].reset_index(drop=True)
    ratio = rows["tps_ratio"]
    frame = pd.DataFrame(
        {
            "source": "prime-rl benchmarks",
            "model": rows["model"].str.removeprefix("Qwen/"),
            "gpu": rows["dev"],
            "gpus": rows["gpus"],
            "seq_len": rows["seq"],
            "micro_batch": rows["mb"],
            "precision": "bf16",
            "recompute": rows["ac"].str.lower(),
            "tokens_per_s_per_gpu": rows["tps_from_step_time"] / rows["gpus"],
            "mfu_published": rows["mfu"],
            "peak_mem_gib": rows["mem"],
            "convention": "its own, by width over heads instead of the real head_dim",
            "note": [f"stated tokens/s is {1 / r:.2f} of what its step time gives" if r > 1.05 else "" for r in ratio],
        }
    )
    return _recomputed(frame)


def _seed() -> pd.DataFrame:
    rows = _read("seed_dp2.csv")
    frame = pd.DataFrame(
        {
            "source": "mfu-multigpu.md",
            "model": "dense_1b",
            "gpu": "RTX 5090 (PCIe)",
            "gpus": rows["world"],
            "seq_len": 2048,
            "micro_batch": rows["micro_batch"],
            "precision": "bf16",
            "recompute": "full",
            "tokens_per_s_per_gpu": rows["tokens_per_s"] / rows["world"],
            "mfu_published": rows["mfu_pct"],
            "peak_mem_gib": rows["in_step_peak_gib"],
            "convention": "not stated",
            "note": [f"zero2o, compile={str(c).lower()}" for c in rows["compile"]],
        }
    )
    return _recomputed(frame)


def _playbook() -> pd.DataFrame:
    rows = _read("ultrascale_playbook.csv")
    return pd.DataFrame(
        {
            "source": "Ultra-Scale Playbook",
            "model": rows["params_b"].map(lambda b: f"Llama-{b}B"),
            "gpu": "H100",
            "gpus": rows["nodes_of_8_h100"] * 8,
            "micro_batch": rows["micro_batch"],
            "precision": "bf16",
            "mfu_published": rows["mfu_pct"],
            "peak_mem_gib": rows["memory_gib"],
            "convention": "not stated",
            "note": [
                f"dp {d}, tp {t}, pp {p}, ZeRO-{z}" for d, t, p, z in rows[["dp", "tp", "pp", "zero_stage"]].to_numpy()
            ],
        }
    )


def _recomputed(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds `peak_tflops` and `mfu` where the model's shape is known."""
    frame["peak_tflops"] = [peak_tflops(str(g), str(p)) for g, p in zip(frame["gpu"], frame["precision"], strict=True)]
    shapes = frame["model"].map(shape)
    flops = [s.flops_per_token(t) if s else np.nan for s, t in zip(shapes, frame["seq_len"], strict=True)]
    frame["mfu"] = 100 * np.array(flops, float) * frame["tokens_per_s_per_gpu"] / (frame["peak_tflops"] * 1e12)
    return frame


def _first_number(values: pd.Series) -> pd.Series:
    """`8192 (assumed)` → 8192."""
    return pd.to_numeric(values.astype(str).str.extract(r"(\d+(?:\.\d+)?)")[0], errors="coerce")
