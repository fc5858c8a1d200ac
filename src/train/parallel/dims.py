"""Where a rank stands in the mesh, and the process groups along its dimensions."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train import config
from train.parallel import collectives
from train.parallel.mesh import DIMS, resolve, sequence_pieces
from train.parallel.traffic import Meter

ISLAND = ("pp", "dp_shard", "cp", "tp")  # one copy of the training state
DATA = ("dp_replicate", "dp_shard")  # ranks with other rows
REDUCE = ("dp_replicate", "dp_shard", "cp")  # ranks with other tokens and the same weights
EXPERT_DIMS = ("pp", "dp_replicate", "expert_shard", "ep")  # dp_shard x cp x tp = expert_shard x ep
EXPERT_REDUCE = ("dp_replicate", "expert_shard")  # ranks with the same experts
TOKENS = (*REDUCE, "tp")  # ranks with other positions between the layers' matrices


class Dims:
    """One rank's place. Groups are made when they are first asked for: all ranks must ask in the same order."""

    def __init__(
        self, degrees: dict[str, int], rank: int, device: torch.device, group: Any = None, cp_method: str = "ulysses"
    ) -> None:
        """`degrees`: what `mesh.resolve` returned. `group`, or the default process group, has their product of ranks, if
        more than one; `rank` is the place in it."""
        self.degrees, self.rank, self.world = degrees, rank, math.prod(degrees[d] for d in DIMS)
        self.device, self._whole = device, group
        self.meter = Meter(device)  # of all that this rank sends
        self._place: dict[str, int] = {}
        for name in reversed(DIMS):
            rank, self._place[name] = divmod(rank, degrees[name])
        ep, at = degrees.get("ep", 1), self.index("dp_shard", "cp", "tp")
        self.degrees = degrees | {"ep": ep, "expert_shard": self.size("dp_shard", "cp", "tp") // ep}
        self._place |= {"expert_shard": at // ep, "ep": at % ep}
        self._pieces = sequence_pieces(cp_method, degrees["cp"], self._place["cp"])
        self._groups: dict[tuple[str, ...], Any] = {}

    @classmethod
    def of(cls, cfg: config.Train, world: int, rank: int, device: torch.device, group: Any = None) -> "Dims":
        """From a configuration. Raises ConfigError for degrees that can't be."""
        return cls(resolve(cfg, world), rank, device, group, cfg.parallelism.cp_method)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the dimensions pp, dp_replicate, dp_shard, cp, tp. Collective on first use."""
        return init_device_mesh(self.device.type, tuple(self.degrees[d] for d in DIMS), mesh_dim_names=DIMS)

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks for the experts: dimensions pp, dp_replicate, expert_shard, ep. Collective on first use."""
        sizes = tuple(self.degrees[d] for d in EXPERT_DIMS)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=EXPERT_DIMS)

    def size(self, *names: str) -> int:
        """Ranks along these dimensions together."""
        return math.prod(self.degrees[name] for name in names)

    def index(self, *names: str) -> int:
        """This rank's place along these dimensions, the first one outermost."""
        place = 0
        for name in names:
            place = place * self.degrees[name] + self._place[name]
        return place

    def group(self, *names: str) -> Any:
        """The process group of the ranks that differ from this one along these dimensions alone, in `index` order."""
        if self.size(*names) == self.world:
            return self._whole or dist.group.WORLD
        if names not in self._groups:
            mesh = self.expert_mesh if set(names) & {"expert_shard", "ep"} else self.mesh
            part = mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
            self._groups[names] = part.get_group()
        return self._groups[names]

    @functools.cached_property
    def shard_mesh(self) -> DeviceMesh:
        """For fully_shard: [dp_replicate, shard] or, with one copy, [shard]; shard is dp_shard x cp."""
        shards = self.group("dp_shard", "cp")
        if self.size("dp_replicate") == 1:
            return DeviceMesh.from_group(shards, self.device.type, mesh_dim_names=("shard",))
        stride = self.size("tp")
        first = self.rank - self.index(*REDUCE) * stride
        copies, size = self.size("dp_replicate"), self.size("dp_shard", "cp")
        ranks = (first + stride * torch.arange(copies * size)).view(copies, size)
        groups = [self.group("dp_replicate"), shards]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=("dp_replicate", "shard"))

    @functools.cached_property
    def expert_shard_mesh(self) -> DeviceMesh:
        """For fully_shard of experts: [dp_replicate, expert_shard] or, with one copy, [expert_shard]."""
        return self.expert_mesh["expert_shard" if self.size("dp_replicate") == 1 else EXPERT_REDUCE]

    def copies(self, cut: bool, sharded: bool) -> int:
        """Ranks of an island with the same piece of a parameter: `cut` over tp or not, `sharded` over dp_shard x cp or not."""
        return (1 if cut else self.size("tp")) * (1 if sharded else self.size("dp_shard", "cp"))

    def total(self, square: Tensor) -> Tensor:
        """Sum over the island of a 0-dim sum of squares, added in rank order; the same bits on all of its ranks. Collective."""
        if self.size(*ISLAND) == 1:
            return square
        parts = square.new_empty(self.size(*ISLAND))
        collectives.all_gather(parts, square.view(1), group=self.group(*ISLAND))
        return parts.sum()

    @torch.no_grad()
    def sum_over_tp(self, tensors: Sequence[Tensor]) -> None:
        """Add up over tp, in place and in one collective, gradients of weights that every tp rank holds whole."""
        if self.size("tp") == 1 or not tensors:
            return
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = torch.cat([t.reshape(-1).to(wide) for t in tensors])
        dist.all_reduce(flat, group=self.group("tp"))
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))

    def union_over_pp(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the pipeline's ranks have together, by name, on each of them, in the order of the ranks. Collective."""
        if self.size("pp") == 1:
            return mine
        parts: list[Any] = [None] * self.size("pp")
        host = {name: t.cpu() for name, t in mine.items()}
        dist.all_gather_object(parts, host, group=self.group("pp"))
        return {name: t.to(self.device) for part in parts for name, t in part.items()}

    def rows_of_sequence(self, rows: Tensor) -> Tensor:
        """This cp rank's positions of [rows, T]: [rows, T / cp]."""
        if self.size("cp") == 1:
            return rows
        pieces, mine = self._pieces
        parts = rows.chunk(pieces, dim=1)
        return torch.cat([parts[i] for i in mine], 1)
