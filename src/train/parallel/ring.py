"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go round the cp ranks, queries stay.

The sequence is cut into 2 cp pieces, of which rank r has piece r and piece 2 cp - 1 - r, so that every rank has the same work
under a causal mask (the zigzag order of Llama 3's report, arXiv 2407.21783, section 3.3.2). With the keys of an earlier rank
all queries see their first half, with those of a later rank the second half of the queries sees all: no block but the own one
is masked. Results of blocks are merged by their log-sum-exps, in fp32.

torch's own context parallel replaces the CUDA kernels flash, efficient and cuDNN inside DTensor and has nothing for a CPU (up
to 2.13, `_context_parallel/_attention.py`), so it can't pass this project's proof; these are the same aten kernels, and math.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from train.parallel import collectives, line
from train.parallel.mesh import RING_KERNELS

TRAFFIC = "cp_ring"  # its name in the traffic record
Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


class Ring:
    """q [B, T/cp, H, d], k and v [B, T/cp, KV, d] of every rank → attention's [B, T/cp, H, d]. Collective."""

    def __init__(self, name: str) -> None:
        """`name`: of the ranks' line."""
        self.name = name

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, path: str) -> Tensor:
        return _Ring.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.name, path).transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, path: str) -> Tensor:
        out, lse = torch.ops.train_cp.ring(q, k, v, name, path)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.of = name, path
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.train_cp.ring_backward(grads[0], *ctx.saved_tensors, *ctx.of), None, None


# An operator of its own, as in ulysses.py.
@torch.library.custom_op("train_cp::ring", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, name: str, path: str) -> tuple[Tensor, Tensor]:
    """(attention's result [B, H, t, d], log-sum-exp of the scores [B, H, t]) for queries [B, H, t, d]. Collective."""
    to, block, half = line.get(name), KERNELS[path][0], q.shape[2] // 2
    out, lse = torch.empty(0), torch.empty(0)
    kv = torch.stack((k, v))
    for turn in range(to.size):
        passing = Passing(to, kv) if turn + 1 < to.size else None
        if turn == 0:
            out, lse = block(q, k, v, True)
            out, lse = out.to(lse.dtype), lse.contiguous()
        elif turn <= to.rank:  # of an earlier rank
            merge(out, lse, *block(q, kv[0, :, :, :half], kv[1, :, :, :half], False))
        else:
            merge(out[:, :, half:], lse[:, :, half:], *block(q[:, :, half:], kv[0], kv[1], False))
        if passing is not None:
            kv = passing.arrived()
    return out.to(q.dtype), lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, name: str, path: str) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("train_cp::ring_backward", mutates_args=())
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, name: str, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. Those of keys and values travel with them, in fp32, and end at home. Collective."""
    to, block, half = line.get(name), KERNELS[path][1], q.shape[2] // 2
    dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
    kv, travelling = torch.stack((k, v)), None
    for turn in range(to.size):
        passing = Passing(to, kv) if turn + 1 < to.size else None
        part = torch.zeros_like(kv, dtype=lse.dtype)
        rows = slice(half if turn > to.rank else 0, None)  # of the queries
        keys = slice(half if 0 < turn <= to.rank else None)
        found = block(
            grad[:, :, rows], q[:, :, rows], kv[0, :, :, keys], kv[1, :, :, keys], out[:, :, rows], lse[:, :, rows], turn == 0
        )  # fmt: skip
        dq[:, :, rows] += found[0]
        part[0, :, :, keys], part[1, :, :, keys] = found[1], found[2]
        if travelling is not None:
            part += travelling.arrived()
        travelling = Passing(to, part)
        if passing is not None:
            kv = passing.arrived()
    assert travelling is not None
    dk, dv = (x.to(k.dtype, copy=True) for x in travelling.arrived())
    return dq.to(q.dtype), dk, dv


@backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, name: str, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class Passing:
    """`x` under way to the next rank, and the previous rank's to here, beside compute."""

    def __init__(self, to: line.Line, x: Tensor) -> None:
        self._meter, self._sent, self._got = to.meter, x, torch.empty_like(x)
        there, here = [0] * to.size, [0] * to.size
        there[(to.rank + 1) % to.size] = here[(to.rank - 1) % to.size] = x.numel()
        self._meter.sent(TRAFFIC, x.nbytes)
        self._work = collectives.all_to_all(self._got.view(-1), x.view(-1), here, there, group=to.group, async_op=True)

    def arrived(self) -> Tensor:
        """What the previous rank sent."""
        assert self._work is not None
        with self._meter.waiting(TRAFFIC):
            self._work.wait()
        return self._got


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make (out, lse) the attention over its own keys and those of (more, more_lse), in place."""
    share = torch.sigmoid(more_lse - lse)  # of the new keys in the softmax's sum
    out.lerp_(more.to(out.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, more_lse))


# ---- kernels: (q, k, v, causal) → (out, lse), and (grad, q, k, v, out, lse, causal) → gradients for the given lse ------------


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.is_cuda:
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out[0], out[1]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    none = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of a dropout that isn't used
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none
    )


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, KV, H/KV, t, s] in fp32 (fp64 for fp64) of q in groups [B, KV, H/KV, t, d]."""
    scores = (q @ k[:, :, None].mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q.unflatten(1, (k.shape[1], -1)), k, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().to(v.dtype) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, grad, out, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, grad, out, lse))
    p = (_scores(q, k, causal) - lse[..., None]).exp()
    dv = (p.to(v.dtype).mT @ grad).sum(2)
    dp = (grad @ v[:, :, None].mT).to(p.dtype)
    ds = (p * (dp - (grad.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5).to(q.dtype)
    return (ds @ k[:, :, None]).flatten(1, 2), (ds.mT @ q).sum(2), dv


KERNELS: dict[str, tuple[Forward, Backward]] = dict(
    zip(RING_KERNELS, ((_flash, _flash_backward), (_math, _math_backward)), strict=True)
)


def probe(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, paths: tuple[str, ...]
) -> Mapping[str, str | None]:
    """`attention.probe` for the ring: path → None if its kernel accepts the model's shapes, else why not."""
    found: dict[str, str | None] = dict.fromkeys(paths, f"the ring merges blocks of {' or '.join(RING_KERNELS)}")
    q, k, v = (
        torch.zeros(1, 128, n, head_dim, device=device, dtype=dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    for path, (block, block_backward) in KERNELS.items():
        try:
            out, lse = block(q, k, v, True)
            block_backward(out, q, k, v, out, lse, True)
            found[path] = None
        except RuntimeError as error:
            found[path] = str(error).splitlines()[0]
    return found
