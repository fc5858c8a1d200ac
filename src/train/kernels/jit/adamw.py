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
ROUNDS = 8  # of BLOCK elements that a program of the norm adds up
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


@triton.jit
def squares_kernel(
    grads, numels, blocks, sums,
    GRAD: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """sums[program_id] = the sum of squares, in fp64, of that entry of `blocks`, ROUNDS x BLOCK elements of a gradient."""
    at = tl.program_id(0).to(tl.int64)
    piece = tl.load(blocks + 2 * at)
    n = tl.multiple_of(tl.load(numels + piece), EVEN)
    g = tl.multiple_of(tl.load(grads + piece).to(tl.pointer_type(GRAD)), ALIGN)
    first = tl.load(blocks + 2 * at + 1).to(tl.int64) * (BLOCK * ROUNDS)
    total = tl.zeros((BLOCK,), tl.float64)
    for r in tl.static_range(ROUNDS):
        i = first + r * BLOCK + tl.arange(0, BLOCK)
        grad = tl.load(g + i, mask=i < n, other=0).to(tl.float64)
        total += grad * grad
    tl.store(sums + at, tl.sum(total, 0))


@triton.jit
def roots_kernel(sums, ends, norms, BLOCK: tl.constexpr):
    """norms[program_id] = the root of the sum of `sums` from the end of the piece before to this one's."""
    piece = tl.program_id(0)
    first, end = tl.load(ends + piece), tl.load(ends + piece + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    while first < end:
        i = first + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < end, other=0)
        first += BLOCK
    tl.store(norms + piece, tl.sqrt(tl.sum(total, 0)))


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
        self._blocks, _ = self._cut(masters, BLOCK)
        self._long_blocks, ends = self._cut(masters, BLOCK * ROUNDS)
        self._ends = self._sent([0, *ends], torch.int64)
        self._grads = torch.zeros_like(self._numels)
        self._pieces = len(masters)
        self._last: list[int] = []
        self._lr: float | None = None
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
        constants = self._constants | self._point(grads)
        if isinstance(lr, Tensor):
            self._factors[2:].copy_(lr)
        elif lr != self._lr:
            self._factors[2:].copy_(self._sent([lr], self._factors.dtype))
        self._lr = None if isinstance(lr, Tensor) else lr
        adamw_advance_kernel[(1,)](step, self._factors, **self._logs, num_warps=1)
        if not self._aligned:
            constants["ALIGN"] = 1
        adamw_kernel[(len(self._blocks),)](
            self._addresses, self._grads, self._numels, self._decays, self._blocks, self._factors, scale, self._pieces,
            **constants, num_warps=WARPS,
        )  # fmt: skip

    def norms(self, grads: Sequence[Tensor]) -> Tensor:
        """2-norm of each of the gradients, contiguous and of one dtype: [pieces] fp64, in two launches."""
        constants = self._point(grads) | {"EVEN": self._constants["EVEN"], "BLOCK": BLOCK, "ROUNDS": ROUNDS}
        sums = torch.empty(len(self._long_blocks), dtype=torch.float64, device=self._device)
        norms = torch.empty(self._pieces, dtype=torch.float64, device=self._device)
        squares_kernel[(len(sums),)](self._grads, self._numels, self._long_blocks, sums, **constants, num_warps=WARPS)
        roots_kernel[(self._pieces,)](sums, self._ends, norms, BLOCK=BLOCK, num_warps=WARPS)
        return norms

    def _point(self, grads: Sequence[Tensor]) -> dict[str, Any]:
        """Have the device's list say where the gradients lie (while a capture records nothing is sent: `captured` does it
        afterwards). Returns what the kernels must know of them."""
        addresses = [g.data_ptr() for g in grads]
        recorded = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if addresses != self._last and not recorded:
            self._grads.copy_(self._sent(addresses, torch.int64))
        self._last = addresses
        return {"GRAD": TYPES[grads[0].dtype], "ALIGN": 16 if all(a % 16 == 0 for a in addresses) else 1}

    def captured(self) -> None:
        """After a capture that recorded a call: say where its gradients lie. A copy recorded with it would read the host's
        memory again in every replay, when other things lie there."""
        self._grads.copy_(self._sent(self._last, torch.int64))

    def _cut(self, tensors: Sequence[Tensor], size: int) -> tuple[Tensor, list[int]]:
        """(For each block of `size` elements its tensor and its place there [n, 2], on the device; how many blocks there are up
        to each tensor's last.)"""
        counts = torch.tensor([triton.cdiv(t.numel(), size) for t in tensors])
        piece = torch.arange(len(tensors)).repeat_interleave(counts)
        ends = counts.cumsum(0)
        within = torch.arange(len(piece)) - (ends - counts)[piece]
        return torch.stack((piece, within), 1).to(torch.int32).to(self._device), ends.tolist()

    def _sent(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        """On the device. From pinned memory: from any other the host would wait for the copy."""
        host = torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
