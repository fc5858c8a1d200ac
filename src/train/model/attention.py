"""Causal attention on exactly one of torch's kernels, and which of them accept a model's shapes on a device."""

import functools
import warnings
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from train import config

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PATHS = tuple(_BACKENDS)


def attend(q: Tensor, k: Tensor, v: Tensor, path: str) -> Tensor:
    """Causal attention of q [B, H, T, d] over k, v [B, KV, T, d] → [B, H, T, d] on `path` alone.

    Raises RuntimeError where the kernel rejects its inputs: never another kernel instead. "auto" leaves the choice to
    torch, for devices where nothing is to be measured (meta, CPU tests).
    """
    grouped = q.shape[1] != k.shape[1]
    if path == "auto":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(_BACKENDS[path]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


@functools.cache
def probe(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> Mapping[str, str | None]:
    """Run every path once, forward and backward, on a short row: path → None if it accepts, else the kernel's reason."""
    return {path: _reason(path, device, dtype, heads, kv_heads, head_dim) for path in PATHS}


def _reason(
    path: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str | None:
    # the memory layout the model uses: [B, T, H, d] seen as [B, H, T, d]
    q, k, v = (
        torch.zeros(1, 128, n, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    with warnings.catch_warnings(record=True) as caught:  # torch says why a kernel was not used in warnings
        warnings.simplefilter("always")
        try:
            attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), path).sum().backward()
            return None
        except RuntimeError as error:
            failure = str(error)
    # first lines, without the source position torch appends; not those that only say which kernels were switched off
    lines = [str(w.message).splitlines()[0].split(" (Triggered internally")[0] for w in caught]
    reasons = [line for line in lines if not line.endswith(("not used because:", "been runtime disabled."))]
    return " ".join(dict.fromkeys(reasons)) or failure.splitlines()[0]


def order(device: torch.device) -> tuple[str, ...]:
    """The paths, fastest first. cuDNN leads on Hopper and data-centre Blackwell (H200, bf16, forward + backward:
    0.69 ms where flash takes 1.26 ms); elsewhere flash does."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10):
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "cudnn", "efficient", "math")


def select(requested: str, probed: Mapping[str, str | None], order: tuple[str, ...]) -> str:
    """The path to run: `requested`, or for auto the first in `order` that accepts.

    Raises ConfigError for `attention` where the requested path, or every path, rejects the model's shapes.
    """
    accepting = [path for path in order if probed[path] is None]
    advice = f"set attention={'|'.join(accepting)}" if accepting else "set another precision, model.head_dim or device"
    if requested == "auto":
        if not accepting:
            why = "; ".join(f"{path}: {probed[path]}" for path in order)
            raise config.ConfigError("attention", requested, f"no path accepts this model here ({why}); {advice}")
        return accepting[0]
    if requested not in PATHS:
        raise config.ConfigError("attention", requested, f"valid: auto, {', '.join(PATHS)}")
    if probed[requested] is not None:
        raise config.ConfigError("attention", requested, f"rejected here ({probed[requested]}); {advice}")
    return requested


def select_replayable(
    requested: str, probed: Mapping[str, str | None], order: tuple[str, ...], qualified: Collection[str]
) -> tuple[str, bool]:
    """For replay: (path, whether a record shows that it is reproducible bit for bit).

    auto takes the first path in `order` that accepts and is among `qualified`; without one it is `select`'s, unqualified.
    """
    recorded = [path for path in order if probed[path] is None and path in qualified]
    path = recorded[0] if requested == "auto" and recorded else select(requested, probed, order)
    return path, path in qualified
