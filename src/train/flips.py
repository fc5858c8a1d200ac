"""Bits that flip where hardware would flip them: in a weight, a gradient or a copy on the wire. For tests alone."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from train import seeds
from train.faults import Fault
from train.parallel import collectives
from train.parallel.base import DataParallel

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element in place."""
    bits = tensor.view(-1).view(_BITS[tensor.element_size()])
    width = 8 * tensor.element_size()
    mask = 1 << bit % width
    bits[element] ^= mask - (1 << width) if bit % width == width - 1 else mask  # the sign bit as a signed number


class Flips:
    """One fault of kind `faults.FLIPS`, at home in a rank. `armed` tells it that this pass is the one to spoil."""

    def __init__(self, fault: Fault, rank: int, seed: int) -> None:
        self.fault, self.rank, self.seed = fault, rank, seed
        self.armed = False
        self.step = -1
        self.done = False

    def _strikes(self, kind: str) -> bool:
        due = self.fault.kind == kind and self.fault.on(self.rank) and self.step == self.fault.step
        return due and not self.done and (self.armed or kind == "nondeterministic")

    def start(self, step: int) -> None:
        """A step starts."""
        self.step, self.done = step, False

    def hook(self, model: nn.Module) -> None:
        """Spoil one gradient as backward makes it. Before the reduction takes the parameters over."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        name, parameter = named[seeds.derive(self.seed, "fault") % len(named)]

        def spoil(p: Tensor) -> None:
            assert p.grad is not None
            if self._strikes("bitflip_grad"):
                self._flip(p.grad, f"{name}.grad")
            elif self._strikes("nondeterministic"):  # as a kernel that adds in another order every time
                self._flip(p.grad, f"{name}.grad", int.from_bytes(os.urandom(8)))

        parameter.register_post_accumulate_grad_hook(spoil)

    def wire(self) -> None:
        """Spoil what this rank receives in an all-to-all."""
        if self.fault.kind == "bitflip_wire":
            collectives.all_to_all = self._spoiled(collectives.all_to_all)

    def _spoiled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            return _Spoiled(real(output, *args, **kwargs), lambda: self._received(output))

        return all_to_all

    def _received(self, output: Tensor) -> None:
        if self._strikes("bitflip_wire"):
            used = output.view(-1).nonzero().view(-1)  # not in the zeros between parameters
            self._flip(output, "received gradients", int(used[seeds.derive(self.seed, "element") % len(used)]))

    def after(self, dp: DataParallel) -> None:
        """Spoil one weight in memory, between its update and the end of the step."""
        if self._strikes("bitflip_weight"):
            dp.settle()
            items = [(n, t) for n, t in dp.shard_items() if n.endswith(".weight")]
            name, tensor = items[seeds.derive(self.seed, "fault") % len(items)]
            self._flip(tensor, name)

    def _flip(self, tensor: Tensor, name: str, drawn: int | None = None) -> None:
        number = seeds.derive(self.seed, "element") if drawn is None else drawn
        element = number % tensor.numel()
        flip(tensor, element, self.fault.bit)
        self.done = True
        print(f"fault: flipped bit {self.fault.bit} of element {element} of {name} at step {self.step}", flush=True)


class _Spoiled:
    """A work handle that spoils what has arrived."""

    def __init__(self, work: Any, spoil: Callable[[], None]) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> None:
        self._work.wait()
        self._spoil()
