"""Per-step measurement without a host synchronisation inside a step, and the writer of metrics.jsonl.

A step lasts from its own start to the start of the next one, so that nothing can hide between steps. On CUDA both ends are
events on the stream; step n is read only when step n+1 has been launched, so the host never drains the queue.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from train.measure import marks, memory


class NonFinite(Exception):
    """A loss or gradient norm that is NaN or infinite: the run is over."""


@dataclass
class Pending:
    """A step that has been launched: its start mark and results that may still be on the way."""

    step: int
    mark: Any  # CUDA event or perf_counter seconds
    data_s: float = 0.0
    host: Optional[torch.Tensor] = None  # [2 + more] loss, grad_norm, … on the host
    ready: Any = None
    end: Any = None  # mark, where something that is not part of the step follows it
    peak: float = 0.0


@dataclass
class Meter:
    """Collects steps, gathers them over ranks, writes lines on rank 0."""

    device: torch.device
    rank: int
    world: int
    tokens_per_step: int  # over all ranks
    flops_per_token: dict[str, float]
    peak_flops: Optional[float]  # per device; None: no MFU rather than a wrong one
    path: Optional[Path]  # metrics.jsonl, on rank 0
    group: Any = None  # gloo group for host-side gathers
    loss_weight: float = 1.0  # of this rank in the mean over ranks: 0 where the pipeline's last stage isn't
    more: tuple[str, ...] = ()  # names of what `results` gets besides; of a step the largest over ranks
    extra: Any = None  # callable(step) → more keys, on rank 0
    current: Optional[Pending] = None
    waiting: list[dict[str, float]] = field(default_factory=list)
    interval: int = 1
    slowest: float = 0.0
    step_peak: float = 0.0
    round_peak: float = 0.0
    floor: float = 0.0  # GiB that a captured step takes: its replays allocate nothing that could be seen
    buffers: list[torch.Tensor] = field(default_factory=list)  # on the host, pinned: of this step and the one before
    last: dict[str, float] = field(default_factory=dict)

    def start(self, step: int) -> Optional[Pending]:
        """Mark the start of `step`, which is also the end of the one before; returns that one, to be read later."""
        mark = marks.mark(self.device)
        if self.current is not None and self.current.end is None:
            self._end(mark)
        before, self.current = self.current, Pending(step, mark)
        self.round_peak = max(self.round_peak, memory.peak(self.device))
        memory.start_step(self.device)
        return before

    def pause(self) -> None:
        """The current step ends here: until the next `start`, time and memory count for the round but for no step."""
        if self.current is not None:
            self._end(marks.mark(self.device))
        memory.start_step(self.device)

    def settle(self, before: Optional[Pending]) -> None:
        """End the current step here, and write it, `before` and all that waits: what a checkpoint holds is in the file."""
        self.pause()
        self.finish(before, last=False)
        self.finish(self.current, last=True)
        self.current = None

    def _end(self, mark: Any) -> None:
        step = self.current
        assert step is not None
        step.end, step.ready = mark, (step.mark, mark)
        step.peak = max(self.floor, memory.peak(self.device))
        self.step_peak = max(self.step_peak, step.peak)
        self.round_peak = max(self.round_peak, step.peak)

    def results(
        self, loss: torch.Tensor, grad_norm: torch.Tensor, data_s: float, more: Optional[torch.Tensor] = None
    ) -> None:
        """Loss (this rank's mean), gradient norm and what `more` names, copied to the host without waiting."""
        assert self.current is not None
        self.current.data_s = data_s
        values = torch.stack([loss.detach().double(), grad_norm.detach().double()])
        if more is not None:
            values = torch.cat((values, more.detach().double()))
        if self.device.type == "cuda":
            self.buffers = self.buffers or [torch.empty_like(values, device="cpu", pin_memory=True) for _ in range(2)]
            self.buffers.reverse()  # the other one may not have been read yet
            self.current.host = self.buffers[0]
            self.current.host.copy_(values, non_blocking=True)
        else:
            self.current.host = values

    def finish(self, before: Optional[Pending], last: bool) -> None:
        """Read a finished step, and gather and write what is due. Raises NonFinite on every rank alike."""
        if before is not None:
            begin, end = before.ready
            if self.device.type == "cuda":
                end.synchronize()  # the next step is already queued behind this point
            seconds = marks.seconds(begin, end)
            assert before.host is not None
            loss, norm, *more = before.host.tolist()
            self.slowest = max(self.slowest, seconds)
            self.waiting.append(
                {
                    "step": before.step,
                    "seconds": seconds,
                    "data": before.data_s,
                    "peak": before.peak,
                    "loss": loss,
                    "norm": norm,
                    "weight": self.loss_weight,
                    **dict(zip(self.more, more, strict=True)),
                }
            )
        if self.waiting and (last or len(self.waiting) >= self.interval):
            self._flush()

    def _flush(self) -> None:
        """One gather for all steps since the last one."""
        keys = ("seconds", "data", "peak", "loss", "norm", "weight", *self.more)
        mine = torch.tensor([[w[k] for k in keys] for w in self.waiting], dtype=torch.float64)
        if self.world > 1:
            every = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(every, mine, group=self.group)
            table = torch.stack(every)  # [world, steps, keys]
        else:
            table = mine[None]
        steps = [int(w["step"]) for w in self.waiting]
        self.waiting.clear()
        slowest = table[:, :, 0].max(dim=0).values.tolist()
        # a gather costs the host 0.1 to 1 ms: at most four a second, the same number on every rank
        self.interval = max(1, min(100, int(0.25 / max(slowest[-1], 1e-6))))
        for i, step in enumerate(steps):
            row = table[:, i]
            self._check(step, row)
            if self.path is not None:
                self._write(step, slowest[i], row)

    def _check(self, step: int, row: torch.Tensor) -> None:
        for name, column in (("loss", 3), ("gradient norm", 4)):
            bad = (~row[:, column].isfinite()).nonzero().flatten().tolist()
            if bad:  # the norm is of the reduced gradient, so it is bad everywhere, whoever spoiled it
                where = "on every rank" if column == 4 and len(bad) == self.world > 1 else f"first on rank {bad[0]}"
                raise NonFinite(f"non-finite {name} at step {step}, {where}")

    def _write(self, step: int, seconds: float, row: torch.Tensor) -> None:
        rate = self.tokens_per_step / seconds
        per_device = rate / self.world
        line: dict[str, float] = {
            "step": step,
            "time/step": seconds,
            "time/data": float(row[:, 1].max()),
            "perf/throughput": rate,
            "perf/tokens_per_s_per_gpu": per_device,
            "perf/peak_memory": float(row[:, 2].max()),
            "loss": float((row[:, 3] * row[:, 5]).sum() / row[:, 5].sum()),
            "grad_norm": float(row[:, 4].max()),
        }
        line |= {name: float(row[:, 6 + i].max()) for i, name in enumerate(self.more)}
        if self.peak_flops:
            for key, flops in self.flops_per_token.items():
                line[f"perf/{key}"] = 100 * per_device * flops / self.peak_flops
        if self.extra is not None:
            line |= self.extra(step)
        assert self.path is not None and all(math.isfinite(v) for v in line.values())
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        self.last = line
