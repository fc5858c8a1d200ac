"""profile=true: torch's profiler over the last two steps, one Chrome trace a rank (for Perfetto or chrome://tracing)."""

from pathlib import Path
from typing import Optional

import torch
from torch.profiler import ProfilerActivity, profile

RECORDED = 2  # steps


class Trace:
    """Records a rank's last steps into traces/rank<r>.json.gz; does nothing when off."""

    def __init__(self, on: bool, steps: int, folder: Path, rank: int, device: torch.device) -> None:
        self.steps = list(range(max(0, steps - RECORDED), steps)) if on else []
        self.path = folder / "traces" / f"rank{rank}.json.gz"
        self.device = device
        self.profiler: Optional[profile] = None

    def before(self, step: int) -> None:
        """The recorder goes on before the first recorded step."""
        if step in self.steps and self.profiler is None:
            kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
            self.profiler = profile(activities=kinds)
            self.profiler.start()

    def write(self) -> None:
        """Once no collective is under way: one that outlives the recorder crashes torch (segmentation fault, seen on 2.13)."""
        if self.profiler is not None:
            self.profiler.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
