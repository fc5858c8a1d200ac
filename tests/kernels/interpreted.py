"""Every kernel against its plain form, run by Triton's interpreter on a CPU: collected by test_interpreted.py in a process of
its own, since Triton reads TRITON_INTERPRET once."""

import pytest
import torch
from torch import Tensor

from tests.kernels import given
from tests.kernels.given import randn
from train.kernels import backend, rope, stacked, swiglu
from train.model import rope as plain_rope

assert backend.triton_runs(torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", [torch.bfloat16, None], ids=str)
def test_adamw(grad: torch.dtype, state: torch.dtype, weight: torch.dtype | None) -> None:
    steps = 1 if state == torch.bfloat16 else 3  # the interpreter cuts bf16 off where a GPU rounds to nearest
    given.close(*given.adamw_case([5000, 1, 2048, 4096, 130], grad, state, weight, "cpu", steps=steps), ulps=2)


def test_adamw_of_masters_that_lie_askew() -> None:
    given.close(*given.adamw_case([2500, 7], torch.float32, torch.float32, torch.bfloat16, "cpu", offset=1), ulps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_norms(dtype: torch.dtype, offset: int) -> None:
    got, want = given.norms_case([8192, 5000, 1, 20000, 8193], dtype, "cpu", offset)
    given.close(got, want, ulps=32)  # of fp64, in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [50, 8192, 20000])
def test_loss(vocab: int, dtype: torch.dtype) -> None:
    given.close(*given.loss_case(5, vocab, dtype, "cpu"), ulps=32)  # exponents of -15: their rounding


def test_loss_of_logits_far_from_zero() -> None:
    from train.kernels.jit.loss import cross_entropy

    logits = torch.tensor([[3e4, -3e4, 1e4], [-3e4, -3e4, -3e4]])
    losses = cross_entropy(logits, torch.tensor([1, 0]), 1.0)
    assert losses.tolist() == pytest.approx([6e4, 1.0986123])
    assert logits[0].tolist() == [1.0, -1.0, 0.0] and torch.isfinite(logits).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    grad, gate, up = (randn(3, 1000, seed=i, dtype=dtype) * 4 for i in range(3))
    got = swiglu_both(grad, gate, up)
    given.close(got, plainly(swiglu_both, grad, gate, up), ulps=1 if dtype == torch.bfloat16 else 4)
    assert torch.equal(got[0], got[-1])


def swiglu_both(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return [swiglu.product(gate, up), *swiglu.backward(grad, gate, up), *swiglu.backward_again(grad, gate, up)]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 1, 24)])
def test_rope(heads: int, kv_heads: int, d: int, dtype: torch.dtype, inverse: bool) -> None:
    q = randn(2, heads, 5, d, dtype=dtype).transpose(1, 2)  # as an attention's gradients may lie
    k = randn(2, 5, kv_heads, d, seed=1, dtype=dtype)
    angle = randn(5, d // 2, seed=2, dtype=given.WIDE[dtype])
    cos, sin = angle.cos(), angle.sin()
    got = rope.rope(q, k, cos, sin, inverse)
    given.close(got, plain_rope.turn(q, k, cos, -sin if inverse else sin), ulps=1)
    assert got[0].is_contiguous() and got[1].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 1, 24)])
def test_rope_of_rows(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    """In place there, and back from gradients that lie as attention's may."""
    angle = randn(5, d // 2, seed=2, dtype=given.WIDE[dtype])

    def both() -> list[Tensor]:
        rows = randn(2, 5, heads + 2 * kv_heads, d, dtype=dtype)
        stacked.turn_rows(rows, angle.cos(), angle.sin(), heads, kv_heads)
        q, k, v = rows.split((heads, kv_heads, kv_heads), 2)
        q, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v))
        return [rows, stacked.turned_back(q, k, v, angle.cos(), angle.sin())]

    given.close(both(), plainly(both), ulps=1 if dtype != torch.bfloat16 else 2)  # of what is rounded twice


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ffn", [1000, 2048, 2056])
def test_joint_swiglu(ffn: int, dtype: torch.dtype) -> None:
    rows, grad = randn(2, 3, 2 * ffn, dtype=dtype) * 4, randn(2, 3, ffn, seed=1, dtype=dtype)

    def both() -> list[Tensor]:
        return [stacked.joint_product(rows), stacked.joint_backward(grad, rows)]

    given.close(both(), plainly(both), ulps=1 if dtype == torch.bfloat16 else 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(4, 64), (1, 24), (3, 1000)])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_norm(rows: int, dim: int, dtype: torch.dtype, readers: int) -> None:
    given.close(*given.norm_case(rows, dim, dtype, "cpu", readers), ulps=2)  # the interpreter cuts bf16 off


def plainly(function, *args):  # type: ignore[no-untyped-def]
    """By the operators' plain form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return function(*args)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "rank", "n"), [(1, 0, 128), (2, 1, 5000), (3, 0, 4096)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordered_sum(ranks: int, rank: int, n: int, dtype: torch.dtype, add: bool) -> None:
    given.same_bits(*given.ordered_case(ranks, rank, n, dtype, add, "cpu"))
