"""What the training loop sees of any reduction."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from train.parallel import expert, tensor
from train.parallel.adamw import AdamW, norms
from train.parallel.dims import Dims
from train.parallel.traffic import Meter

Norms = Callable[[Sequence[Tensor], torch.device], Tensor]  # 2-norm of each tensor, [number of them] fp64


class DataParallel(ABC):
    """A model whose gradients are averaged over ranks and whose weights AdamW updates.

    A step is `count` times (`with micro_step(i, count): (module(tokens, targets) / count).backward()`), then `step(lr)`.
    """

    _dims: Dims
    module: Callable[..., Any]  # what the loop calls: the model itself or a wrapper of it
    meter: Meter
    _next_lr: float | None = None

    @abstractmethod
    def micro_step(self, index: int, count: int) -> AbstractContextManager[None]:
        """Around forward and backward of micro-batch `index` of `count` in a step."""

    def announce(self, lr: float) -> None:
        """What the coming `step` will be called with, for optimizers that update in backward."""
        self._next_lr = lr

    @abstractmethod
    def step(self, lr: float | Tensor) -> Tensor:
        """Reduce, clip, update, hand weights back; gradients are cleared. No host synchronisation on a GPU.

        `lr`: a number; where a step is captured (parallel/graph.py) 0-dim fp32 on the device.

        Returns the norm of the averaged gradient before clipping: 0-dim, on the device, in the masters' dtype.
        """

    @abstractmethod
    def unsharded(self, kind: str) -> dict[str, Tensor]:
        """Copies of what the ranks that share this one's weights have together, by parameter name. Collective."""

    def full(self, kind: str = "weight") -> dict[str, Tensor]:
        """Copies of master weights (or "exp_avg", "exp_avg_sq") by parameter name, gathered whole on every rank. Collective."""
        whole = {}
        for name, part in self.unsharded(kind).items():
            of_experts = expert.is_expert(name)
            whole[name] = expert.assemble(part, self._dims) if of_experts else tensor.assemble(name, part, self._dims)
        return self._dims.union_over_pp(whole)

    def full_weights(self) -> dict[str, Tensor]:
        """Master weights by parameter name, gathered whole on every rank."""
        return self.full("weight")

    @abstractmethod
    def owners(self) -> list[AdamW]:
        """The optimizers of what this rank owns, in a stable order."""

    @abstractmethod
    def publish(self) -> None:
        """Make the model's weights follow the masters after these were changed from outside. Collective."""

    def settle(self) -> None:  # noqa: B027  # most reductions leave nothing
        """Wait for what the last step left under way: afterwards the masters may be changed."""

    def shard_items(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shard of master weights and optimizer state, live tensors, in a stable order.

        Names: "<parameter>.weight", "<parameter>.exp_avg", "<parameter>.exp_avg_sq", "<parameter>.step".
        """
        for owner in self.owners():
            yield from owner.items()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shard as plain tensors by the names of `shard_items`; the tensors are live."""
        return dict(self.shard_items())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` of the same rank and layout gave. Collective.

        Raises ValueError on other names or shapes.
        """
        own = self.state_dict()
        if differ := sorted(set(own) ^ set(state)):
            raise ValueError(
                f"checkpoint of another layout: {differ[0]} is on one side only ({len(differ)} such names)"
            )
        self.settle()
        for name, live in own.items():
            have, want = list(state[name].shape), list(live.shape)
            if have != want:
                raise ValueError(f"checkpoint of another layout: {name} has shape {have}, not {want}")
            live.copy_(state[name])
        self.publish()

    def traffic(self) -> dict[str, Any]:
        """See `Meter.report`."""
        return self.meter.report()

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, remove hooks and wrappers; the model keeps its weights."""


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) in registration order; a tied parameter once, under its first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]


class GradNorm:
    """2-norm of a gradient whose pieces lie on the ranks of an island; gradients that tp ranks have parts of are added up."""

    def __init__(self, dims: Dims, names: Sequence[str], sharded: bool) -> None:
        """`names`: of the parameters, in the order of the gradients; `sharded`: over dp_shard x cp, by the reduction."""
        self._dims = dims
        apart = [expert.apart(name, dims) for name in names]
        cut = [
            each or dims.size("tp") == 1 or tensor.cut_dim(n) is not None for n, each in zip(names, apart, strict=True)
        ]
        self._partial = [i for i, each in enumerate(cut) if not each]
        of_expert = 1 if sharded else 1 / dims.size("expert_shard")
        shares = [of_expert if a else 1 / dims.copies(c, sharded) for a, c in zip(apart, cut, strict=True)]
        self._shares = torch.tensor(shares, dtype=torch.float64, device=dims.device)

    def __call__(self, grads: Sequence[Tensor], norms: Norms = norms) -> Tensor:
        """0-dim fp64, the same bits on all ranks of an island. Collective; `grads` are completed in place."""
        self._dims.sum_over_tp([grads[i] for i in self._partial])
        squares = norms(grads, self._dims.device).to(self._dims.device).square()
        return self._dims.total((squares * self._shares).sum()).sqrt()
