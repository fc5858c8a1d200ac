"""ZeRO-2 (Rajbhandari et al. 2020, arXiv 1910.02054): every rank owns a slice of gradients, masters and optimizer state.

zero2 and zero2o only *copy* between ranks: all-to-all hands every owner the others' copies of its slice, and it adds them
itself, in rank order, in fp32. Sums then depend neither on the backend's algorithm nor on buckets or on when they are
issued. zero2rs leaves the sum, in the gradients' dtype, to the backend's reduce-scatter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train import config
from train.kernels import ordered
from train.memory.host import HostOptimizer
from train.memory.optimizer import Optimizers
from train.parallel import collectives
from train.parallel.adamw import AdamW, clip_scale, norms
from train.parallel.base import DataParallel, trainable
from train.parallel.bucket import Bucket, make_buckets
from train.parallel.dims import REDUCE, Dims
from train.parallel.gather import WeightGather
from train.parallel.lane import Lane
from train.parallel.pull import Pull

UPDATE_BYTES = 64 << 20  # master weights updated by one optimizer call, between whose gathers others are updated


class Zero2(DataParallel):
    """`reduction.name`: zero2 issues all buckets after backward, zero2o and zero2rs each as its last gradient is in."""

    def __init__(self, model: nn.Module, cfg: config.Train, dims: Dims) -> None:
        self.module = model
        device, world, rank, group = dims.device, dims.size(*REDUCE), dims.index(*REDUCE), dims.group(*REDUCE)
        self.meter = dims.meter
        self._dims, self._world, self._device, self._optim, self._group = dims, world, device, cfg.optim, group
        self._collective = "reduce_scatter" if cfg.reduction.name == "zero2rs" else "all_to_all"
        self._every = cfg.reduction.accumulate == "every"
        optimizers = Optimizers(cfg, device)
        self._pull = Pull(dims, group) if cfg.reduction.transport == "peer" else None
        self._buckets = make_buckets(
            trainable(model), cfg.reduction.bucket_mib or 25, world, rank, optimizers.master,
            self._pull.buffer if self._pull else None,
        )  # fmt: skip
        if self._pull:
            self._pull.stage(self._buckets)
        self._lane = Lane(device, self.meter)
        pull = self._pull.gather if self._pull else None
        self._gather = WeightGather(model, self._buckets, self._lane, self.meter, group, pull)
        self._updates = [_Update(part, optimizers) for part in _groups(self._gather.buckets)]
        self._queue: list[tuple[Bucket, Any, Tensor]] = []  # issued and not yet summed (CPU)
        self._missing = [0] * len(self._buckets)  # gradients that a bucket still waits for in this micro-batch
        self._next = 0  # buckets are issued in this one order on every rank, whatever the order of their gradients
        self._reducing = False
        self._hooks = []
        if cfg.reduction.name != "zero2":
            for index, bucket in enumerate(self._buckets):
                for slot in bucket.slots:
                    self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_in(_: Tensor) -> None:
            if not self._reducing:
                return
            if index < self._next:
                raise RuntimeError("a parameter got a second gradient after its bucket was issued: backward ran twice")
            self._missing[index] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._issue()

        return gradient_is_in

    @contextmanager
    def micro_step(self, index: int, count: int) -> Iterator[None]:
        self._reducing = self._every or index == count - 1
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._next = 0
        yield
        while self._reducing and self._next < len(
            self._buckets
        ):  # zero2; and buckets with parameters without a gradient
            self._issue()
        self._reducing = False

    @torch.no_grad()
    def _issue(self) -> None:
        """Send the next bucket's gradients to their owners."""
        bucket = self._buckets[self._next]
        self._next += 1
        slot = None
        if self._pull:
            with self.meter.waiting(self._collective):
                slot = self._pull.slot(bucket)
        sent = bucket.pack_grads(slot)
        self.meter.sent(self._collective, sent.nbytes * (self._world - 1) // self._world)
        with self._lane.beside():
            if self._pull:
                self._sum(bucket, *self._pull.exchange(bucket))
            else:
                self._send(bucket, sent)
        self._lane.hold(sent, self._collective)

    def _send(self, bucket: Bucket, sent: Tensor) -> None:
        """By a collective."""
        if self._collective == "reduce_scatter":
            received = sent.new_empty(1, bucket.shard)
            work = collectives.reduce_scatter(received.view(-1), sent, group=self._group, async_op=True)
        else:
            received = sent.new_empty(self._world, bucket.shard)
            work = collectives.all_to_all(received.view(-1), sent, group=self._group, async_op=True)
        if self._lane.asynchronous:
            work.wait()  # the lane waits, not the host
            self._sum(bucket, received)
        else:
            self._queue.append((bucket, work, received))

    def _sum(self, bucket: Bucket, received: Tensor, own: Tensor | None = None) -> None:
        """Add the ranks' copies of the own slice, [ranks, shard], in rank order in the master's dtype; `own`, if that row is
        elsewhere."""
        elsewhere = None if own is None else (bucket.rank, own)
        bucket.grad = ordered.add_up(received, bucket.grad, bucket.master.dtype, elsewhere)

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> Tensor:
        self._gather.finish()  # of a block that this step's forward left out
        for bucket, work, received in self._queue:
            self._lane.redeem([work], self._collective)
            self._sum(bucket, received)
        self._queue.clear()
        self._lane.join(self._collective)
        norm = self._norm() / self._world
        scale = clip_scale(norm, self._optim.clip_norm, self._world)
        for update in self._updates:
            if isinstance(update.owner, HostOptimizer):
                update.run(scale, lr)  # all of them travel and are updated while the first ones are waited for
        for update in self._updates:
            if isinstance(update.owner, HostOptimizer):
                update.owner.finish()
            else:
                update.run(scale, lr)
            self._gather.start(update.buckets)
        self.meter.end_step()
        return norm.to(self._buckets[0].master.dtype)

    def _norm(self) -> Tensor:
        """2-norm of the summed gradient, fp64: sums of squares of the owners' slices, added in rank order."""
        own = norms([b.grad for b in self._buckets if b.grad is not None], self._device).square().sum().view(1)
        parts = own.new_empty(self._world)
        with self.meter.waiting("norm"):
            collectives.all_gather(parts, own, group=self._group)
        return parts.sum().sqrt()

    @torch.no_grad()
    def unsharded(self, kind: str) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for update in self._updates:
            for bucket in update.buckets:
                shard = torch.zeros_like(bucket.own, dtype=bucket.master.dtype)
                for (_, low, high), piece in zip(bucket.owned(), update.pieces[bucket], strict=True):
                    shard[low:high] = update.owner.state(piece, kind)
                shards = shard.new_empty(self._world * bucket.shard)
                collectives.all_gather(shards, shard, group=self._group)
                whole.update(bucket.gathered(shards))
        return whole

    def owners(self) -> list[AdamW]:
        return [update.owner for update in self._updates]

    @torch.no_grad()
    def publish(self) -> None:
        for update in self._updates:
            update.publish()
        self._gather.start(self._gather.buckets)

    def settle(self) -> None:
        self._gather.finish()
        if self._pull:
            self._pull.meet()

    def close(self) -> None:
        self._gather.close()
        if self._pull:
            self._pull.meet()
        for hook in self._hooks:
            hook.remove()


class _Update:
    """AdamW of some buckets' masters in one call."""

    def __init__(self, buckets: list[Bucket], optimizers: Optimizers) -> None:
        self.buckets = buckets
        self.pieces = {bucket: bucket.pieces() for bucket in buckets}
        pieces = [piece for bucket in buckets for piece in self.pieces[bucket]]
        self.owner = optimizers.make(pieces, [b.own[low:high] for b in buckets for _, low, high in b.owned()])

    def run(self, scale: Tensor, lr: float | Tensor) -> None:
        grads = [grad for bucket in self.buckets for grad in bucket.grad_pieces()]
        self.owner.step(grads, scale.to(self.buckets[0].master.dtype), lr)
        for bucket in self.buckets:
            bucket.grad = None
        if not isinstance(self.owner, HostOptimizer) and not self.owner.fused:  # those send the weights themselves
            self.publish()

    def publish(self) -> None:
        """Round the masters into the own slices of the weights."""
        rounded = [b for b in self.buckets if b.master is not b.own]
        if rounded:
            torch._foreach_copy_([b.own for b in rounded], [b.master for b in rounded])


def _groups(buckets: list[Bucket]) -> Iterator[list[Bucket]]:
    """Consecutive buckets of one dtype, each run of about UPDATE_BYTES of this rank's master weights."""
    group: list[Bucket] = []
    for bucket in buckets:
        if group and (sum(b.master.nbytes for b in group) >= UPDATE_BYTES or bucket.dtype != group[0].dtype):
            yield group
            group = []
        group.append(bucket)
    if group:
        yield group
