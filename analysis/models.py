"""Published geometries of models and peaks of devices, for recomputing what others published under one convention."""

import re
from dataclasses import dataclass

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


def shape(model: str) -> Shape | None:
    """The published geometry of a model's name, however the source decorates it."""
    plain = str(model).replace("Llama3.1", "Llama3")
    return next(
        (s for name, s in SHAPES.items() if plain.startswith(name) and not plain[len(name) :][:1].isalnum()), None
    )


def parameters(model: str) -> float:
    """Parameters from the name: `MPT-7b` → 7e9; NaN without a size in it. Mixtures of experts count all."""
    if model == "dense_1b":
        return SHAPES[model].matmul_parameters
    found = re.search(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z])", str(model))
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6) if found else float("nan")
