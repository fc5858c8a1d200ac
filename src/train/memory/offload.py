"""memory.activation_offload: what a layer saves for backward waits in host memory, copied beside compute.

Saved tensors leave on a stream of their own into pinned buffers and come back, a few ahead of backward, on the same one.
Being one stream, it also orders the reuse of host buffers: no copy into a buffer overtakes the last one out of it.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 20  # smaller tensors (statistics of norms and softmax) stay: a copy costs the host more than they hold


class Offload:
    """Use `saving(x)` around each layer's forward. Never moved: parameters, views of them, and small tensors.

    `max_inflight`: tensors whose copy to the host may be unfinished, each of which still holds device memory, and tensors
    fetched ahead of backward. What is still on its way when backward asks for it is handed back without a copy.
    `inputs_only`: move a layer's input alone; what a recompute policy keeps inside it stays on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        max_inflight: int,
        inputs_only: bool = False,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self._device, self._max_inflight, self._min_bytes = device, max_inflight, min_bytes
        self._inputs_only = inputs_only
        self._lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = HostPool(pinned=device.type == "cuda")
        self._model = model
        self._fixed: set[int] = set()  # storages of parameters
        self._input = 0  # storage of the layer's input
        self._layer = 0  # forwards of layers so far
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._order: list[weakref.ref[_Saved]] = []  # in the order of forward
        self._leaving: deque[tuple[_Saved, Any]] = deque()
        self.moved_bytes = 0  # to the host, over all steps

    @contextmanager
    def saving(self, x: Tensor) -> Iterator[None]:
        """Around the forward of a layer with input `x`; its backward may come any time later, or never."""
        if not self._fixed:  # not earlier: reductions move parameters into their buffers
            self._fixed = {p.untyped_storage()._cdata for p in self._model.parameters()}
        self._input = x.untyped_storage()._cdata
        self._layer += 1
        self._known.clear()
        self._forget_dead()
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> "Tensor | _Handle":
        if tensor.device.type != self._device.type or self._stays(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # saved by several operators: moved once. A storage that has died may have left its address to another
        key = (storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._known:
            alive, ref = self._known[key]
            saved = ref()
            if saved is not None and not alive.expired():
                return _Handle(saved)
        saved = _Saved(tensor, self.pool, len(self._order), self._layer)
        self._known[key] = (StorageWeakRef(storage), weakref.ref(saved))
        self._order.append(weakref.ref(saved))
        self._send(saved)
        return _Handle(saved)

    def _stays(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        if tensor.nbytes < self._min_bytes or storage in self._fixed or self._inputs_only and storage != self._input:
            return True
        # fully_shard's gathered weights are leaves of their own: it frees their memory itself, and a copy would keep them
        base = tensor if tensor._base is None else tensor._base
        return base.is_leaf and (base.requires_grad or isinstance(base, nn.Parameter))

    def _send(self, saved: "_Saved") -> None:
        assert saved.device_tensor is not None
        self.moved_bytes += saved.host.nbytes
        if self._lane is None:
            saved.host.copy_(saved.device_tensor)
            event = None
        else:
            self._lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._lane):
                saved.host.copy_(saved.device_tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._lane)
        self._leaving.append((saved, event))
        while len(self._leaving) > self._max_inflight:
            gone, event = self._leaving.popleft()
            if event is not None:  # memory goes back to the compute stream behind the copy; the host doesn't wait
                torch.cuda.current_stream().wait_event(event)
            gone.device_tensor = None

    def _unpack(self, packed: "Tensor | _Handle") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.saved
        self._settle(saved.layer)
        self._fetch(saved)
        saved.used = True
        self._forget_dead()
        self._fetch_ahead(saved)
        if saved.arrived is not None:
            torch.cuda.current_stream().wait_event(saved.arrived)
            saved.arrived = None
        assert saved.device_tensor is not None
        return saved.device_tensor

    def _fetch_ahead(self, saved: "_Saved") -> None:
        """Start the copies of what backward needs next, the later in forward the sooner; a compiled layer asks for all it
        saved at once, and its own tensors come first."""
        for index in range(saved.index + 1, len(self._order)):
            after = self._order[index]()
            if after is not None and after.layer == saved.layer and after.device_tensor is None:
                return
        ahead = 0
        for index in range(min(saved.index, len(self._order)) - 1, -1, -1):
            if ahead == self._max_inflight:
                return
            before = self._order[index]()
            if before is not None and not before.used:
                self._fetch(before)
                ahead += 1

    def _settle(self, layer: int) -> None:
        """Backward has come to `layer`: what is still leaving stays, except what later forwards saved."""
        if not self._leaving:
            return
        if (event := self._leaving[-1][1]) is not None:
            torch.cuda.current_stream().wait_event(event)
        for saved, _ in self._leaving:
            if saved.layer > layer:
                saved.device_tensor = None
        self._leaving.clear()

    def _forget_dead(self) -> None:
        while self._order and self._order[-1]() is None:
            self._order.pop()

    def _fetch(self, saved: "_Saved") -> None:
        """Start the copy back, unless the tensor is here or on its way."""
        if saved.device_tensor is not None:
            return
        # allocated by the compute stream, which is also the one that frees it; its memory may have been in use until now
        back = torch.empty_strided(saved.shape, saved.stride, dtype=saved.host.dtype, device=self._device)
        if self._lane is None:
            back.copy_(saved.host)
        else:
            self._lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._lane):
                back.copy_(saved.host, non_blocking=True)
                saved.arrived = torch.cuda.Event()
                saved.arrived.record(self._lane)
        saved.device_tensor = back


class _Saved:
    """One tensor in host memory; lives as long as a saved variable of the graph holds a handle to it."""

    def __init__(self, tensor: Tensor, pool: "HostPool", index: int, layer: int) -> None:
        self.device_tensor: Tensor | None = tensor.detach()  # until the copy is done, and again from the copy back on
        self.shape, self.index, self.layer = tensor.shape, index, layer
        self.used = False  # by backward
        self.stride = torch.empty_like(tensor, device="meta").stride()  # the layout of the original, without gaps
        self.arrived: Any = None
        buffer = pool.take(tensor.nbytes)
        self.host = buffer.view(tensor.dtype).as_strided(self.shape, self.stride)
        weakref.finalize(self, pool.give, buffer)


class _Handle:
    def __init__(self, saved: _Saved) -> None:
        self.saved = saved


class HostPool:
    """Host buffers by size, pinned for a GPU; given back, they are used again: pinning costs milliseconds."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}
        self.total_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] uint8."""
        if free := self._free.get(nbytes):
            return free.pop()
        self.total_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.nbytes, []).append(buffer)
