"""All state on every rank: ddp, and every reduction but fsdp on one rank, where nothing has to be reduced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train import config
from train.memory.host import HostOptimizer
from train.memory.optimizer import Optimizers
from train.parallel import expert
from train.parallel.adamw import AdamW, Piece, clip_scale, master_dtype, norms
from train.parallel.base import DataParallel, GradNorm, trainable
from train.parallel.dims import EXPERT_REDUCE, REDUCE, Dims

UPDATE_BYTES = 256 << 20  # fp32 copies of bf16 gradients alive at once: bounds the peak, still large for a kernel


class Replicated(DataParallel):
    """Every rank updates all weights with the same summed gradients."""

    def __init__(self, model: nn.Module, cfg: config.Train, dims: Dims) -> None:
        device, world_size = dims.device, dims.size(*REDUCE)
        group = dims.group(*REDUCE) if world_size > 1 else None
        self._dims, self._world, self._optim, self._device, self._group = dims, world_size, cfg.optim, device, group
        self._named = trainable(model)
        self._norm = GradNorm(dims, [name for name, _ in self._named], sharded=False)
        self._apart = [
            p for name, p in self._named if expert.apart(name, dims)
        ]  # reduced over other ranks than the rest
        self.meter = dims.meter
        optimizers = Optimizers(cfg, device)
        self._updates = [_Update(chunk, optimizers) for chunk in _chunks(self._named, optimizers.fused)]
        self._norms = self._updates[0].owner.norms if len(self._updates) == 1 else norms
        self._offloaded = [u.owner for u in self._updates if isinstance(u.owner, HostOptimizer)]
        self._last = True
        # a pipeline's schedule doesn't run all hooks of the parameters, which DDP lives on: reduced after the last micro-batch
        self._after = dims.size("pp") > 1
        self._bucket = int((cfg.reduction.bucket_mib or 25) * 2**20)
        if world_size == 1 and not self._after:  # DDP keeps gradients in its buckets until all ranks' are added up
            for update, owner in zip(self._updates, self._offloaded, strict=bool(self._offloaded)):
                for index, p in enumerate(update.parameters):
                    p.register_post_accumulate_grad_hook(self._deliver(owner, index))
        self._compute_done = self.meter.mark()
        self.module: Any = model
        if world_size > 1 and not self._after:
            # Dynamo would cut every compiled layer at DDP's bucket boundaries; a layer is one graph, and buckets leave between
            torch._dynamo.config.optimize_ddp = False
            # buffers are counts of a rank's own tokens, and what all ranks compute alike
            ignored = [name for name, _ in self._named if expert.apart(name, dims)] + [
                n for n, _ in model.named_buffers()
            ]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            self.module = DistributedDataParallel(
                model,
                process_group=group,
                device_ids=[device] if device.type == "cuda" else None,
                bucket_cap_mb=cfg.reduction.bucket_mib or 25,
                gradient_as_bucket_view=True,
            )
            self.module.register_comm_hook(None, self._all_reduce)

    def _all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Future of a GradBucket's sum over ranks; `step` divides, so that no pass over the gradients is spent on it."""
        buffer = bucket.buffer()
        # a ring sends every byte (w-1)/w times to reduce and as often to spread the result
        self.meter.sent("all_reduce", 2 * buffer.nbytes * (self._world - 1) // self._world)
        if bucket.is_last():
            self._compute_done = self.meter.mark()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    @contextmanager
    def micro_step(self, index: int, count: int) -> Iterator[None]:
        last = self._last = index == count - 1
        with nullcontext() if last or self._world == 1 else self.module.no_sync():
            yield
        if last and self._world > 1:  # backward returns once the last bucket is reduced
            self.meter.exposed("all_reduce", self._compute_done, self.meter.mark())

    def _reduce_in_buckets(self) -> None:
        """What DDP doesn't: a pipeline's gradients, and those of experts over the ranks that have the same ones. `step` divides
        all of them by the ranks with other rows or positions."""
        if self._after and self._world > 1:
            apart = set(self._apart)
            self._reduce([p for _, p in self._named if p not in apart], self._world, self._group)
        if self._apart and (size := self._dims.size(*EXPERT_REDUCE)) > 1:
            self._reduce(self._apart, size, self._dims.group(*EXPERT_REDUCE))

    def _reduce(self, parameters: list[nn.Parameter], size: int, group: Any) -> None:
        """Sums of gradients over `size` ranks, in place: in buckets, one on its way while the next is put together."""
        with self.meter.waiting("all_reduce"):
            sent: tuple[list[Tensor], Tensor, Any] | None = None
            for grads in [*_buckets([p.grad for p in parameters if p.grad is not None], self._bucket), None]:
                now = None
                if grads is not None:
                    flat = torch.cat([g.reshape(-1) for g in grads])
                    self.meter.sent("all_reduce", 2 * flat.nbytes * (size - 1) // size)
                    now = grads, flat, dist.all_reduce(flat, group=group, async_op=True)
                if sent is not None:
                    sent[2].wait()
                    parts = sent[1].split([g.numel() for g in sent[0]])
                    torch._foreach_copy_(sent[0], [part.view_as(g) for g, part in zip(sent[0], parts, strict=True)])
                sent = now

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> Tensor:
        for _, p in self._named if not self._offloaded or self._after else ():
            if p.grad is None:  # no gradient is a zero gradient: moments and weights decay as in the other reductions
                p.grad = torch.zeros_like(p)
        self._reduce_in_buckets()
        if self._offloaded:
            return self._offloaded_step(float(lr))
        # the list has no name: it would keep all gradients while the updates drop them one by one
        norm = self._norm([p.grad for _, p in self._named if p.grad is not None], self._norms) / self._world
        scale = clip_scale(norm, self._optim.clip_norm, self._world)
        for update in self._updates:
            update.run(scale, lr)
        self.meter.end_step()
        return norm.to(self._updates[0].dtype)

    def _offloaded_step(self, lr: float) -> Tensor:
        """The host's optimizers, most of which may have begun in backward."""
        for update in self._updates:
            update.send((1 / self._world, lr))
        square = 0.0
        for owner in self._offloaded:
            owner.finish()
            square += owner.square
        self._next_lr = None
        self.meter.end_step()
        mine = torch.tensor(square, dtype=torch.float64, device=self._device)
        total = self._dims.total(mine / self._dims.copies(cut=True, sharded=False))  # of all pipeline stages
        return total.sqrt().to(self._updates[0].dtype)

    def _deliver(self, owner: HostOptimizer, index: int) -> Callable[[Tensor], None]:
        def gradient_is_in(parameter: Tensor) -> None:
            assert parameter.grad is not None
            now = self._last and self._next_lr is not None
            owner.deliver(index, parameter.grad, (1.0, self._next_lr or 0.0) if now else None)
            parameter.grad = None

        return gradient_is_in

    def unsharded(self, kind: str) -> dict[str, Tensor]:
        return {piece.name: u.owner.state(piece, kind).clone() for u in self._updates for piece in u.owner.pieces}

    def owners(self) -> list[AdamW]:
        return [u.owner for u in self._updates]

    def publish(self) -> None:
        for update in self._updates:
            update.publish()

    def close(self) -> None:
        if self._world > 1 and not self._after:
            self.module = self.module.module


class _Update:
    """AdamW of some parameters on their masters."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], optimizers: Optimizers) -> None:
        self.weights = [p.detach() for _, p in named]
        self.parameters = [p for _, p in named]
        self.dtype = master_dtype(self.weights[0].dtype)
        masters = [optimizers.master(w, self.dtype) for w in self.weights]  # on the device, fp32 weights themselves
        self.copies = masters[0] is not self.weights[0]
        pieces = [Piece(n, m, m.ndim >= 2) for (n, _), m in zip(named, masters)]
        self.owner = optimizers.make(pieces, self.weights)

    def send(self, update: tuple[float, float]) -> None:
        """To a HostOptimizer: the gradients that it doesn't have yet, and that there are no more."""
        assert isinstance(self.owner, HostOptimizer)
        for index, p in enumerate(self.parameters):
            if p.grad is not None:
                self.owner.deliver(index, p.grad, update)
                p.grad = None
        self.owner.complete(update)

    def run(self, scale: Tensor, lr: float | Tensor) -> None:
        grads: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
        for p in self.parameters:
            p.grad = None
        if grads[0].dtype != self.dtype and not self.owner.fused:
            low, grads = grads, [torch.empty_like(m) for m in self.owner.tensors]
            torch._foreach_copy_(grads, low)
            del low
        self.owner.step(grads, scale.to(self.dtype), lr)
        if not self.owner.fused:
            self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.weights, self.owner.tensors)


def _buckets(grads: list[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, each run of about `nbytes`."""
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and (sum(g.nbytes for g in bucket) >= nbytes or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def _chunks(named: list[tuple[str, nn.Parameter]], whole: bool) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters of one dtype, each run of about UPDATE_BYTES of master weights, or all of them."""
    chunk: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, p in named:
        if chunk and (size >= UPDATE_BYTES and not whole or p.dtype != chunk[0][1].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append((name, p))
        size += p.numel() * 4
    if chunk:
        yield chunk
