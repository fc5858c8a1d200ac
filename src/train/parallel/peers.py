"""reduction.transport=peer: ranks of one node copy from each other's memory, on no SM.

A collective's kernel holds SMs while it waits for the slowest rank, and each matmul beside it waits for those SMs. Here a rank
pulls by the GPU's copy engines (cudaMemcpyAsync from memory that torch's symmetric memory maps), and streams wait for flags in
device memory by themselves (cuStreamWaitValue32 and cuStreamWriteValue32, CUDA driver API, "Stream Memory Operations").
"""

import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from train.config import ConfigError
from train.measure import memory
from train.parallel.dims import Dims

KEY = "reduction.transport"
WEIGHTS, COMMUNICATION = "weights", "communication"  # kinds of memory, as train.measure.breakdown has them
FLAGS = 0  # of a wait: CU_STREAM_WAIT_VALUE_GEQ, cyclic, so that a count may pass 2**31; of a write: the default, with a fence


class Peers:
    """Memory that the ranks of a group see of each other, and counts by which their streams wait for one another."""

    def __init__(self, dims: Dims, group: Any, kinds: int) -> None:
        """`kinds` of counts. Collective. Raises ConfigError where the GPUs of the group can't read each other's memory."""
        self._device, self._group = dims.device, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._others = [r for r in range(self.world) if r != self.rank]
        reach(dims, group, KEY, "peer", "collective")
        # torch would make a multicast object of each allocation, which nothing here uses and not every host can have
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._driver = ctypes.CDLL("libcuda.so.1")
        try:
            self._flags = self.empty(kinds * self.world, torch.int32, COMMUNICATION)
        except RuntimeError as e:
            raise ConfigError(
                KEY, "peer", f"no symmetric memory here ({str(e).splitlines()[0]}); set it to collective"
            ) from e
        self._flags[self.rank].zero_()
        self._said = [0] * kinds
        self.meet()

    def empty(self, numel: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
        """A flat tensor of every rank, this one's own among them, in group order; `kind` of memory, for the record.
        Collective."""
        before = torch.cuda.memory_allocated(self._device)
        own = symmetric.empty(numel, dtype=dtype, device=self._device)
        counted = torch.cuda.memory_allocated(self._device) - before
        memory.outside(kind, own.nbytes - counted)
        handle = symmetric.rendezvous(own, self._group.group_name)
        seen: list[Tensor] = [handle.get_buffer(r, (numel,), dtype, 0) for r in range(self.world)]
        if seen[self.rank].data_ptr() != own.data_ptr():
            raise ConfigError(
                KEY, "peer", f"torch {torch.__version__} maps symmetric memory elsewhere; set it to collective"
            )
        seen[self.rank] = own  # which keeps the memory
        return seen

    def meet(self) -> None:
        """All ranks' devices have done what was issued so far."""
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)

    def say(self, kind: int) -> None:
        """On the current stream: the others' counts of `kind` from this rank rise by one, once all issued before is done."""
        self._said[kind] += 1
        at = 4 * (kind * self.world + self.rank)
        for r in self._others:
            self._call("cuStreamWriteValue32_v2", self._flags[r].data_ptr() + at, self._said[kind])

    def wait(self, kind: int, count: int | None = None) -> None:
        """On the current stream: what follows comes after every other rank has said `kind` `count` times, by default as often
        as this one has."""
        least = self._said[kind] if count is None else count
        for r in self._others:
            self._call("cuStreamWaitValue32_v2", self._flags[self.rank].data_ptr() + 4 * (kind * self.world + r), least)

    def _call(self, name: str, address: int, value: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        function = getattr(self._driver, name)
        code = function(
            ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(FLAGS)
        )
        if code:
            raise RuntimeError(f"{name}: CUDA driver error {code}")


def reach(dims: Dims, group: Any, key: str, value: object, instead: str) -> None:
    """Before a group's ranks use symmetric memory. Raises ConfigError, about key=value, unless all of them are on this node and
    their GPUs reach each other."""
    here = dims.device.index
    for rank in dist.get_process_group_ranks(group):
        there = here + rank - dist.get_rank()
        if not 0 <= there < int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())):
            raise ConfigError(key, value, f"rank {rank} is on another node; set it to {instead}")
        if there != here and not torch.cuda.can_device_access_peer(here, there):
            raise ConfigError(key, value, f"GPU {here} can't read the memory of GPU {there}; set it to {instead}")
