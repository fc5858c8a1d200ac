"""200 steps with every lever on: memory is as large at the end as after warm-up."""

import resource
from pathlib import Path

import pytest
import torch

from tests.memory import cases
from tests.memory.cases import Case
from tests.parallel.ranks import Ranks

WARM, STEPS, SPREAD_MIB = 40, 200, 8


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def long_run(rank: int, world: int, case: Case) -> tuple[list[float], list[float], int]:
    """(resident MiB, device MiB at the end of each step after warm-up, bytes of host buffers made after warm-up)."""
    cfg, dp, model = cases.setup(rank, world, case)
    pool = getattr(model.saving, "__self__").pool  # noqa: B009
    host, device = [], []
    for step in range(STEPS):
        dp.announce(cfg.optim.lr)
        cases.one_step(dp, rank, world, case, step)
        dp.step(cfg.optim.lr)
        if step == WARM:
            made = pool.total_bytes
        if step >= WARM:
            host.append(resident_mib())
            device.append(torch.cuda.memory_allocated() / 2**20 if case.device == "cuda" else 0.0)
    dp.close()
    return host, device, pool.total_bytes - made


def check(host: list[float], device: list[float], made: int) -> None:
    assert made == 0
    late, early = sorted(host[-20:])[10], sorted(host[:20])[10]
    assert late - early < SPREAD_MIB, f"{early:.1f} → {late:.1f} MiB over {STEPS - WARM} steps"
    assert max(device[-20:]) <= max(device[:20]) * 1.01


def all_on(offload: str) -> dict[str, object]:
    return {
        "recompute": "selective", "activation_offload": True, "max_inflight_activations": 1, "lm_head_chunk": 7,
        "optimizer_offload": offload,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["zero2o", "fsdp"])
@pytest.mark.parametrize("offload", ["optimizer", "full"])
def test_flat(two: Ranks, reduction: str, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parallel.ranks.CASE_SECONDS", 280.0)
    optim = {} if offload == "full" else {"state_dtype": "bf16"}
    for result in two.run(long_run, Case(reduction, "bf16").with_(all_on(offload), optim)):
        check(*result)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["optimizer", "full"])
def test_flat_on_a_gpu(offload: str) -> None:
    from dataclasses import replace

    check(*long_run(0, 1, replace(Case("zero2o", "bf16"), device="cuda").with_(all_on(offload))))
