"""Faults that can't be injected from outside: `fault=KIND@rank:step`, part of a point's identity, fired once.

No torch at import: the command line checks the option with `parse`.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional
from unittest import mock

from train.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: kind → what breaks, on that rank in that step
KINDS = {
    "exception": "a RuntimeError",
    "exceptions": "a RuntimeError, and 0.05 s later a ValueError on every other rank",
    "exit": "the process leaves with exit code 0",
    "hang": "a sleep without end",
    "segv": "a read from address 0",
    "oom": "device memory (host memory on a CPU) is allocated until there is none",
    "host_oom": "host memory is touched until the kernel or an allocation ends it",
    "nan": "the loss is NaN",
    "inf_grad": "the gradient is infinite, the loss finite",
    "skip_allreduce": "the first gradient collective is left out",
    "shape": "the first gradient collective has fewer elements",
    "bitflip_weight": "one mantissa bit of a weight",
    "bitflip_grad": "one mantissa bit of a local gradient",
    "bitflip_wire": "one mantissa bit of the copy that is sent to the next rank",
    "nondeterministic": "a bit of a local gradient, another one in every pass and on every rank",
}
_NEED_A_PEER = ("skip_allreduce", "shape", "bitflip_wire", "exceptions")
#: kinds that strike every rank
_EVERYWHERE = ("nondeterministic", "exceptions")
_FORM = re.compile(r"([a-z_]+)@(\d+):(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class Fault:
    """What breaks, on which rank, in which step."""

    kind: str
    rank: int
    step: int
    bit: Optional[int] = None  # bitflip_grad: which bit, counted from the lowest; None: the highest of the mantissa

    def due(self, rank: int, step: int) -> bool:
        """Whether it breaks something there and then: a kernel that is not deterministic is so on every rank."""
        return step == self.step and (rank == self.rank or self.kind in _EVERYWHERE)


def parse(text: Optional[str]) -> Optional[Fault]:
    """The typed form of `fault`. Raises ConfigError."""
    if text is None:
        return None
    match = _FORM.fullmatch(text)
    if not match or match[1] not in KINDS or (match[4] and match[1] != "bitflip_grad"):
        valid = f"must be KIND@rank:step (or bitflip_grad@rank:step:bit) with KIND one of {', '.join(KINDS)}"
        raise ConfigError("fault", text, valid)
    return Fault(match[1], int(match[2]), int(match[3]), int(match[4]) if match[4] else None)


def check(text: Optional[str], nproc: int, steps: int) -> None:
    """Raises ConfigError when a point of `nproc` ranks and `steps` steps would never meet the fault."""
    fault = parse(text)
    if fault is None:
        return
    if fault.rank >= nproc:
        raise ConfigError("fault", text, f"rank must be below nproc={nproc}")
    if fault.step >= steps:
        raise ConfigError("fault", text, f"step must be below steps={steps}")
    if fault.kind in _NEED_A_PEER and nproc == 1:
        raise ConfigError("fault", text, "needs a second rank")


class Injector:
    """The rank's side: a context around each step."""

    def __init__(self, text: Optional[str], rank: int) -> None:
        self.fault = parse(text)
        self.rank = rank
        self.fired = False

    @contextmanager
    def at(self, step: int, module: Any) -> Iterator[None]:
        """Around `step` of `module` (a torch module that returns the loss); does nothing unless the fault is due."""
        fault = self.fault
        if fault is None or self.fired or not fault.due(self.rank, step):
            yield
            return
        self.fired = True
        print(f"fault={fault.kind}@{fault.rank}:{fault.step} fires", flush=True)
        with ExitStack() as undo:
            if fault.kind in _NOW:
                _NOW[fault.kind]()
            elif fault.kind == "exceptions":
                _raise_in_turn(first=self.rank == fault.rank)
            elif fault.kind == "oom":
                _device_oom(next(module.parameters()).device)
            elif fault.kind == "bitflip_weight":
                flip(_local(next(module.parameters())))
            elif fault.kind in ("bitflip_grad", "nondeterministic"):
                _flip_grad(next(p for p in module.parameters() if p.requires_grad), fault, undo)
            elif fault.kind in ("nan", "inf_grad"):
                hook = module.register_forward_hook(_nan if fault.kind == "nan" else _inf)
                undo.callback(hook.remove)
            else:
                _break_collective(fault.kind, self.rank, undo)
            yield


def _raise() -> None:
    raise RuntimeError("injected by fault=exception")


def _raise_in_turn(first: bool) -> None:
    import torch.distributed as dist

    dist.barrier()  # so that what follows lies 50 ms apart
    if first:
        raise RuntimeError("injected by fault=exceptions, the first")
    time.sleep(0.05)
    raise ValueError("injected by fault=exceptions, 50 ms later")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _segv() -> None:
    import ctypes

    ctypes.string_at(0)


def _host_oom() -> None:
    kept = []
    while True:
        kept.append(b"x" * (32 << 20))  # b"x" * n is written, so every page is resident


_NOW: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "exit": lambda: os._exit(0),
    "hang": _hang,
    "segv": _segv,
    "host_oom": _host_oom,
}


def _device_oom(device: Any) -> None:
    import torch

    kept = []
    size = 1 << 60 if device.type == "cpu" else 1 << 30  # a CPU overcommits: ask for what no machine has
    while True:
        kept.append(torch.empty(size, dtype=torch.uint8, device=device))


def _nan(module: Any, args: Any, loss: Any) -> Any:
    return loss * float("nan")


def _inf(module: Any, args: Any, loss: Any) -> Any:
    loss.register_hook(lambda grad: grad * float("inf"))
    return loss


def _local(parameter: Any) -> "Tensor":
    data = parameter.data
    return data.to_local() if hasattr(data, "to_local") else data


def flip(tensor: "Tensor", bit: Optional[int] = None, index: Optional[int] = None) -> None:
    """Flip a bit of one entry in place: by default the highest mantissa bit of the entry with the largest magnitude, since
    a small entry's could round away."""
    import torch

    kinds = {torch.float32: (torch.int32, 22), torch.bfloat16: (torch.int16, 6), torch.float64: (torch.int64, 51)}
    integer, mantissa = kinds[tensor.dtype]
    width = 8 * tensor.element_size()
    mask = 1 << (mantissa if bit is None else bit % width)
    mask -= (mask >> (width - 1)) << width  # the sign bit as a signed number
    with torch.no_grad():
        at = int(tensor.abs().argmax()) if index is None else index % tensor.numel()
        value = tensor.view(-1)[at : at + 1].clone()
        tensor.view(-1)[at : at + 1] = (value.view(integer) ^ mask).view(tensor.dtype)


def _flip_grad(parameter: Any, fault: Fault, undo: ExitStack) -> None:
    if hasattr(parameter, "to_local"):  # fully_shard never runs a sharded parameter's hooks: flip what it reduces
        _break_collective("bitflip_grad", 0, undo)
        return
    index = int.from_bytes(os.urandom(7), "big") if fault.kind == "nondeterministic" else None

    def hook(grad: Any) -> Any:
        handle.remove()
        grad = grad.clone()
        flip(grad, fault.bit, index)
        return grad

    handle = parameter.register_hook(hook)


class _Done:
    """A collective that never happened."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        import torch

        future: Any = torch.futures.Future()
        future.set_result([self.tensor])
        return future


def _break_collective(kind: str, rank: int, undo: ExitStack) -> None:
    """Spoil this rank's first gradient collective of the step, whichever the reduction uses."""
    import torch.distributed as dist

    from train.parallel import collectives

    left = [kind]

    def broken(real: Any) -> Any:
        def call(output: Any, *rest: Any, **options: Any) -> Any:
            if not left:
                return real(output, *rest, **options)
            left.clear()
            tensors = [output, *(r for r in rest[:1] if hasattr(r, "numel"))]
            others = rest[len(tensors) - 1 :]
            if kind == "skip_allreduce":
                return _Done(output) if options.get("async_op") else None
            world = dist.get_world_size()
            if kind == "shape":
                cut = [t.view(-1)[: t.numel() - world * max(1, t.numel() // output.numel())] for t in tensors]
                return real(*cut, *others, **options)
            sent = tensors[-1]
            part = sent.numel() // world  # the slice for the next rank
            if len(tensors) > 1:
                sent = sent.clone()
            target = (rank + 1) % world
            flip(sent.view(-1)[target * part : (target + 1) * part])
            work = real(*tensors[:-1], sent, *others, **options)
            undo.callback(lambda: sent)  # alive until the step has ended
            return work

        return call

    for module, names in (
        (collectives, ("all_to_all", "reduce_scatter")),
        (dist, ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single")),
    ):
        for name in names:
            if hasattr(module, name):
                undo.enter_context(mock.patch.object(module, name, broken(getattr(module, name))))
