"""Published results (analysis/reference/*.csv) as reference points, their MFU recomputed under one convention.

Every row keeps what its source states; `mfu` is ours: (6·N + 12·L·H·d·T)·tokens/s/GPU over the vendor's dense peak for
the precision, N the matmul parameters (LM head counted, embedding lookup not). It is NaN where the source does not give
the model's shape or the tokens/s.
"""

import io
import re
from dataclasses import dataclass
from importlib import resources

import numpy as np
import pandas as pd

from analysis.foreign import read_csv
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

# Dense bf16 TFLOP/s a device, from the vendor's data sheets (half of the figure with sparsity).
PEAKS = {"GB200": 2500.0, "B200": 2250.0, "H200": 989.4, "H100": 989.4, "A100": 312.0, "5090": 209.5, "A6000": 154.8}


@dataclass(frozen=True)
class Shape:
    """A decoder's published geometry."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def matmul_parameters(self) -> float:
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3.0 * self.width * self.ffn) + self.width * self.vocab

    def flops_per_token(self, seq_len: float) -> float:
        """6·N + 12·L·H·d·T (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 6 * self.matmul_parameters + 12 * self.layers * self.heads * self.head_dim * seq_len


SHAPES = {
    "dense_1b": Shape(18, 2048, 16, 8, 128, 6144, 32768),
    "Llama3-8B": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Llama3-70B": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "Llama3-405B": Shape(126, 16384, 128, 8, 128, 53248, 128256),
    "Llama2-13B": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "Llama2-70B": Shape(80, 8192, 64, 8, 128, 28672, 32000),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936),
    "Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25600, 151936),
}


def load_published() -> pd.DataFrame:
    """All reference rows with the columns of `COLUMNS`."""
    parts = [_llm_foundry(), _torchtitan(), _prime_rl(), _seed(), _playbook()]
    return pd.concat([part.reindex(columns=COLUMNS) for part in parts], ignore_index=True)


def family(device: str) -> str | None:
    """Key of `PEAKS` for a device's name: `NVIDIA H100 80GB HBM3` → H100."""
    return next((name for name in PEAKS if name.lower() in device.lower()), None)


def peak_tflops(device: str, precision: str) -> float:
    """Dense peak for the precision; NaN for a device that is not in the table."""
    name = family(device)
    if name is None:
        return float("nan")
    eight = any(word in precision.lower() for word in ("fp8", "float8", "mxfp8"))
    return PEAKS[name] * (2 if eight else 1) if "nvfp4" not in precision.lower() else float("nan")


def foundry_mfu(rows: pd.DataFrame) -> pd.Series:
    """MFU % by llm-foundry's own convention: all parameters (tied), peak 989.5 (bf16), twice that (fp8), 312 (A100)."""
    peak = np.where(rows["GPU"].str.contains("h100"), 989.5e12, 312e12)
    peak = peak * np.where(rows["Precision"].str.contains("fp8"), 2, 1)
    return 100 * _foundry_flops(rows) * rows["Throughput (T/s)"] / rows["# GPUs"] / peak


def nearby(ranked: Ranked, most: int = 8) -> pd.DataFrame:
    """Published rows on the sweep's device and of a model of similar size (a factor of three), the best of each."""
    finished = ranked.rows[ranked.rows["rank"].notna()]
    names = {name for name in map(family, finished["hardware"].astype(str)) if name}
    sizes = finished["params"].dropna()
    if not names or sizes.empty:
        return pd.DataFrame(columns=COLUMNS)
    rows = load_published()
    size = rows["model"].map(_size)
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


def shape(model: str) -> Shape | None:
    """The published geometry of a model's name, however the source decorates it."""
    plain = str(model).replace("Llama3.1", "Llama3")
    return next(
        (s for name, s in SHAPES.items() if plain.startswith(name) and not plain[len(name) :][:1].isalnum()), None
    )


def _size(model: str) -> float:
    """Parameters from the name: `MPT-7b` → 7e9; NaN without a size in it. Mixtures of experts count all."""
    if model == "dense_1b":
        return SHAPES[model].matmul_parameters
    found = re.search(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z])", str(model))
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6) if found else float("nan")


def _first_number(values: pd.Series) -> pd.Series:
    """`8192 (assumed)` → 8192."""
    return pd.to_numeric(values.astype(str).str.extract(r"(\d+(?:\.\d+)?)")[0], errors="coerce")
