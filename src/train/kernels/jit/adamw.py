"""AdamW over a list of tensors in one launch: gradients are scaled, masters and moments updated, weights rounded."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from train import config

BLOCK, WARPS = 1024, 4  # 8 elements a thread: 16 bytes of a bf16 gradient, two loads of 16 bytes of each fp32 tensor
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def adamw_advance_kernel(step, factors, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr):
    """One program: counts the step and makes `factors` [3] lr / (1 - beta1**step), sqrt(1 - beta2**step) and, as it was, lr.

    In fp64, since the differences cancel; and once, since in every program of the update it would cost as much as that.
    """
    now = tl.load(step) + 1
    tl.store(step, now)
    t = now.to(tl.float64)
    dtype = factors.dtype.element_ty
    lr = tl.load(factors + 2).to(tl.float64)
    tl.store(factors, (lr / (1 - tl.exp(t * LOG_BETA1))).to(dtype))
    tl.store(factors + 1, tl.sqrt(1 - tl.exp(t * LOG_BETA2)).to(dtype))


@triton.jit
def adamw_kernel(
    addresses, grads, numels, decays, blocks, factors, scale, pieces,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    MASTER: tl.constexpr, STATE: tl.constexpr, GRAD: tl.constexpr, WEIGHT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block `program_id` of the list: `blocks` [n, 2] says of which piece and which of its blocks.

    `addresses` [4, pieces]: of master, exp_avg, exp_avg_sq and weight; `grads` [pieces]: of the gradients. Loads of 16 bytes
    need to know that addresses are multiples of ALIGN=16, and pieces' lengths, where the mask ends, of EVEN=8.
    """
    at = tl.program_id(0).to(tl.int64)
    piece = tl.load(blocks + 2 * at)
    n = tl.multiple_of(tl.load(numels + piece), EVEN)
    p = tl.multiple_of(tl.load(addresses + piece).to(tl.pointer_type(MASTER)), ALIGN)
    m = tl.multiple_of(tl.load(addresses + pieces + piece).to(tl.pointer_type(STATE)), ALIGN)
    v = tl.multiple_of(tl.load(addresses + 2 * pieces + piece).to(tl.pointer_type(STATE)), ALIGN)
    w = tl.multiple_of(tl.load(addresses + 3 * pieces + piece).to(tl.pointer_type(WEIGHT)), ALIGN)
    g = tl.multiple_of(tl.load(grads + piece).to(tl.pointer_type(GRAD)), ALIGN)
    size, root = tl.load(factors), tl.load(factors + 1)
    shrink = tl.load(factors + 2) * tl.load(decays + piece)
    i = tl.load(blocks + 2 * at + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    grad = tl.load(g + i, mask=mask).to(MASTER) * tl.load(scale)
    param = tl.load(p + i, mask=mask)
    first = tl.load(m + i, mask=mask).to(MASTER) * BETA1 + grad * (1 - BETA1)
    second = tl.load(v + i, mask=mask).to(MASTER) * BETA2 + grad * grad * (1 - BETA2)
    if MASTER == tl.float32:  # noqa: SIM300  # correctly rounded, as torch's are
        step = tl.div_rn(first * size, tl.div_rn(tl.sqrt_rn(second), root) + EPS)
    else:
        step = first * size / (tl.sqrt(second) / root + EPS)
    param = param - shrink * param - step
    tl.store(p + i, param, mask=mask)
    tl.store(m + i, first.to(STATE), mask=mask)
    tl.store(v + i, second.to(STATE), mask=mask)
    if HAS_WEIGHT:
        tl.store(w + i, param.to(WEIGHT), mask=mask)


class Launch:
    """The list of one optimizer: tensors that stay where they are, so that a step sends the device nothing but gradients'
    addresses and the learning rate, and those only when they are others than a step before."""

    def __init__(
        self,
        masters: Sequence[Tensor],
        moments: Sequence[tuple[Tensor, Tensor]],
        weights: Sequence[Tensor],
        decays: Sequence[float],
        optim: config.Optim,
    ) -> None:
        """`weights`: bf16 copies that follow the masters, one for each, or none."""
        self._device = masters[0].device
        follow = weights or masters
        columns = list(zip(masters, *zip(*moments, strict=True), follow, strict=True))
        self._addresses = self._sent([[c[k].data_ptr() for c in columns] for k in range(4)], torch.int64)
        self._aligned = all(t.data_ptr() % 16 == 0 for c in columns for t in c)
        self._numels = self._sent([p.numel() for p in masters], torch.int64)
        self._decays = self._sent(list(decays), masters[0].dtype)
        counts = torch.tensor([triton.cdiv(p.numel(), BLOCK) for p in masters])
        piece = torch.arange(len(masters)).repeat_interleave(counts)
        within = torch.arange(len(piece)) - (counts.cumsum(0) - counts)[piece]
        self._blocks = torch.stack((piece, within), 1).to(torch.int32).to(self._device)
        self._grads = torch.zeros_like(self._numels)
        self._pieces = len(masters)
        self._last: tuple[list[int], float | None] = ([], None)
        self._constants = {
            "BETA1": optim.beta1, "BETA2": optim.beta2, "EPS": optim.eps,
            "MASTER": TYPES[masters[0].dtype], "STATE": TYPES[moments[0][0].dtype], "WEIGHT": TYPES[follow[0].dtype],
            "HAS_WEIGHT": bool(weights), "BLOCK": BLOCK,
            "EVEN": 8 if all(p.numel() % 8 == 0 for p in masters) else 1,
        }  # fmt: skip
        self._logs = {"LOG_BETA1": math.log(max(optim.beta1, 1e-300)), "LOG_BETA2": math.log(max(optim.beta2, 1e-300))}
        self._factors = torch.zeros(3, dtype=masters[0].dtype, device=self._device)

    def __call__(self, grads: Sequence[Tensor], scale: Tensor, step: Tensor, lr: float | Tensor) -> None:
        """`grads`: contiguous, of one dtype; `scale`, and `step` of all steps before: 0-dim, on the device. `lr`: a number, or
        0-dim on the device."""
        addresses = [g.data_ptr() for g in grads]
        recorded = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if addresses != self._last[0] and not recorded:
            self._grads.copy_(self._sent(addresses, torch.int64))
        if isinstance(lr, Tensor):
            self._factors[2:].copy_(lr)
        elif lr != self._last[1]:
            self._factors[2:].copy_(self._sent([lr], self._factors.dtype))
        self._last = addresses, None if isinstance(lr, Tensor) else lr
        adamw_advance_kernel[(1,)](step, self._factors, **self._logs, num_warps=1)
        aligned = self._aligned and all(a % 16 == 0 for a in addresses)
        adamw_kernel[(len(self._blocks),)](
            self._addresses, self._grads, self._numels, self._decays, self._blocks, self._factors, scale, self._pieces,
            **self._constants, GRAD=TYPES[grads[0].dtype], ALIGN=16 if aligned else 1, num_warps=WARPS,
        )  # fmt: skip

    def captured(self) -> None:
        """After a capture that recorded a call: say where its gradients lie. A copy recorded with it would read the host's
        memory again in every replay, when other things lie there."""
        self._grads.copy_(self._sent(self._last[0], torch.int64))

    def _sent(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        """On the device. From pinned memory: from any other the host would wait for the copy."""
        host = torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
