"""parallelism.async_tp: refused where it can't be, found by torch's pass where it can, and the same numbers on two GPUs."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import assert_equal_runs, reference
from train import config
from train.parallel import async_tp, mesh, tensor
from train.parallel.build import build
from train.parallel.dims import Dims


def found(rank: int, world: int) -> tuple[list[tuple[int, int]], list[tuple[int, bool]]]:
    """What torch's pass finds in the graph of an FFN: (gathered dimension, matmuls that use it), (scattered dimension,
    whether a matmul is before it)."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import micro_pipeline_tp as torchs
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.fx.experimental.proxy_tensor import make_fx

    group = torch.distributed.group.WORLD.group_name

    def ffn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = tensor.gather(x, group, world)
        return tensor.scatter((x @ gate.t()) * (x @ up.t()) @ down.t(), group, world)

    shapes = (3, 4, 8), (6, 8), (6, 8), (8, 6)
    graph_module = make_fx(ffn, select_decomp_table(), "fake")(*map(torch.ones, shapes))
    view_to_reshape(graph_module)
    gathers = torchs.find_all_gather_patterns(graph_module.graph)
    scatters = torchs.find_reduce_scatter_patterns(graph_module.graph)
    return (
        [(g.gather_dim, len(torchs._find_consumer_matmuls(g.res_node))) for g in gathers],
        [(s.scatter_dim, torchs._find_producer_matmul(s.input_node) is not None) for s in scatters],
    )


@pytest.mark.slow
def test_torchs_pass_finds_every_gather_and_scatter(two: Ranks) -> None:
    for gathers, scatters in two.run(found):
        assert gathers == [(1, 2)]  # gate and up
        assert scatters == [(1, True)]


@pytest.mark.parametrize(
    ("device", "compile_", "tp", "why"),
    [
        ("cuda", "layer", 1, "needs parallelism.tp above 1"),
        ("cuda", "none", 2, "Inductor does it; needs compile=layer"),
        ("cpu", "layer", 2, "needs GPUs, which read each other's memory; here is device=cpu"),
    ],
)
def test_refused_before_anything_starts(device: str, compile_: str, tp: int, why: str) -> None:
    cfg = config.Train(
        model=config.Model("m", 24, 2, 8, 4, 8, 40, 64),
        parallelism=config.Parallelism("m", tp=tp, async_tp=True),
        reduction=config.Reduction("fsdp"),
        compile=config.Compile(compile_),
        device=device,
    )
    with pytest.raises(config.ConfigError) as e:
        mesh.check_model(cfg, mesh.resolve(cfg, 2))
    assert str(e.value) == f"parallelism.async_tp=true: {why}"


def test_refused_by_a_rank_without_a_gpu() -> None:
    dims = Dims({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}, 0, torch.device("cpu"))
    with pytest.raises(config.ConfigError, match="parallelism.async_tp=true: symmetric memory needs GPUs"):
        async_tp.enable(dims)


def pipelined(rank: int, world: int, case: Case) -> tuple[cases.Outcome, set[str]]:
    """A training with async_tp, and the operators on symmetric memory that one more step ran."""
    cfg = cases.configuration(case)
    device = torch.device("cuda", rank)
    dims = Dims.of(cfg, world, rank, device)
    async_tp.enable(dims)
    with mock.patch.object(Dims, "of", return_value=dims):  # new groups would not be enabled
        outcome = cases.train(rank, world, case)
    dp: Any = build(cases.make_model(case, cfg, dims), cfg, dims)
    with torch.profiler.profile() as profile:
        cases.one_step(dp, dims, case, 0, device)
    return outcome, {event.key for event in profile.key_averages() if event.key.startswith("symm_mem::fused")}


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_pipeline_and_get_the_same_numbers(nccl: Ranks) -> None:
    case = Case("fsdp", model="even", dtype="fp32", tp=2, compiled=True, backend="inductor", device="cuda")
    runs = nccl.run(pipelined, case)
    expected = reference(Case("fsdp", model="even", dtype="fp32"))
    assert_equal_runs([outcome for outcome, _ in runs], expected, [1e-5, 1e-4, 1e-4], weight_bound=1e-4)
    for _, ran in runs:
        assert ran == {"symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"}
