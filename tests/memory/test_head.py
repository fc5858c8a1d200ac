"""The chunked LM head against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from train import config
from train.model import loss

TOKENS, DIM, VOCAB = 60, 16, 200


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, TOKENS // 3, DIM, generator=generator, dtype=torch.float64)
    weight = 0.2 * torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (3, TOKENS // 3), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(head: loss.Loss, dtype: torch.dtype, exact: bool = False) -> list[Tensor]:
    """[loss, of hidden, of weight], of half the loss; `exact`: in fp64 from the same rounded inputs."""
    hidden, weight, targets = inputs(dtype)
    if exact:
        hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    value = head(hidden, weight, targets)
    (value / 2).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [value.detach().double(), hidden.grad.double(), weight.grad.double()]


def head(chunk: int | None, kernel: str = "own") -> loss.Loss:
    return loss.build(config.Memory("m", lm_head_chunk=chunk, lm_head_kernel=kernel))


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 20, 60, 1000])
def test_equal_in_fp64(chunk: int) -> None:
    assert max(errors(gradients(head(chunk), torch.float64), gradients(head(None), torch.float64))) < 1e-14


# bf16: 8 bits; the weight's gradient is the sum of three chunks, each rounded once by the CPU's matmul
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)], ids=str)
def test_as_close_to_the_exact_gradients_as_the_plain_head(dtype: torch.dtype, bound: float) -> None:
    exact = gradients(head(None), dtype, exact=True)
    plain, chunked = errors(gradients(head(None), dtype), exact), errors(gradients(head(24), dtype), exact)
    assert max(chunked) < bound
    assert all(c <= 1.5 * p + 1e-7 for c, p in zip(chunked, plain, strict=True))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has none")
def test_torchs_own_head() -> None:
    want = gradients(head(None), torch.float32)
    assert max(errors(gradients(head(24, "torch"), torch.float32), want)) < 1e-6


def test_torchs_own_head_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(config.ConfigError, match="memory.lm_head_kernel=torch: torch .* has no linear_cross_entropy"):
        head(24, "torch")


def test_no_tensor_as_large_as_the_logits() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    hidden, weight, targets = inputs(torch.float32)
    with Largest() as seen:
        head(20)(hidden, weight, targets).backward()
    assert seen.elements == 20 * VOCAB
    with Largest() as seen:
        head(None)(hidden, weight, targets).backward()
    assert seen.elements == TOKENS * VOCAB


def test_a_loss_without_gradients() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        assert float(head(7)(hidden, weight, targets)) == pytest.approx(
            float(head(None)(hidden, weight, targets)), rel=1e-6
        )


def test_compiled() -> None:
    want = gradients(head(None), torch.float32)
    assert max(errors(gradients(loss.compiled(head(24)), torch.float32), want)) < 1e-6
