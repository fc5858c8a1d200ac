"""The levers on a GPU: the same numbers, less memory, nothing that waits, and an account that adds up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.lab import statuses, sweep
from tests.memory import cases
from tests.memory.cases import Case
from tests.memory.test_levers_equal import EXACT, HEAD, distance
from train import config
from train.measure.breakdown import GIB, Breakdown
from train.memory import levers, recompute
from train.memory.offload import Offload
from train.model import loss
from train.model.transformer import Transformer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MIB = 2**20


@pytest.mark.parametrize("reduction", ["zero2o", "fsdp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lever", EXACT)
def test_equal_to_the_plain_run(lever: str, dtype: str, reduction: str) -> None:
    """math attention, whose backward is reproducible; an update on the CPU rounds as another kernel does, and may round a
    weight to another bf16: AdamW's eps is then above what that changes in a gradient, else the sign of one that is next to
    nothing decides a whole update."""
    optim = {"eps": 1e-3} if lever == "host" else {}
    case = replace(Case(reduction, dtype), device="cuda", attention="math").with_(optim=optim)
    got, want = cases.train(0, 1, case.with_(EXACT[lever])), cases.train(0, 1, case)
    if lever == "host":
        assert distance(got, want) < (1e-5 if dtype == "fp32" else 2**-7)
    else:
        assert got.losses == want.losses
        assert not [n for n, w in want.weights.items() if not torch.equal(got.weights[n], w)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_chunked_head(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 1000, 256, device=CUDA, dtype=dtype)
    weight = 0.05 * torch.randn(8000, 256, device=CUDA, dtype=dtype)
    targets = torch.randint(8000, (4, 1000), device=CUDA)

    def gradients(head: loss.Loss, wide: bool = False) -> tuple[list[torch.Tensor], int]:
        x, w = ((t.double() if wide else t.clone()).requires_grad_() for t in (hidden, weight))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = head(x, w, targets)
        (value / 2).backward()
        assert x.grad is not None and w.grad is not None
        return [value.detach().double(), x.grad.double(), w.grad.double()], torch.cuda.max_memory_allocated() - before

    chunked = loss.build(config.Memory("m", lm_head_chunk=512))
    exact, _ = gradients(loss.lm_loss, wide=True)
    plain, plain_peak = gradients(loss.lm_loss)
    gradients(loss.compiled(chunked) if compiled else chunked)
    got, peak = gradients(loss.compiled(chunked) if compiled else chunked)
    for mine, theirs, truth in zip(got, plain, exact, strict=True):
        assert (mine - truth).norm() <= 1.5 * (theirs - truth).norm() + 1e-6 * truth.norm()
    assert peak < 0.5 * plain_peak


def model_of(memory: dict[str, Any], compiled: bool = False) -> tuple[Transformer, torch.Tensor]:
    """About 20 MiB a layer in bf16, with activations of a few MiB."""
    m = config.Model("m", dim=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab=1000)
    cfg = config.Memory("m", **memory)
    with torch.device("meta"):
        model = Transformer(m, "flash").to(torch.bfloat16)
    model.materialise(CUDA, 0)
    levers.apply(model, cfg, CUDA)
    if compiled:
        model.compile_layers()
    return model, torch.randint(1000, (8, 1025), device=CUDA)


def activation_peak(memory: dict[str, Any], compiled: bool = False) -> float:
    """MiB above what the step before left."""
    model, rows = model_of(memory, compiled)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(rows[:, :-1], rows[:, 1:]).backward()
    return (torch.cuda.max_memory_allocated() - before) / MIB


@pytest.mark.parametrize("compiled", [False, True])
def test_less_memory(compiled: bool) -> None:
    torch._dynamo.reset()
    levers_ = [
        {},
        EXACT["selective"],
        EXACT["full"],
        EXACT["full"] | EXACT["activation_offload"],
        EXACT["activation_offload"],
    ]
    plain, selective, full, both, offload = (activation_peak(HEAD | m, compiled) for m in levers_)
    assert full < 0.5 * plain and selective < 0.8 * plain and full < selective
    assert both < full - 8 * 3  # eight inputs of 8 MiB, of which a few are under way
    assert offload < 0.6 * plain


def test_offload_does_not_make_the_host_wait() -> None:
    model, rows = model_of({"activation_offload": True})
    for _ in range(2):
        model(rows[:, :-1], rows[:, 1:]).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(rows[:, :-1], rows[:, 1:]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_steps_of_offload_give_the_same_gradients() -> None:
    """A race between streams would show as a wrong bit sooner or later."""
    model, rows = model_of({"recompute": "full", "activation_offload": True, "max_inflight_activations": 1})
    plain, _ = model_of({"recompute": "full"})
    plain(rows[:, :-1], rows[:, 1:]).backward()
    want = [p.grad for p in plain.layers[0].ffn.parameters()]
    assert isinstance(getattr(model.saving, "__self__", None), Offload)
    for _ in range(30):
        model.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        for p, expected in zip(model.layers[0].ffn.parameters(), want, strict=True):
            assert p.grad is not None and expected is not None
            assert (p.grad - expected).norm() <= 0.02 * expected.norm()  # flash's dQ differs from run to run


@pytest.mark.parametrize("reduction", ["ddp", "zero2o", "fsdp"])
def test_the_account_adds_up(reduction: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = replace(Case(reduction, "bf16"), device="cuda").with_({"snapshot": True})
    cfg, dp, model = cases.setup(0, 1, case)
    breakdown = Breakdown(cfg, model, dp, CUDA, tmp_path / "memory.pickle")
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        with breakdown.at(step):
            cases.one_step(dp, 0, 1, case, step)
            breakdown.backward_done()
            dp.step(1e-3)
    kinds = breakdown.kinds
    params = sum(p.numel() for p in model.parameters())
    assert sum(kinds.values()) * GIB == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.02)
    assert kinds["weights"] * GIB >= params * (4 if reduction == "fsdp" else 2)
    assert kinds["optimizer state"] * GIB >= params * 8
    # fsdp has none that it has reduced yet at the peak, which is the head's backward; what it has not counts as activations
    assert (kinds["gradients"] > 0 or reduction == "fsdp") and kinds["activations"] > 0
    assert (tmp_path / "memory.pickle").stat().st_size > 0


@pytest.mark.two_gpus
def test_the_account_knows_memory_that_ranks_show_each_other(tmp_path: Path) -> None:
    transports = "reduction.transport=collective,peer"
    done = sweep(
        tmp_path,
        "name=t",
        "model=debug",
        "device=cuda",
        "nproc=2",
        "data=fake",
        "steps=4",
        "reduction=zero2o",
        "micro_batch=1",
        transports,
    )
    assert done.code == 0, done.output
    plain, peer = (s["summary"]["memory_by_kind"][0] for _, s in sorted(statuses(tmp_path / "t").items()))
    assert peer["weights"] == pytest.approx(plain["weights"], rel=0.05)
    assert peer["communication"] > 0


def test_keep_list_names_kernels_of_this_torch() -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {k for k in recompute.KEPT if "::" in k and "overrideable" not in k} <= names
