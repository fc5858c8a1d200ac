"""How long the points that are left will take, from those that have run: a start-up share and seconds per token x parameter."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Optional

from train.config import Train
from train.measure.flops import matmul_params


def work(cfg: Train) -> float:
    """Tokens times the width of the model's matmuls: proportional to a point's training time on the same devices."""
    rows = cfg.global_batch or cfg.micro_batch
    return float(cfg.steps * rows * cfg.seq_len * matmul_params(cfg.model))


@dataclass
class Estimate:
    """Collects finished points; predicts others. Medians, so that one odd point does not matter."""

    fixed: list[float] = field(default_factory=list)  # wall seconds that are not training
    rate: list[float] = field(default_factory=list)  # training seconds per unit of work
    whole: list[float] = field(default_factory=list)  # wall seconds of points that did not finish

    def add(self, cfg: Train, status: dict[str, Any]) -> None:
        """A point that has run, from its status.json."""
        summary = status.get("summary") or {}
        wall = summary.get("wall_s")
        if not isinstance(wall, (int, float)):
            return
        seconds = summary.get("seconds") or {}
        train = seconds.get("train")
        if status.get("status") == "ok" and isinstance(train, (int, float)):
            self.fixed.append(max(0.0, wall - train))
            self.rate.append(max(0.0, train) / work(cfg))
        else:
            self.whole.append(wall)

    def seconds(self, cfg: Train) -> Optional[float]:
        """Predicted wall seconds of a point, None before anything has run."""
        if self.rate:
            return median(self.fixed) + median(self.rate) * work(cfg)
        return median(self.whole) if self.whole else None

    def total(self, cfgs: list[Train]) -> Optional[float]:
        """Predicted wall seconds of several points."""
        if not self.rate and not self.whole:
            return None
        return sum(self.seconds(c) or 0.0 for c in cfgs)


def readable(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
