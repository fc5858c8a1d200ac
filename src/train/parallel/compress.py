"""Fewer bytes for a vector: its largest elements alone (top-k), and 8 or 4 bits for each."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale: 4 bytes of scale on 256 or 128 bytes of elements


@dataclass(frozen=True)
class Codec:
    """`topk`: share of elements kept, in (0, 1]; `bits`: 32 (as they are), 8 or 4."""

    topk: float
    bits: int

    @property
    def lossless(self) -> bool:
        return self.topk == 1 and self.bits == 32

    def encode(self, flat: Tensor) -> Tensor:
        """[n] float → [bytes] uint8, of a length that depends on n and dtype alone."""
        index = None
        if (kept := self._kept(len(flat))) < len(flat):
            # by size: neighbours share a scale, so elements of about one size lose least
            index = flat.abs().topk(kept).indices
            flat = flat[index]
        parts = [flat] if self.bits == 32 else list(self._quantise(flat))
        if index is not None:
            parts.insert(1, index.to(torch.int32))  # behind what is aligned to more bytes
        bytes_ = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
        return torch.nn.functional.pad(bytes_, (0, -len(bytes_) % 8))  # each payload of several in a row stays aligned

    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """What `encode` of [n] elements of `dtype` kept, zeros elsewhere: [n]."""
        kept = self._kept(n)
        first = kept * dtype.itemsize if self.bits == 32 else 4 * math.ceil(kept / BLOCK)
        after = first + (4 * kept if kept < n else 0)
        if self.bits == 32:
            values = payload[:first].view(dtype)
        else:
            values = self._restore(payload[:first].view(torch.float32), payload[after:], kept).to(dtype)
        if kept == n:
            return values
        out = torch.zeros(n, dtype=dtype, device=payload.device)
        out[payload[first:after].view(torch.int32).long()] = values
        return out

    def _kept(self, n: int) -> int:
        return max(1, math.ceil(self.topk * n))

    @property
    def _largest(self) -> int:
        return 2 ** (self.bits - 1) - 1  # symmetric: 127 or 7

    def _quantise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(scales [blocks] fp32, levels uint8): the nearest of 255 or 15 levels of a block's largest element."""
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scale = (blocks.abs().amax(1) / self._largest).to(torch.float32)
        divisor = torch.where(scale > 0, scale, 1).to(blocks.dtype)
        levels = (blocks / divisor[:, None]).round().clamp(-self._largest, self._largest).to(torch.int8).view(-1)
        if self.bits == 4:
            pairs = (levels + 8).view(torch.uint8).view(-1, 2)
            return scale, pairs[:, 0] | pairs[:, 1] << 4
        return scale, levels.view(torch.uint8)

    def _restore(self, scale: Tensor, levels: Tensor, n: int) -> Tensor:
        packed = levels[: len(scale) * BLOCK * self.bits // 8]
        if self.bits == 4:
            signed = torch.stack([packed & 15, packed >> 4], 1).view(-1).to(torch.int16) - 8
        else:
            signed = packed.view(torch.int8)
        return (signed.to(torch.float32).view(-1, BLOCK) * scale[:, None]).view(-1)[:n]
