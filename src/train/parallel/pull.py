"""zero2's two exchanges by `Peers`: gradients to their owners, and weights back, each rank copying what it needs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from train.parallel.bucket import Bucket
from train.parallel.dims import Dims
from train.parallel.lane import IN_FLIGHT
from train.parallel.peers import COMMUNICATION, WEIGHTS, Peers

KINDS = 3
READY, TAKEN, UPDATED = range(KINDS)  # what ranks say, once a bucket or, of weights, once a call
SLOTS = IN_FLIGHT + 1  # buffers of packed gradients: what the lane holds, and the one that is packed


class Pull:
    """Call in this order: `buffer` for every bucket, `stage` once, and then `slot` (on the compute stream), `exchange` (on the
    lane) for each bucket of a step, and `gather` (on the lane). A rank may change its weights after a step's exchanges: the
    others say READY behind their copies of the last ones. Outside of a step `meet` comes first."""

    def __init__(self, dims: Dims, group: Any) -> None:
        """Collective. Raises ConfigError as `Peers` does."""
        self._peers = peers = Peers(dims, group, KINDS)
        # each link has one reader at a time
        self._others = [(peers.rank + i) % peers.world for i in range(1, peers.world)]
        self._weights: dict[int, list[Tensor]] = {}
        self._slots: list[list[Tensor]] = []
        self._count = 0  # buckets exchanged so far

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros for a bucket's weights. Collective."""
        seen = self._peers.empty(numel, dtype, WEIGHTS)
        own = seen[self._peers.rank].zero_()
        self._weights[own.data_ptr()] = seen
        return own

    def stage(self, buckets: Sequence[Bucket]) -> None:
        """Make the slots. Collective."""
        largest = max(b.weight.nbytes for b in buckets)
        self._slots = [self._peers.empty(largest, torch.uint8, COMMUNICATION) for _ in range(SLOTS)]
        self._peers.meet()

    def _slot(self, rank: int, bucket: Bucket) -> Tensor:
        slot = self._slots[self._count % SLOTS][rank]
        return slot[: bucket.weight.nbytes].view(bucket.dtype)

    def slot(self, bucket: Bucket) -> Tensor:
        """Where the bucket's gradients are to be packed: what was there has been taken by all others. (What this rank itself
        still adds up from it, `Lane.hold` waits for.)"""
        self._peers.wait(TAKEN, max(0, self._count - SLOTS + 1))
        return self._slot(self._peers.rank, bucket)

    def exchange(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """All other ranks' gradients of this rank's slice, [ranks, shard] without its own, and these, [shard]."""
        self._peers.say(READY)
        self._peers.wait(READY)
        mine = slice(self._peers.rank * bucket.shard, (self._peers.rank + 1) * bucket.shard)
        found = bucket.weight.new_empty(self._peers.world, bucket.shard)
        for r in self._others:
            found[r].copy_(self._slot(r, bucket)[mine])
        self._peers.say(TAKEN)
        own = self._slot(self._peers.rank, bucket)[mine]
        self._count += 1
        return found, own

    def gather(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """The other ranks' slices of the buckets' weights; yields when a bucket's have been asked for."""
        self._peers.say(UPDATED)
        self._peers.wait(UPDATED)
        for bucket in buckets:
            seen = self._weights[bucket.weight.data_ptr()]
            for r in self._others:
                theirs = slice(r * bucket.shard, (r + 1) * bucket.shard)
                bucket.weight[theirs].copy_(seen[r][theirs])
            yield None

    def meet(self) -> None:
        """No other rank still reads this one's memory. Collective."""
        self._peers.meet()
