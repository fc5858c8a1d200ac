"""Where a rank's peak memory went: by kind, from torch's own record of one step's allocations.

The record of a late warm-up step is walked to its peak; what was alive there is told apart by address (weights, optimizer
state, gradients), by size (logits) and by the code that allocated it (communication). The rest are activations, with the
temporaries of kernels. On a CPU, which keeps no such record, only what tensors say is given.
"""

import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train import config
from train.measure import memory
from train.parallel.base import DataParallel

GIB = 2**30
STEP = 2  # the record is of this step (0-based; or of the last, in shorter runs): compiled, and every buffer is made
KINDS = ("weights", "gradients", "optimizer state", "activations", "logits", "communication", "fragmentation")
#: file of an allocating frame → kind; the first that is met from the innermost frame outwards
CODE = (
    ("parallel/bucket.py", "communication"),
    ("parallel/zero2.py", "communication"),
    ("fsdp/_fully_shard/", "communication"),
    ("distributed/distributed_c10d.py", "communication"),
    ("parallel/adamw.py", "optimizer state"),
    ("memory/streamed.py", "optimizer state"),
    ("optim/adamw.py", "optimizer state"),
)
FUNCTIONS = (
    ("parallel/zero2.py", "_sum", "gradients"),
    ("parallel/replicated.py", "run", "optimizer state"),
    ("parallel/ring.py", "__init__", "communication"),
)


@dataclass
class Known:
    """What is told apart by address or size."""

    fixed: list[tuple[int, int, str]] = field(default_factory=list)  # (address, end, kind), alive in every step
    gradients: list[tuple[int, float]] = field(default_factory=list)  # (address, µs of the clock of the record)
    logits: frozenset[int] = frozenset()  # sizes in bytes


class Breakdown:
    """Use `at(step)` around a step and `backward_done()` between its backward and its optimizer."""

    def __init__(self, cfg: config.Train, model: nn.Module, dp: DataParallel, device: torch.device, keep: Path) -> None:
        """`keep`: where memory.snapshot leaves the pickle."""
        self._model, self._dp, self._device, self._keep = model, dp, device, keep if cfg.memory.snapshot else None
        self._step = min(STEP, cfg.steps - 1)
        self._recording = False
        degrees = cfg.parallelism  # resolved: numbers
        tokens, vocab = cfg.micro_batch * cfg.seq_len // int(degrees.cp), cfg.model.vocab // int(degrees.tp)
        rows = {min(tokens, cfg.memory.lm_head_chunk or tokens), tokens % (cfg.memory.lm_head_chunk or tokens)} - {0}
        self._known = Known(logits=frozenset(r * vocab * size for r in rows for size in (2, 4, 8)))
        self.kinds: dict[str, float] = {}  # GiB

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Around step `step`; records if it is the one to record."""
        if step != self._step:
            yield
            return
        self._known.fixed = list(fixed(self._model, self._dp))
        self._recording = True
        if self._device.type != "cuda":
            yield
            self._recording = False
            return
        hooks = [p.register_hook(self._gradient) for p in self._model.parameters() if p.requires_grad]
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
        torch.cuda.memory._snapshot(self._device)  # leaves its mark in the record
        before = torch.cuda.memory._snapshot(self._device)
        try:
            yield
            torch.cuda.synchronize(self._device)
            snapshot: Any = torch.cuda.memory._snapshot(self._device)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False
            for hook in hooks:
                hook.remove()
        trace = since_mark(snapshot["device_traces"][self._device.index or 0])
        alive = [(b["address"], b["size"]) for s in before["segments"] for b in blocks(s) if "alloc" in b["state"]]
        found = by_kind(alive, trace, self._known)
        reserved = torch.cuda.max_memory_reserved(self._device)
        found["fragmentation"] = max(0, reserved - sum(found.values()))
        held = memory.held_outside()
        assert set(held) <= set(KINDS), held
        self.kinds = {kind: (found.get(kind, 0) + held.get(kind, 0)) / GIB for kind in KINDS}
        if self._keep is not None:
            with open(self._keep, "wb") as f:
                pickle.dump(snapshot, f)

    def _gradient(self, grad: Tensor) -> None:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        self._known.gradients.append((local.untyped_storage().data_ptr(), time.time() * 1e6))

    def backward_done(self) -> None:
        """The step's gradients are as the reduction left them."""
        if not self._recording:
            return
        for p in self._model.parameters():
            if p.grad is not None:
                self._gradient(p.grad)
        if self._device.type != "cuda":
            sizes = {kind: 0 for _, _, kind in self._known.fixed}
            for start, end, kind in self._known.fixed:
                sizes[kind] += end - start
            held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in self._held()}
            sizes["gradients"] = sum(held.values())
            self.kinds = {kind: size / GIB for kind, size in sizes.items() if size}

    def _held(self) -> Iterable[Tensor]:
        for p in self._model.parameters():
            if p.grad is not None:
                yield p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


def fixed(model: nn.Module, dp: DataParallel) -> Iterator[tuple[int, int, str]]:
    """(address, end, kind) of weights and optimizer state (masters too, where they are not the weights), each storage once."""
    seen: set[int] = set()
    device = next(model.parameters()).device
    tensors = [(p.detach(), "weights") for p in model.parameters()]
    tensors += [(t, "optimizer state") for _, t in dp.shard_items()]
    for tensor, kind in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if local.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), kind


def blocks(segment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The segment's blocks, each with its address."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address} | block
        address += block["size"]


def since_mark(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events after the second snapshot: what happened inside the step."""
    marks = [i for i, event in enumerate(trace) if event["action"] == "snapshot"]
    return trace[marks[1] + 1 if len(marks) > 1 else 0 :]


def by_kind(alive: list[tuple[int, int]], trace: list[dict[str, Any]], known: Known) -> dict[str, int]:
    """Bytes by kind at the trace's peak. `alive`: (address, size) of what was allocated when it began."""
    total = peak = sum(size for _, size in alive)
    sizes, top = dict(alive), -1
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= sizes.pop(event["addr"], 0)
        if total > peak:
            peak, top = total, index
    at = _alive_after(alive, trace[: top + 1])
    gradients = _gradient_events(trace, known.gradients)
    found: dict[str, int] = {}
    for address, (size, made, index) in at.items():
        kind = _kind(address, size, made, index in gradients, known)
        found[kind] = found.get(kind, 0) + size
    return found


def _alive_after(
    alive: list[tuple[int, int]], trace: list[dict[str, Any]]
) -> dict[int, tuple[int, dict[str, Any] | None, int]]:
    now: dict[int, tuple[int, dict[str, Any] | None, int]] = {a: (size, None, -1) for a, size in alive}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            now[event["addr"]] = event["size"], event, index
        elif event["action"] == "free_requested":
            now.pop(event["addr"], None)
    return now


def _gradient_events(trace: list[dict[str, Any]], seen: list[tuple[int, float]]) -> set[int]:
    """Indices of the allocations that held a gradient: the address's last one before the gradient was seen there."""
    made: dict[int, list[int]] = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            made.setdefault(event["addr"], []).append(index)
    found = set()
    for address, at in seen:
        before = [i for i in made.get(address, []) if trace[i].get("time_us", 0) <= at]
        if before:
            found.add(before[-1])
    return found


def _kind(address: int, size: int, event: dict[str, Any] | None, gradient: bool, known: Known) -> str:
    for start, end, kind in known.fixed:
        if start <= address < end:
            return kind
    if gradient or event is None and any(a == address for a, _ in known.gradients):
        return "gradients"
    if size in known.logits:
        return "logits"
    for frame in (event or {}).get("frames", ()):
        file = frame["filename"].replace("\\", "/")
        for part, function, kind in FUNCTIONS:
            if part in file and frame["name"].endswith(function):
                return kind
        for part, kind in CODE:
            if part in file:
                return kind
    return "activations"
