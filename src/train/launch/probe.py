"""What torch sees on this host: version, devices, features. Runs in a child, because looking may create a CUDA context."""

import json
import sys
from typing import Any


def look() -> dict[str, Any]:
    """Device names and memory in GiB, versions and feature probes, as JSON-ready data."""
    import torch

    gpus = []
    error = None
    try:
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            uuid = str(getattr(p, "uuid", ""))
            gpus.append(
                {
                    "name": p.name,
                    "memory_gib": p.total_memory / 2**30,
                    "capability": [p.major, p.minor],
                    "uuid": uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
                }
            )
    except Exception as e:  # a broken driver must end as one clear line, not as a traceback
        error = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "gpu_error": error,
        "features": {
            "grouped_mm": hasattr(torch, "_grouped_mm"),
            "linear_cross_entropy": hasattr(torch.nn.functional, "linear_cross_entropy"),
        },
    }


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
