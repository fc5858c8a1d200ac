"""Every kernel on a GPU: its plain form's numbers, the same bits twice, no host that waits, less memory; models and runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels import given
from tests.kernels.test_model import configured
from tests.memory.test_head import errors
from tests.model.tiny import build
from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.test_bitwise import assert_bitwise
from tests.parallel.test_equality import FP64, assert_equal_runs, reference
from train import config
from train.kernels import adamw, apply, backend, loss, rope, stacked, swiglu
from train.memory import levers
from train.model import loss as plain_loss
from train.model import rope as plain_rope
from train.model.transformer import gated
from train.parallel.adamw import AdamW, Piece

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SIZES = [2048 * 6144, 128, 2048, 4096 * 8, 1]


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    assert backend.triton_runs(torch.device("cuda")), "torch's CUDA build brings Triton"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:-1]], ids=["odd", "even"])
def test_adamw(grad: torch.dtype, state: torch.dtype, sizes: list[int]) -> None:
    # a rounding of the moments that falls the other way moves the next update by 2**-9 of it: one step there
    got, want = given.adamw_case(sizes, grad, state, torch.bfloat16, "cuda", steps=1 if state == torch.bfloat16 else 3)
    given.close(got, want, ulps=2)
    again, _ = given.adamw_case(sizes, grad, state, torch.bfloat16, "cuda", steps=1 if state == torch.bfloat16 else 3)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "offset"), [(SIZES, 0), (SIZES[:-1], 0), ([2**26, *SIZES], 1)], ids=["odd", "even", "askew"]
)
def test_norms(sizes: list[int], offset: int, dtype: torch.dtype) -> None:
    got, want = given.norms_case(sizes, dtype, "cuda", offset)
    given.close(got, want, ulps=1e5)  # of fp64; fp32 that adds up squares is good to 1e9 of them
    assert all(torch.equal(a, b) for a, b in zip(got, given.norms_case(sizes, dtype, "cuda", offset)[0], strict=True))


def test_adamw_is_torchs_fused_one() -> None:
    optim = config.Optim("adamw", weight_decay=0.1)
    made = [
        [Piece(f"p{i}", randn(n, seed=i, dtype=torch.float32), i != 1) for i, n in enumerate(SIZES)] for _ in range(2)
    ]
    ours, theirs = adamw.FusedAdamW(made[0], (), optim, None), AdamW(made[1], optim)
    scale = torch.tensor(0.3, device="cuda")
    for t in range(10):
        grads = [randn(n, seed=10 * t + i) for i, n in enumerate(SIZES)]
        with cases.no_host_synchronisation(torch.device("cuda")):
            ours.step(grads, scale, 1e-3)
            theirs.step([g.float() for g in grads], scale, 1e-3)
    want = dict(theirs.items())
    for name, tensor in ours.items():
        # units in the last place of the largest: torch multiplies in fp64 and rounds once a line, the kernel in fp32
        assert (tensor - want[name]).abs().max() <= 4 * torch.finfo(torch.float32).eps * want[name].abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [50, 8192, 32768, 50257])
def test_loss(vocab: int, dtype: torch.dtype) -> None:
    got, want = given.loss_case(64, vocab, dtype, "cuda")
    given.close(got, want, ulps=32)
    assert all(torch.equal(a, b) for a, b in zip(got, given.loss_case(64, vocab, dtype, "cuda")[0], strict=True))


def test_head_of_bf16_is_as_close_as_inductors_and_has_the_logits_once() -> None:
    hidden, weight = randn(4, 1024, 256).requires_grad_(), (randn(32768, 256, seed=1) * 0.05).requires_grad_()
    targets = torch.randint(32768, (4, 1024), device="cuda")

    def gradients(head: plain_loss.Loss, exact: bool = False) -> tuple[list[torch.Tensor], int]:
        x, w = (t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in (hidden, weight))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = head(x, w, targets)
        found = [value, *torch.autograd.grad(value / 2, (x, w))]
        return [t.detach().double() for t in found], torch.cuda.max_memory_allocated() - before

    exact, _ = gradients(plain_loss.lm_loss, exact=True)
    compiled = torch.compile(plain_loss.lm_loss, fullgraph=True)
    gradients(compiled)
    (plain, most), (ours, least) = gradients(compiled), gradients(loss.fused_loss)
    assert all(a <= 1.5 * b + 1e-7 for a, b in zip(errors(ours, exact), errors(plain, exact), strict=True))
    logits = 4096 * 32768 * 2
    print(f"peak, in logits: {least / logits:.2f}, Inductor's {most / logits:.2f}")
    assert least < 1.2 * logits and least <= 1.05 * most, (least / logits, most / logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    gate, up, grad = (randn(300, 1001, seed=i, dtype=dtype) * 3 for i in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    out = gated(*leaves)
    want = [out, *torch.autograd.grad(out, leaves, grad.double())]
    got = [swiglu.product(gate, up), *swiglu.backward(grad, gate, up)]
    again = swiglu.backward_again(grad, gate, up)
    assert all(torch.equal(a, b) for a, b in zip(again, [*got[1:], got[0]], strict=True))
    # the GPU's exp2 in fp32 is good to 2 units, and its argument, of up to 13 here, is rounded before it
    ulps = 8 if dtype == torch.float32 else 2
    for a, b in zip(got, want, strict=True):
        assert (a - b.to(dtype)).abs().max() <= ulps * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(16, 8, 128), (32, 8, 64), (3, 1, 24)])
def test_rope(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    q, k = (
        randn(2, 100, heads, d, dtype=dtype).requires_grad_(),
        randn(2, 100, kv_heads, d, dtype=dtype).requires_grad_(),
    )
    cfg = config.Model("m", head_dim=d)
    cos, sin = plain_rope.tables(cfg, 100, dtype, torch.device("cuda"))
    grads = [randn(*t.transpose(1, 2).shape, seed=3, dtype=dtype).transpose(1, 2) for t in (q, k)]

    def both(turn: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        out = turn(q, k, cos, sin)
        return [*out, *torch.autograd.grad(out, (q, k), grads)]

    for a, b in zip(both(rope.turn), both(plain_rope.turn), strict=True):
        assert (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(16, 8, 128), (32, 8, 64), (3, 1, 24)])
def test_rope_of_rows(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    """The bits of `rope`, beside v's."""
    rows = randn(2, 100, heads + 2 * kv_heads, d, dtype=dtype)
    cos, sin = plain_rope.tables(config.Model("m", head_dim=d), 100, dtype, torch.device("cuda"))
    q, k, v = rows.clone().split((heads, kv_heads, kv_heads), 2)
    stacked.turn_rows(rows, cos, sin, heads, kv_heads)
    assert torch.equal(rows, torch.cat((*rope.rope(q, k, cos, sin, False), v), 2))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # as attention's gradients lie
    assert torch.equal(stacked.turned_back(q, k, v, cos, sin), torch.cat((*rope.rope(q, k, cos, sin, True), v), 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "ffn"), [(300, 1000), (70_000, 64), (1000, 6144)])
def test_joint_swiglu(tokens: int, ffn: int, dtype: torch.dtype) -> None:
    """The bits of `swiglu`, of which both are blocks of the same kernels."""
    rows, grad = randn(tokens, 2 * ffn, dtype=dtype) * 3, randn(tokens, ffn, seed=1, dtype=dtype)
    gate, up = rows.chunk(2, -1)
    assert torch.equal(stacked.joint_product(rows), swiglu.product(gate, up))
    assert torch.equal(stacked.joint_backward(grad, rows), torch.cat(swiglu.backward(grad, gate, up), -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(1500, 2048), (40, 8192), (300, 1000), (1, 24), (2000, 128)])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_norm(rows: int, dim: int, dtype: torch.dtype, readers: int) -> None:
    got, want = given.norm_case(rows, dim, dtype, "cuda", readers)
    given.close(got, want, ulps=1 if dtype == torch.bfloat16 else 16)  # thousands of rows are added up for the weight
    again, _ = given.norm_case(rows, dim, dtype, "cuda", readers)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "rank", "n"), [(1, 0, 128), (2, 0, 13 * 2**20), (2, 1, 5000), (8, 3, 128 * 1023)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordered_sum(ranks: int, rank: int, n: int, dtype: torch.dtype, add: bool) -> None:
    given.same_bits(*given.ordered_case(ranks, rank, n, dtype, add, "cuda"))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("kernels", [given.ALL, "rope+swiglu_down", given.STACKED + "+carry"])
def test_a_compiled_model_is_as_close_as_inductors(kernels: str, mode: str) -> None:
    sizes = {"dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 768, "vocab": 1000}
    data = torch.randint(1000, (2, 2, 128), generator=torch.Generator().manual_seed(1)).cuda()

    def gradients(used: str, dtype: torch.dtype, compiled: bool = True) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = (
            build(torch.float32, "flash" if compiled else "math", layers=3, **sizes)
            .to("cuda", torch.bfloat16)
            .to(dtype)
        )
        cfg = configured(used, config.Memory("m", mode if compiled else "none"))
        levers.apply(model, cfg.memory, torch.device("cuda"))
        apply.apply(model, cfg, torch.device("cuda"))
        if compiled:
            model.compile_layers()
        value = model(data[0], data[1])
        value.backward()
        return [value.detach().double(), *(p.grad.double() for p in model.parameters() if p.grad is not None)]

    # weights rounded to bf16 before either: the exact gradients are those of what both compute with
    exact = gradients("inductor", torch.float64, compiled=False)
    plain, ours = (errors(gradients(used, torch.bfloat16), exact) for used in ("inductor", kernels))
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(ours, plain, strict=True)), list(zip(ours, plain, strict=True))


@pytest.mark.parametrize("reduction", ["ddp", "fsdp"])
def test_one_gpu(reduction: str) -> None:
    case = Case(reduction, grad_accum=2, kernels=given.ALL)
    expected = reference(replace(case, kernels="inductor"))
    assert_equal_runs([cases.train(0, 1, replace(case, device="cuda"))], expected, [FP64] * 3)


def test_bf16_twice_the_same() -> None:
    first, second = (cases.train(0, 1, Case("ddp", "bf16", device="cuda", kernels=given.ALL)) for _ in range(2))
    assert_bitwise(first, second)
    assert all(torch.equal(w, first.weights[-1][name].bfloat16()) for name, w in first.model.items())


def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--tokens", "4096", "--repeats", "3", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(row["difference"] for row in json.loads(out.read_text())["kernels"]) < 0.02
