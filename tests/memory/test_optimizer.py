"""Optimizer state elsewhere, in fewer bits, or none: against torch's own AdamW and against arithmetic."""

from dataclasses import replace

import pytest
import torch

from tests.memory import cases
from tests.memory.cases import Case
from tests.parallel.ranks import Ranks
from train import config
from train.memory import streamed
from train.memory.host import HostOptimizer
from train.memory.optimizer import Optimizers
from train.parallel.adamw import AdamW, Piece

SIZES = (7, 300, 1, 64)


def pieces() -> list[Piece]:
    generator = torch.Generator().manual_seed(0)
    return [Piece(f"p{i}", torch.randn(n, generator=generator), i % 2 == 0) for i, n in enumerate(SIZES)]


def steps(optimizer: AdamW, count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        grads = [torch.randn(n, generator=generator) for n in SIZES]
        optimizer.step(grads, torch.tensor(0.5), 1e-2 / (step + 1))
        if isinstance(optimizer, HostOptimizer):
            optimizer.finish()
    return {name: tensor.clone() for name, tensor in optimizer.items()}


def make(memory: dict[str, str] | None = None, **optim: object) -> AdamW:
    cfg = config.Train(
        memory=config.Memory("m", **(memory or {})),  # type: ignore[arg-type]
        optim=config.Optim(**({"name": "adamw", "clip_norm": None} | optim)),  # type: ignore[arg-type]
    )
    return Optimizers(cfg, torch.device("cpu")).make(pieces())


@pytest.mark.parametrize("chunk", [1, 300, 10**6])
@pytest.mark.parametrize("where", ["optimizer", "full"])
def test_offloaded_is_the_same_update(where: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "CHUNK_BYTES", chunk)
    want, got = steps(make()), steps(make({"optimizer_offload": where}))
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]


def test_bf16_moments_are_rounded_once_a_step() -> None:
    want, got = steps(make(), 1), steps(make(state_dtype="bf16"), 1)
    for name, tensor in got.items():
        moment = "exp_avg" in name
        assert tensor.dtype == (torch.bfloat16 if moment else torch.float32)
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name  # the first update reads no rounded moment
    later, plain = steps(make(state_dtype="bf16")), steps(make())
    for name in ("p0.weight", "p1.weight"):
        assert 0 < (later[name] - plain[name]).norm() < 1e-2 * plain[name].norm()


def test_bf16_moments_on_the_host_are_those_on_the_device() -> None:
    want, got = steps(make(state_dtype="bf16")), steps(make({"optimizer_offload": "optimizer"}, state_dtype="bf16"))
    assert not [name for name in want if not torch.equal(want[name], got[name])]


@pytest.mark.parametrize("where", ["none", "full"])
def test_sign_sgd(where: str) -> None:
    optimizer = make({"optimizer_offload": where}, name="sign_sgd", weight_decay=0.1)
    want = {p.name: p.tensor.clone() for p in optimizer.pieces}
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        lr = 1e-2 / (step + 1)
        for piece, n in zip(optimizer.pieces, SIZES, strict=True):
            grad = torch.randn(n, generator=generator)
            want[piece.name] = want[piece.name] * (1 - lr * 0.1 * piece.decay) - lr * grad.sign()
    got = steps(optimizer)
    assert set(got) == {f"{name}.weight" for name in want}
    for name, tensor in want.items():
        assert torch.allclose(got[f"{name}.weight"], tensor, rtol=1e-6, atol=1e-7)


def test_sign_sgd_trains() -> None:
    out = cases.train(0, 1, replace(Case("ddp"), steps=8).with_(optim={"name": "sign_sgd", "lr": 3e-3}))
    assert out.losses[-1] != out.losses[0] and all(torch.isfinite(w).all() for w in out.weights.values())


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("announce", [False, True])
def test_updates_in_backward_are_those_after_it(accum: int, tied: bool, announce: bool) -> None:
    case = replace(Case("ddp"), grad_accum=accum, tied=tied, announce=announce)
    got, want = cases.train(0, 1, case.with_({"optimizer_offload": "full"})), cases.train(0, 1, case)
    assert not [name for name in want.state if not torch.equal(got.state[name], want.state[name])]
    assert got.norms == pytest.approx(want.norms, rel=1e-6)


def test_updates_begin_in_backward() -> None:
    case = Case("ddp").with_({"optimizer_offload": "full"})
    cfg, dp, model = cases.setup(0, 1, case)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    dp.announce(cfg.optim.lr)
    cases.one_step(dp, 0, 1, case, 0)
    assert all(p.grad is None for p in model.parameters())  # gone to the host
    for owner in dp.owners():
        owner.finish()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if p.ndim == 2)
    dp.step(cfg.optim.lr)


def test_a_failing_update_is_raised() -> None:
    optimizer = make({"optimizer_offload": "full"})
    assert isinstance(optimizer, HostOptimizer)
    optimizer.deliver(0, torch.zeros(3), None)  # another shape
    with pytest.raises(RuntimeError, match="shape"):
        optimizer.finish()


def test_state_of_an_offloaded_run_continues_another(tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = Case("ddp").with_({"optimizer_offload": "optimizer"})
    whole = cases.train(0, 1, replace(case, steps=4))
    cfg, dp, _ = cases.setup(0, 1, case)
    for step in range(2):
        cases.one_step(dp, 0, 1, case, step)
        dp.step(cfg.optim.lr)
    torch.save(dp.state_dict(), tmp_path / "state")
    _, other, _ = cases.setup(0, 1, case)
    other.load_state_dict(torch.load(tmp_path / "state"))
    for step in range(2, 4):
        cases.one_step(other, 0, 1, case, step)
        other.step(cfg.optim.lr)
    assert not [n for n, w in other.full_weights().items() if not torch.equal(w, whole.weights[n])]


@pytest.mark.parametrize("reduction", ["ddp", "zero2o"])
def test_gradient_dtype(reduction: str) -> None:
    base = Case(reduction, "bf16", grad_accum=4)
    exact = cases.train(0, 1, replace(base, dtype="fp32", steps=1))
    low, high = (cases.train(0, 1, replace(base, steps=1).with_(optim={"grad_dtype": g})) for g in ("bf16", "fp32"))
    far = [abs(out.norms[0] - exact.norms[0]) / exact.norms[0] for out in (low, high)]
    assert far[1] < 0.02 and low.weights.keys() == high.weights.keys()
    assert any(not torch.equal(low.weights[n], w) for n, w in high.weights.items())


def test_fsdp_reduces_in_the_gradients_dtype(two: Ranks) -> None:
    base = replace(Case("fsdp", "bf16"), steps=1)
    plain, low, high = (two.run(cases.train, base.with_(optim={"grad_dtype": g}))[0] for g in (None, "bf16", "fp32"))
    assert not [n for n, w in plain.weights.items() if not torch.equal(high.weights[n], w)]
    assert [n for n, w in plain.weights.items() if not torch.equal(low.weights[n], w)]
    assert low.norms[0] == pytest.approx(plain.norms[0], rel=0.02)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("on_device", (False, True))
def test_adamw_is_torchs_bit_for_bit(dtype: torch.dtype, on_device: bool) -> None:
    """Beside the optimizer object, with a learning rate that changes, as a number and as a tensor (of fp32's precision)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (3,), (16, 4), (1,), (2, 3, 4)]
    ours = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
    theirs = [torch.nn.Parameter(t.clone()) for t in ours]
    optim = config.Optim("adamw", weight_decay=0.3)
    owner = AdamW([Piece(str(i), t, t.ndim >= 2) for i, t in enumerate(ours)], optim)
    groups = [
        {"params": [p for p in theirs if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in theirs if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    for step in range(6):
        lr = torch.tensor(1e-2 / (step + 1))
        for p in theirs:
            p.grad = torch.randn(p.shape, dtype=dtype, generator=generator)
        grads = [p.grad.clone() for p in theirs if p.grad is not None]
        for group in reference.param_groups:
            group["lr"] = lr.item()
        reference.step()
        owner.step(grads, torch.ones((), dtype=dtype), lr if on_device else lr.item())
    for piece, p in zip(owner.pieces, theirs, strict=True):
        assert torch.equal(piece.tensor, p.detach())
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(owner.state(piece, kind), reference.state[p][kind])
