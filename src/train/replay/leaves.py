"""Leaves: blake3 over what a rank holds after a step, tensor by tensor."""

from collections.abc import Iterable, Iterator

import torch
from blake3 import blake3
from torch import Tensor

CHUNK = 64 << 20  # bytes of a pinned staging buffer; two of them, so that copying and hashing overlap
THREADED = 1 << 20  # below this many bytes more threads cost more than they save


class Hasher:
    """blake3 of tensors' bytes; those of a GPU pass through pinned buffers."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._threads = threads
        self._buffers: list[Tensor] = []
        if device.type == "cuda":
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def digests(self, items: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """{name: hex} in order."""
        return {name: self.digest(tensor) for name, tensor in items}

    @torch.no_grad()
    def digest(self, tensor: Tensor) -> str:
        """Hex of blake3 over the elements' bytes, row-major, as the machine holds them."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        state = blake3(max_threads=self._threads if flat.numel() >= THREADED else 1)
        for part in self._on_host(flat):
            state.update(part.numpy().data)
        return state.hexdigest()

    def _on_host(self, flat: Tensor) -> Iterator[Tensor]:
        if flat.device.type == "cpu":
            yield flat
            return
        waiting: tuple[Tensor, torch.cuda.Event] | None = None
        for index, chunk in enumerate(flat.split(CHUNK)):
            buffer = self._buffers[index % 2][: chunk.numel()]
            buffer.copy_(chunk, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            if waiting is not None:
                waiting[1].synchronize()
                yield waiting[0]
            waiting = buffer, done
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0]
