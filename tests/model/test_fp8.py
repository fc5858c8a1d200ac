"""fp8 matmuls: exact against a quantisation by hand, close to the fp32 product, and nothing non-finite lost on the way."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.model.tiny import build, tokens
from train.config import ConfigError, Memory
from train.memory import recompute
from train.model import fp8
from train.model.transformer import Transformer

SCALINGS = ("tensorwise", "rowwise")
#: dtype → (bits of mantissa, exponent of the smallest normal number, largest number): arXiv 2209.05433, table 1
FORMATS = {fp8.E4M3: (3, -6, 448.0), fp8.E5M2: (2, -14, 57344.0)}
#: Of gaussian operands by norm. A mantissa of m bits is off by 2^-(m+1) at most and by 0.41 of that on average (rms), and the
#: two operands' errors add up in squares: 0.037 for e4m3 on both sides, 0.058 with e5m2 on one.
BOTH_E4M3, WITH_E5M2 = 0.042, 0.065


def by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (fp64, within range) rounded to the nearest number of the format, ties to even."""
    mantissa, low, _ = FORMATS[dtype]
    exponent = x.abs().clamp(min=2.0**low).log2().floor().clamp(min=low)
    step = 2.0 ** (exponent - mantissa)
    return (x / step).round() * step


def quantised_by_hand(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """fp8's values of x, in fp64, and the fp32 scale that x was multiplied by."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = FORMATS[dtype][2] / amax.float()
    if dim is not None:
        scale = torch.tensor([2.0 ** math.floor(math.log2(v)) for v in scale.flatten()]).view(scale.shape)
    return by_hand((x.float() * scale).double(), dtype), scale


def kept(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """What fp8 keeps of x, in fp64: scaled, rounded, and scaled back."""
    values, scale = quantised_by_hand(x, dtype, dim)
    return values / scale.double()


def three(linear: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a linear map."""
    x = x.clone().requires_grad_()
    linear.weight.grad = None
    y = linear(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, linear.weight.grad


def linear(w: Tensor, scaling: str) -> fp8.Linear:
    plain = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(w.clone())
    return fp8.Linear(plain, scaling)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", (None, 0, 1))
@pytest.mark.parametrize("size", (1e-30, 1e-3, 1.0, 1e30))
def test_quantised_values_are_those_by_hand(dtype: torch.dtype, dim: int | None, size: float) -> None:
    x = (drawn(32, 48) * size).bfloat16()
    values, inverse = fp8.quantise(x, dtype, dim)
    assert values.dtype == dtype and inverse.dtype == torch.float32
    want, scale = quantised_by_hand(x, dtype, dim)
    assert torch.equal(values.double(), want) and torch.equal(inverse, 1 / scale)
    assert float(values.float().abs().max()) <= FORMATS[dtype][2]


def whole_numbers(shape: tuple[int, int], unit: float, seed: int) -> Tensor:
    """bf16 multiples of `unit` up to 448 of them, as many in every row and column: what fp8 keeps of them is whole too, and
    fp32 adds their products up without rounding."""
    x = torch.randint(-448, 449, shape, generator=torch.Generator().manual_seed(seed))
    x[torch.arange(shape[0]), torch.arange(shape[0]) % shape[1]] = 448
    x[torch.arange(shape[1]) % shape[0], torch.arange(shape[1])] = 448
    return (x * unit).bfloat16()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_exact_against_quantise_multiply_scale(scaling: str) -> None:
    along, across = (1, 0) if scaling == "rowwise" else (None, None)
    of_dy = fp8.E4M3 if scaling == "rowwise" else fp8.E5M2
    x, w, dy = whole_numbers((32, 16), 0.25, 0), whole_numbers((48, 16), 2**-7, 1), whole_numbers((32, 48), 2**-20, 2)
    y, dx, dw = three(linear(w, scaling), x, dy)
    e4m3 = fp8.E4M3
    for got, a, b in (
        (y, kept(x, e4m3, along), kept(w, e4m3, along).t()),
        (dx, kept(dy, of_dy, along), kept(w, e4m3, across)),
        (dw, kept(dy, of_dy, across).t(), kept(x, e4m3, across)),
    ):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, (a @ b).to(torch.bfloat16))
        assert relative(got, (x.double() @ w.double().t()) if got is y else a @ b) < 0.1
    assert not torch.equal(y, (x.double() @ w.double().t()).to(torch.bfloat16))  # rounding to fp8 did happen


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("size", (1.0, 1e-6))
def test_close_to_the_fp32_product(scaling: str, size: float) -> None:
    x, w, dy = drawn(64, 96, seed=0), drawn(80, 96, seed=1) * 0.02, drawn(64, 80, seed=2) * size
    y, dx, dw = three(linear(w.bfloat16(), scaling), x.bfloat16(), dy.bfloat16())
    back = BOTH_E4M3 if scaling == "rowwise" else WITH_E5M2
    assert 0.01 < relative(y, x @ w.t()) < BOTH_E4M3
    assert 0.01 < relative(dx, dy @ w) < back and 0.01 < relative(dw, dy.t() @ x) < back


def test_row_scales_keep_small_rows() -> None:
    """Rows that differ by 2^20: each as good as alone with its own scale; with one scale the small ones are lost."""
    x, w = drawn(32, 64), drawn(48, 64, seed=1)
    x[::2] *= 2.0**-20
    exact = x[::2] @ w.t()
    rows, one = (linear(w.bfloat16(), s)(x.bfloat16()).detach()[::2] for s in ("rowwise", "tensorwise"))
    assert relative(rows, exact) < BOTH_E4M3 and relative(one, exact) > 0.5


@pytest.mark.parametrize("scaling", SCALINGS)
def test_plain_operations_mean_the_same(scaling: str) -> None:
    """torch._scaled_mm against the dequantised product summed in fp64, within half a unit of bf16's last place."""
    a, b = (fp8.quantise(t, fp8.E4M3, dim if scaling == "rowwise" else None)
            for t, dim in ((drawn(32, 64), 1), (drawn(64, 48, seed=1), 0)))  # fmt: skip
    got = fp8.scaled_mm(a, b, torch.bfloat16, fast=False).double()
    want = fp8.dequantised_mm(a, b, torch.float64, torch.float64)
    assert ((got - want).abs() <= want.abs() * 2.0**-8 + 1e-6).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros(scaling: str) -> None:
    """All-zero operands: amax is 0, the scale stays finite, results are zero, and the other gradient is unharmed."""
    zero, x, w, dy = torch.zeros(32, 64), drawn(32, 64), drawn(48, 64, seed=1), drawn(32, 48, seed=2)
    for scale in fp8.quantise(zero, fp8.E4M3)[1:] + fp8.quantise(zero, fp8.E5M2, 0)[1:]:
        assert scale.isfinite().all() and (scale > 0).all()
    y, dx, dw = three(linear(w.bfloat16(), scaling), zero.bfloat16(), dy.bfloat16())
    assert not y.any() and not dw.any() and relative(dx, dy @ w) < WITH_E5M2
    y, dx, dw = three(linear(w.bfloat16(), scaling), x.bfloat16(), torch.zeros(32, 48).bfloat16())
    assert not dx.any() and not dw.any() and relative(y, x @ w.t()) < BOTH_E4M3


@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_shows(scaling: str, bad: float) -> None:
    """Wherever plain bf16 has an inf or NaN, fp8 has one; with row scales finite rows stay finite."""
    x, w, dy = (t.bfloat16() for t in (drawn(32, 64), drawn(48, 64, seed=1), drawn(32, 48, seed=2)))
    for which in range(3):
        args = [x.clone(), w.clone(), dy.clone()]
        args[which][3, 5] = bad
        plain = nn.Linear(64, 48, bias=False)
        plain.weight = nn.Parameter(args[1])
        want = three(plain, args[0], args[2])
        got = three(linear(args[1], scaling), args[0], args[2])
        for g, t in zip(got, want, strict=True):
            assert not g[~t.isfinite()].isfinite().any()
            if scaling == "rowwise":
                assert g[t.isfinite()].isfinite().all()


def test_which_layers() -> None:
    """The seven matrices of a layer, under the names that they had; not embedding, norms and head."""
    model = build(torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    fp8.apply(model, "tensorwise")
    assert [name for name, _ in model.named_parameters()] == names
    found = {name for name, module in model.named_modules() if isinstance(module, fp8.Linear)}
    matrices = [f"attention.{w}" for w in ("wq", "wk", "wv", "wo")] + [f"ffn.{w}" for w in ("w_gate", "w_up", "w_down")]
    assert found == {f"layers.{i}.{name}" for i in range(2) for name in matrices}
    assert type(model.head) is nn.Linear


SHAPE = {"dim": 32, "layers": 2, "head_dim": 16, "ffn": 48}


def gradients(scaling: str | None, mode: str = "none", prepare: Callable[[Transformer], Any] = id) -> dict[str, Tensor]:
    """Loss and gradients of a small model."""
    model = build(torch.bfloat16, "flash", **SHAPE)
    if scaling is not None:
        fp8.apply(model, scaling)
    recompute.apply(model, Memory("m", mode))
    prepare(model)
    loss = model(*tokens(2, 16))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def traced(model: Transformer) -> None:
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_layers_share_one_graph_and_recompute_is_bitwise(scaling: str) -> None:
    eager = gradients(scaling)
    again = gradients(scaling, "full" if scaling == "tensorwise" else "selective")
    assert all(torch.equal(again[name], value) for name, value in eager.items())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph = gradients(scaling, "none", traced)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all(torch.equal(graph[name], value) for name, value in eager.items())


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.double().flatten() for g in grads.values()])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradients_of_a_model_beside_bf16(scaling: str) -> None:
    """Over two layers within 10 % by norm; the loss within 1e-3."""
    plain, eight = gradients(None), gradients(scaling)
    assert float(eight["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-3)
    assert 0.001 < relative(flat(eight), flat(plain)) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_inductor_equals_eager_and_hides_nothing(scaling: str) -> None:
    torch._dynamo.reset()
    x, w, dy = (t.bfloat16() for t in (drawn(32, 64), drawn(48, 64, seed=1), drawn(32, 48, seed=2)))
    eager, compiled = linear(w, scaling), linear(w, scaling)
    compiled.compile(fullgraph=True)
    for got, want in zip(three(compiled, x, dy), three(eager, x, dy), strict=True):
        assert relative(got, want) < 1e-3
    for bad in (math.inf, math.nan):
        x[3, 5] = bad
        y, _, dw = three(compiled, x, dy)
        assert not y[3].isfinite().any() and not dw[:, 5].isfinite().any()


def test_tried_out_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for scaling in SCALINGS:
        fp8.check(torch.device("cpu"), scaling)
    monkeypatch.delattr(torch, "_scaled_mm")  # a torch without it
    with pytest.raises(
        ConfigError, match="^precision.scaling=tensorwise: torch .* no such fp8 matmul for this CPU: .*$"
    ):
        fp8.check(torch.device("cpu"), "tensorwise")


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_step_on_the_gpu_beside_bf16(scaling: str, compiled: bool) -> None:
    """Loss and all gradients of one step against bf16's on the same weights."""
    device, drawn_tokens = torch.device("cuda"), [t.cuda() for t in tokens(2, 64)]
    found = []
    for which in (None, scaling):
        torch._dynamo.reset()
        model = build(torch.bfloat16, "flash", **{**SHAPE, "dim": 128, "head_dim": 64, "ffn": 256}).to(device)
        if which is not None:
            fp8.check(device, which)
            fp8.apply(model, which)
        if compiled:
            model.compile_layers()
        loss = model(*drawn_tokens)
        loss.backward()
        found.append((float(loss), flat({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})))
    (plain_loss, plain), (loss, eight) = found
    assert loss == pytest.approx(plain_loss, rel=2e-3)
    assert 0.001 < relative(eight, plain) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_gpus_matmuls_mean_the_same(scaling: str) -> None:
    """Against the dequantised product in fp64: within bf16's rounding, and fast accumulation's 14 bits of mantissa."""
    x, w, dy = (t.cuda() for t in (drawn(256, 512), drawn(384, 512, seed=1), drawn(256, 384, seed=2)))
    got = three(linear(w.bfloat16(), scaling), x.bfloat16(), dy.bfloat16())
    want = three(linear(w.bfloat16().cpu(), scaling), x.bfloat16().cpu(), dy.bfloat16().cpu())
    for g, t in zip(got, want, strict=True):
        assert relative(g.cpu(), t) < 0.01
