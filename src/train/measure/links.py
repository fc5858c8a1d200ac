"""How this host's GPUs are joined, as NVML gives it: the matrix of `nvidia-smi topo -m`."""

from typing import Any

import torch

#: nvmlGpuTopologyLevel_t (nvml.h): the nearest thing that a pair shares
LEVELS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def nvml() -> Any:
    """The initialised pynvml module, or None: on a host without NVML the keys are simply absent."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml
    except Exception:
        return None


def handle(library: Any, uuid: str) -> Any:
    """NVML's handle of the device that torch knows by `uuid`. Raises NVMLError."""
    return library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def matrix() -> list[list[str]] | None:
    """[GPU][GPU] of the visible devices: "NV4" (4 active NVLinks each, to the other or to a switch), else the nearest common
    level, "?" where NVML does not say; None without NVML."""
    library = nvml()
    if library is None:
        return None
    try:
        handles = [
            handle(library, str(torch.cuda.get_device_properties(i).uuid)) for i in range(torch.cuda.device_count())
        ]
    except Exception:  # a virtual device without a UUID that NVML knows
        return None
    return [[_link(library, a, b) if a is not b else "X" for b in handles] for a in handles]


def _link(library: Any, a: Any, b: Any) -> str:
    try:
        if library.nvmlDeviceGetP2PStatus(a, b, library.NVML_P2P_CAPS_INDEX_NVLINK) == library.NVML_P2P_STATUS_OK:
            return f"NV{_active(library, a)}"
    except Exception:  # not supported by this device or driver
        pass
    try:
        return LEVELS.get(library.nvmlDeviceGetTopologyCommonAncestor(a, b), "?")
    except Exception:
        return "?"


def _active(library: Any, device: Any) -> int:
    """NVLinks of the device that are up."""
    count = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        try:
            count += bool(library.nvmlDeviceGetNvLinkState(device, link))
        except Exception:  # no such link
            break
    return count
