"""The kernels' plain forms, which run where Triton can't, against torch's own; and the operators' registration."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import given
from train import config
from train.kernels import adamw, loss, norm, rope, stacked, swiglu
from train.model import loss as plain_loss
from train.model import rope as plain_rope
from train.parallel.adamw import AdamW, Piece


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pieces(dtype: torch.dtype) -> list[Piece]:
    shapes = ((5, 7), (0,), (9,), (4, 4))
    return [Piece(f"p{i}", randn(*s, seed=i, dtype=dtype), len(s) > 1) for i, s in enumerate(shapes)]


# fp32: torch works the bias corrections and products out in fp64, and rounds once
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-15), (torch.float32, 2e-7)], ids=str)
def test_adamw_is_torchs(dtype: torch.dtype, bound: float) -> None:
    optim = config.Optim("adamw", weight_decay=0.1)
    ours, theirs = adamw.FusedAdamW(pieces(dtype), (), optim, None), AdamW(pieces(dtype), optim)
    scale = torch.tensor(0.3, dtype=dtype)
    for t in range(5):
        grads = [randn(*p.shape, seed=10 * t + i, dtype=dtype) for i, p in enumerate(ours.tensors)]
        ours.step([g.clone() for g in grads], scale, 1e-2)
        theirs.step(grads, scale, 1e-2)
    want = dict(theirs.items())
    for name, tensor in ours.items():
        assert (tensor - want[name]).abs().max() <= bound * want[name].abs().max(), name
    assert dict(ours.items()).keys() == want.keys()


def test_adamw_reads_low_gradients_and_writes_the_weights() -> None:
    optim = config.Optim("adamw")
    masters = pieces(torch.float32)
    weights = [p.tensor.bfloat16() for p in masters]
    low = adamw.FusedAdamW(masters, weights, optim, torch.bfloat16)
    wide = adamw.FusedAdamW(pieces(torch.float32), (), optim, torch.bfloat16)
    grads = [randn(*p.shape, seed=i, dtype=torch.bfloat16) for i, p in enumerate(low.tensors)]
    scale = torch.tensor(0.5)
    for _ in range(2):
        low.step(grads, scale, 1e-2)
        wide.step([g.float() for g in grads], scale, 1e-2)
    for (name, a), (_, b) in zip(low.items(), wide.items(), strict=True):
        assert torch.equal(a, b), name
    assert all(torch.equal(w, p.tensor.bfloat16()) for w, p in zip(weights, masters, strict=True))
    assert low.state(low.pieces[0], "exp_avg").dtype == torch.bfloat16
    assert float(low.state(low.pieces[0], "step")) == 2


def head_gradients(head: plain_loss.Loss, dtype: torch.dtype) -> list[Tensor]:
    """[loss, of hidden, of weight], of a quarter of the loss."""
    hidden, weight = randn(2, 9, 8, dtype=dtype).requires_grad_(), randn(31, 8, seed=1, dtype=dtype).requires_grad_()
    value = head(hidden, weight, torch.arange(18).view(2, 9))
    (value / 4).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [value.detach().double(), hidden.grad.double(), weight.grad.double()]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-6)], ids=str)
def test_loss_is_the_plain_heads(chunk: int | None, dtype: torch.dtype, bound: float) -> None:
    head = loss.head(config.Memory("m", lm_head_chunk=chunk))
    for a, b in zip(head_gradients(head, dtype), head_gradients(plain_loss.lm_loss, dtype), strict=True):
        assert (a - b).norm() <= bound * b.norm()
    assert plain_loss.compiled(head) is head


def test_loss_keeps_one_tensor_of_the_logits_size() -> None:
    saved: list[Tensor] = []
    hidden, weight = randn(2, 9, 8).requires_grad_(), randn(31, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss.fused_loss(hidden, weight, torch.arange(18).view(2, 9))
    assert sum(t.numel() == 18 * 31 for t in saved) == 1


@pytest.mark.parametrize("down", [swiglu.down, lambda g, u, w: F.linear(swiglu.gated(g, u), w)], ids=["down", "gated"])
def test_swiglu_is_the_plain_projection(down: Callable[..., Tensor]) -> None:
    gate, up, weight = (randn(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 5, 6), (2, 5, 6), (4, 6)]))
    out = down(gate, up, weight)
    want = F.linear(F.silu(gate) * up, weight)
    assert (out - want).abs().max() < 1e-14
    grad = randn(2, 5, 4, seed=9)
    got, expected = (torch.autograd.grad(o, (gate, up, weight), grad) for o in (out, want))
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(got, expected, strict=True))


def test_rope_is_the_plain_rotation_and_turns_gradients_back() -> None:
    q, k = randn(2, 5, 4, 8).requires_grad_(), randn(2, 5, 2, 8, seed=1).requires_grad_()
    angle = randn(5, 4, seed=2)
    out, want = (turn(q, k, angle.cos(), angle.sin()) for turn in (rope.turn, plain_rope.turn))
    grads = randn(2, 4, 5, 8, seed=3).transpose(1, 2), randn(2, 5, 2, 8, seed=4)
    got, expected = (torch.autograd.grad(o, (q, k), grads) for o in (out, want))
    for a, b in zip((*out, *got), (*want, *expected), strict=True):
        assert (a - b).abs().max() < 1e-14


def norms(readers: int, kernel: bool) -> tuple[list[Tensor], list[Tensor]]:
    """([x and weight], [x after the norm, its result for each reader]), by the kernel or by torch."""
    x, module = randn(2, 5, 8).requires_grad_(), torch.nn.RMSNorm(8, eps=1e-2, dtype=torch.float64)
    torch.nn.init.normal_(module.weight, 1.0, 0.1, torch.Generator().manual_seed(4))
    if not kernel:
        return [x, module.weight], [x * 1, *(module(x),) * readers]
    after, branch = norm.normed(x, module, readers)
    return [x, module.weight], [after, *((branch,) if isinstance(branch, Tensor) else branch)]


@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_norm_adds_the_gradients_of_all_its_results(readers: int, used: int) -> None:
    grads = randn(2, 5, 8, seed=1), *(randn(5, 2, 8, seed=2 + i).transpose(0, 1) for i in range(min(used, readers)))
    found = []
    for kernel in (True, False):
        leaves, outs = norms(readers, kernel)
        assert len({out.data_ptr() for out in outs[1:]}) == 1, "aliases, no copies"
        outs = outs[: len(grads)]  # of a reader without a gradient nothing is added
        found.append([*outs, *torch.autograd.grad(outs, leaves, grads)])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-13


def test_operators_are_registered_as_torch_wants_them() -> None:
    gate = randn(2, 3, 4).requires_grad_()
    torch.library.opcheck(swiglu.product, (gate, gate.detach().clone()))
    for backward in (swiglu.backward, swiglu.backward_again):
        torch.library.opcheck(backward, (gate.detach(),) * 3)
    angle = randn(3, 2)
    q = randn(2, 3, 2, 4).requires_grad_()
    torch.library.opcheck(rope.rope, (q, q.detach().clone(), angle.cos(), angle.sin(), False))
    rows = randn(2, 3, 4, 4)
    torch.library.opcheck(stacked.turn_rows, (rows.clone(), angle.cos(), angle.sin(), 2, 1))
    torch.library.opcheck(stacked.turned_back, (*rows.split((2, 1, 1), 2), angle.cos(), angle.sin()))
    torch.library.opcheck(stacked.joint_product, (rows,))
    torch.library.opcheck(stacked.joint_backward, (randn(2, 3, 4, 2), rows))
    for readers in (1, 3):
        residual, x, *grads = (randn(2, 3, 4, seed=i) for i in range(2 + readers))
        torch.library.opcheck(norm.backward, (residual, grads, x, randn(4), 1e-5))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "rank", "n"), [(1, 0, 128), (2, 1, 5000), (3, 0, 4096)])
def test_ordered_sum(ranks: int, rank: int, n: int, add: bool) -> None:
    given.same_bits(*given.ordered_case(ranks, rank, n, torch.bfloat16, add, "cpu"))
