"""Updated weights from their owners to every rank, beside the next forward."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from train.parallel import collectives
from train.parallel.bucket import Bucket
from train.parallel.lane import Lane
from train.parallel.traffic import Meter


class WeightGather:
    """Gathers started at the end of a step are waited for as late as the next forward allows: at a block (an element of
    `model.layers`) for the buckets that hold its parameters, at the model for the buckets of all other parameters.

    `buckets` is the order in which they are needed: start gathers in this order.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        lane: Lane,
        meter: Meter,
        group: Any = None,
        pull: Callable[[Sequence[Bucket]], Iterator[Any]] | None = None,
    ) -> None:
        """`pull`: in the all-gather's place, what gets buckets' weights from other ranks; yields when each has been issued."""
        self._pull = pull
        self._lane, self._meter, self._group = lane, meter, group
        self._pending: dict[Bucket, Any] = {}
        blocks = list(getattr(model, "layers", ()))
        inside = {p: i for i, block in enumerate(blocks) for p in block.parameters()}
        rest = len(blocks)
        needs: list[list[Bucket]] = [[] for _ in range(rest + 1)]
        for bucket in reversed(buckets):
            for i in {inside.get(slot.parameter, rest) for slot in bucket.slots}:
                needs[i].append(bucket)
        # those that the model itself waits for come first; the others in forward order
        self.buckets = [*needs[rest], *(b for b in reversed(buckets) if b not in needs[rest])]
        self._hooks = [
            module.register_forward_pre_hook(self._hook(need))
            for module, need in zip([*blocks, model], needs, strict=True)
        ]

    def _hook(self, needed: list[Bucket]) -> Callable[..., None]:
        @torch.compiler.disable  # a compiled block then runs the hook outside of its graph
        def weights_are_needed(*_: Any) -> None:
            self.finish(needed)

        return weights_are_needed

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Send this rank's slices, as compute has updated them so far, and receive the others'."""
        with self._lane.beside():
            for bucket, work in zip(buckets, (self._pull or self._all_gather)(buckets), strict=True):
                self._meter.sent("all_gather", bucket.own.nbytes * (bucket.world - 1))
                self._pending[bucket] = self._lane.ticket(work)

    def _all_gather(self, buckets: Sequence[Bucket]) -> Iterator[Any]:
        for bucket in buckets:
            yield collectives.all_gather(bucket.weight, bucket.own, group=self._group, async_op=True)

    def finish(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Compute that follows finds the weights of `buckets` (of all, by default) whole."""
        tickets = [self._pending.pop(b) for b in (self.buckets if buckets is None else buckets) if b in self._pending]
        if tickets:
            self._lane.redeem(tickets, "all_gather")

    def close(self) -> None:
        """Wait for what is under way and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
