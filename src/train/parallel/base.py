"""What the training loop sees of any reduction."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from train.parallel.adamw import AdamW
from train.parallel.traffic import Meter


class DataParallel(ABC):
    """A model whose gradients are averaged over ranks and whose weights AdamW updates.

    A step is `count` times (`with micro_step(i, count): (module(tokens, targets) / count).backward()`), then `step(lr)`.
    """

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
    def step(self, lr: float) -> Tensor:
        """Reduce, clip, update, hand weights back; gradients are cleared. No host synchronisation on a GPU.

        Returns the norm of the averaged gradient before clipping: 0-dim, on the device, in the masters' dtype.
        """

    @abstractmethod
    def full(self, kind: str = "weight") -> dict[str, Tensor]:
        """Copies of master weights (or "exp_avg", "exp_avg_sq") by parameter name, gathered whole on every rank. Collective."""

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
        for name, tensor in own.items():
            have, want = list(state[name].shape), list(tensor.shape)
            if have != want:
                raise ValueError(f"checkpoint of another layout: {name} has shape {have}, not {want}")
            tensor.copy_(state[name])
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
