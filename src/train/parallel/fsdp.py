"""reduction=fsdp: torch's fully_shard (ZeRO-3), one unit per block and one for the rest; HSDP with dp_replicate above 1.

Parameters are the fp32 masters; with a lower compute dtype they are gathered in it and gradients are reduced in fp32.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from train import config
from train.memory.host import HostOptimizer
from train.memory.optimizer import Optimizers
from train.model.transformer import Transformer
from train.parallel import expert
from train.parallel.adamw import AdamW, Piece, clip_scale
from train.parallel.base import DataParallel, GradNorm, trainable
from train.parallel.dims import Dims


class Fsdp(DataParallel):
    """`compute`: dtype of the gathered weights; `model` holds the masters.

    The optimizer works on the local shards as plain tensors: the same kernels as in the other reductions, and no DTensor
    dispatch for every parameter.
    """

    def __init__(self, model: nn.Module, cfg: config.Train, dims: Dims, compute: torch.dtype) -> None:
        device = dims.device
        self._dims, self._optim, self._device, self._compute, self._seed = dims, cfg.optim, device, compute, cfg.seed
        self._full = cfg.memory.optimizer_offload == "full"
        self._own_group = not dist.is_initialized()
        if self._own_group:  # one rank on its own; fully_shard wants a group all the same
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._copies, self._shards = dims.size("dp_replicate"), dims.size("dp_shard", "cp")
        self._expert_shards = dims.size("expert_shard")
        devices = dims.shard_mesh
        # a pipeline has several micro-batches under way at once: their layers would be gathered again and again
        chunks = getattr(model, "chunks", ())
        # gathered weights then live until the step's last backward
        reshard = cfg.reduction.reshard_after_forward
        self._reshard: bool | int = not chunks if reshard is None else reshard
        self._keep = self._reshard is False
        # accumulating whole gradients would keep what ZeRO-3 is there to shard: every micro-batch is reduced unless asked
        self._once = cfg.reduction.accumulate == "once" or bool(chunks)
        self.meter = dims.meter
        self.module: Any = self._wrap(model, chunks or (model,), devices, cfg.reduction.prefetch)
        self._named: list[tuple[str, DTensor]] = [(n, p) for n, p in trainable(model) if isinstance(p, DTensor)]
        self._apart = [expert.apart(n, dims) for n, _ in self._named]
        self._norm = GradNorm(dims, [n for n, _ in self._named], sharded=True)
        self._pieces = [Piece(n, cast(DTensor, p.detach()).to_local(), p.ndim >= 2) for n, p in self._named]
        self._owner = Optimizers(cfg, device).make(self._pieces)
        self._micro_batches = 0

    def _wrap(
        self, model: nn.Module, roots: Sequence[nn.Module], devices: DeviceMesh, prefetch: int | None
    ) -> nn.Module:
        """Every block and, with the rest, every root: the model, or the stages of a pipeline."""
        stored = next(model.parameters()).dtype
        mixed = self._compute != stored
        policy = MixedPrecisionPolicy(
            param_dtype=self._compute if mixed else None,
            reduce_dtype=stored if mixed and self._optim.grad_dtype != "bf16" else None,
        )
        # masters, and gradients as they are reduced, in host memory; on a CPU that is where they are
        offload = CPUOffloadPolicy() if self._full and self._device.type == "cuda" else OffloadPolicy()
        self._blocks = list(getattr(model, "layers", ()))
        shard = functools.partial(fully_shard, mp_policy=policy, offload_policy=offload)
        block_shard = functools.partial(shard, reshard_after_forward=self._reshard)
        for block in self._blocks:
            self._materialise(model, block)
            experts = getattr(getattr(block, "ffn", None), "experts", None)
            if experts is not None and self._dims.size("ep") * self._dims.size("tp") > 1:
                mesh = self._dims.expert_shard_mesh
                block_shard(experts, mesh=mesh, shard_placement_fn=functools.partial(_placement, shards=mesh.size(-1)))
            block_shard(block, mesh=devices, shard_placement_fn=functools.partial(_placement, shards=devices.size(-1)))
        self._prefetch(prefetch)
        self._materialise(model, model)
        for root in roots:  # None: gathered weights of a root stay, since backward begins with them
            shard(root, mesh=devices, reshard_after_forward=False if self._keep else None)
        return model

    def _materialise(self, model: nn.Module, part: nn.Module) -> None:
        """Of a model on the meta device one part at a time, so that no rank ever holds the whole of it."""
        if isinstance(model, Transformer):
            model.materialise(self._device, self._seed, part)

    def _prefetch(self, depth: int | None) -> None:
        """Gather the weights of the next `depth` layers, in forward and in backward, while a layer computes; and a layer's
        experts with it, as their dispatch waits for counts: the host is late to ask for them."""
        for index, block in enumerate(self._blocks):
            ahead = self._blocks[index + 1 : index + 1 + (depth or 0)]
            experts = getattr(getattr(block, "ffn", None), "experts", None)
            apart = [experts] if isinstance(experts, FSDPModule) else []
            if apart or depth is not None:
                block.set_modules_to_forward_prefetch([*apart, *ahead])
            if depth is not None:
                block.set_modules_to_backward_prefetch(self._blocks[max(0, index - depth) : index][::-1])

    @contextmanager
    def micro_step(self, index: int, count: int) -> Iterator[None]:
        last = index == count - 1
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last or not self._once)
        self.module.set_requires_all_reduce(last)
        if self._keep:
            self.module.set_reshard_after_backward(last)
        self._micro_batches = count
        yield

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        grads = []
        for (_, p), piece in zip(self._named, self._pieces, strict=True):
            grad = p.grad
            grads.append(grad.to_local() if isinstance(grad, DTensor) else torch.zeros_like(piece.tensor))
            p.grad = None
        # fully_shard has averaged over the ranks with the same experts; the mean is over those with other rows or positions
        share = self._dims.size("tp") / self._dims.size("ep")
        if any(self._apart) and share != 1:
            torch._foreach_mul_([g for g, apart in zip(grads, self._apart, strict=True) if apart], share)
        norm = self._norm(grads)
        grads = [grad for grad in grads if grad.numel()]  # a rank may own nothing of a small parameter
        dtype = self._pieces[0].tensor.dtype
        self._owner.step(grads, clip_scale(norm, self._optim.clip_norm, 1).to(dtype), lr)
        if isinstance(self._owner, HostOptimizer):
            self._owner.finish()
        self.meter.end_step()
        return norm.to(dtype)

    @torch.no_grad()
    def unsharded(self, kind: str) -> dict[str, Tensor]:
        whole = {}
        for (name, p), piece in zip(self._named, self._pieces, strict=True):
            local = self._owner.state(piece, kind) if piece.tensor.numel() else piece.tensor
            local = local.to(self._device)
            sharded = DTensor.from_local(
                local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            whole[name] = sharded.full_tensor().clone()  # on one rank it is the shard itself
        return whole

    def traffic(self) -> dict[str, Any]:
        """Bytes by the layout, as rings send them (fully_shard shows no counters); "exposed_s": None, it can't be seen from
        outside fully_shard."""
        # gathers before forward; the root's weights stay until backward ends
        first = 1 if self._keep else self._micro_batches
        # a block that was resharded is gathered again in backward: from all shards, or from the few that it was kept on
        few = self._shards if self._reshard is True else int(self._reshard)
        again = 0.0 if self._keep else self._micro_batches * self._shards / few * (few - 1) / max(1, self._shards - 1)
        in_blocks = {id(p) for block in self._blocks for p in block.parameters()}
        reductions = 1 if self._once else self._micro_batches
        sent = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        for (_, p), apart in zip(self._named, self._apart, strict=True):
            shards = self._expert_shards if apart else self._shards
            at = cast(Shard, p.placements[-1]).dim
            shard = -(-p.shape[at] // shards) * (p.numel() // p.shape[at])  # rows are padded to the shards
            times = first + (again if id(p) in in_blocks else 0)
            sent["all_gather"] += int(times * shard * self._compute.itemsize * (shards - 1))
            sent["reduce_scatter"] += reductions * shard * p.dtype.itemsize * (shards - 1)
            sent["all_reduce"] += 2 * shard * p.dtype.itemsize * (self._copies - 1) // self._copies
        sent |= self.meter.report()["bytes"]  # by others than fully_shard
        return {"bytes": {k: v for k, v in sent.items() if v}, "exposed_s": None, "exposed_s_mean": None, "steps": 0}

    def owners(self) -> list[AdamW]:
        return [self._owner]

    def publish(self) -> None:
        """The masters are the weights that fully_shard gathers."""

    def close(self) -> None:
        if self._own_group:
            dist.destroy_process_group()


def _placement(p: nn.Parameter, shards: int) -> Shard:
    """Experts by number; where there are fewer than shards, or not as many for each, by their first width if that divides."""
    by_width = p.ndim == 3 and p.shape[0] % shards and p.shape[1] % shards == 0
    return Shard(1 if by_width else 0)
