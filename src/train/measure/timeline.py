"""When a rank of a pipeline computed what: the schedule as executed, and the share of a step in which the rank was idle.

Around every stage's forward and backward two marks are taken, events on the stream of a GPU, so that the host never waits;
between them counts as busy, collectives of tp and fsdp inside a layer included. What is not busy is the bubble: waiting for a
neighbour, sending, receiving.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from train.measure import marks
from train.parallel.dims import Dims
from train.parallel.stages import Action, Plan, idle

KEPT = 64  # steps, the newest


@dataclass
class Step:
    """Marks of one step, read once they are there."""

    begin: Any
    end: Any = None
    actions: list[tuple[Action, Any, Any]] = field(default_factory=list)


class Timeline:
    """Of one rank. `with step(): ... with action(...): ...`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[Step] = deque(maxlen=KEPT)
        self.align: Any = None  # a group whose ranks begin every step together, for a picture

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a schedule."""
        if self.align is not None:
            dist.barrier(group=self.align)
        self._steps.append(Step(marks.mark(self._device)))
        yield
        self._steps[-1].end = marks.mark(self._device)

    @contextmanager
    def action(self, stage: int, micro_batch: int, kind: str) -> Iterator[None]:
        """Around what a stage computes for a micro-batch; inside `step`."""
        begin = marks.mark(self._device)
        yield
        self._steps[-1].actions.append((Action(stage, micro_batch, kind), begin, marks.mark(self._device)))

    def read(self) -> list[tuple[float, list[tuple[Action, float, float]]]]:
        """Of every kept step: (its seconds, [(action, begin, end)] in seconds since it began). Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        found = []
        for step in self._steps:
            since = [(a, marks.seconds(step.begin, b), marks.seconds(step.begin, e)) for a, b, e in step.actions]
            found.append((marks.seconds(step.begin, step.end), since))
        return found


def report(timeline: Timeline, plan: Plan, dims: Dims, group: Any) -> dict[str, Any] | None:
    """What happened in the pipelines of all ranks, the same on each of them; None without a step. Collective over all ranks;
    `group`: theirs for host tensors, or None.

    {"schedule", "micro_batches", "split": layers of each stage, "virtual", "rank_stages": stages of each rank, "rank_idle":
    idle share of each rank, "idle": their mean, "rank_idle_theory" and "idle_theory": the same for the executed order with
    equal stages and nothing but compute, "executed": the last step of rank 0's pipeline}

    A rank is idle while it computes nothing between the begin of a step and the end of the schedule on the last of its
    pipeline's ranks; the median over the second half of the steps.
    """
    steps = timeline.read()
    if not steps:  # gone on from a checkpoint of the last step
        return None
    steps = steps[len(steps) // 2 :]
    seconds = [whole for whole, _ in steps]
    busy = [sum(end - begin for _, begin, end in actions) for _, actions in steps]
    mine = {"pp": dims.index("pp"), "seconds": seconds, "busy": busy, "last": steps[-1][1]}
    every: list[Any] = [None] * dims.world
    dist.all_gather_object(every, mine, group=group)
    stride = dims.world // plan.pp  # pp is the outermost dimension
    pipelines = [[every[place * stride + column] for place in range(plan.pp)] for column in range(stride)]
    shares: list[float] = [0.0] * dims.world
    for column, ranks in enumerate(pipelines):
        window = [max(parts) for parts in zip(*(r["seconds"] for r in ranks), strict=True)]
        for place, r in enumerate(ranks):
            shares[place * stride + column] = median(1 - b / w for b, w in zip(r["busy"], window, strict=True))
    orders = [[action for action, _, _ in r["last"]] for r in pipelines[0]]
    theory = idle(orders, plan.stages)
    executed = [
        {"rank": place * stride, "actions": [[*a, round(begin, 7), round(end, 7)] for a, begin, end in r["last"]]}
        for place, r in enumerate(pipelines[0])
    ]
    return {
        "schedule": plan.name,
        "micro_batches": 1 + max(action.micro_batch for action in orders[0]),
        "virtual": plan.virtual,
        "split": list(plan.split),
        "rank_stages": [plan.of_rank(each["pp"]) for each in every],
        "rank_idle": shares,
        "idle": sum(shares) / len(shares),
        "rank_idle_theory": [theory[each["pp"]] for each in every],
        "idle_theory": sum(theory) / len(theory),
        "executed": {"seconds": max(r["seconds"][-1] for r in pipelines[0]), "ranks": executed},
    }
