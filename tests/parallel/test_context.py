"""Context parallel on real ranks against one process: losses, every gradient, the clipped norm, weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import TINY, frozen, points, status, train
from tests.parallel import cases
from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.parallel.test_equality import FP64, REDUCTIONS, assert_equal_runs, reference, relative
from train import config
from train.measure import flops
from train.parallel import mesh, ring
from train.parallel.build import build
from train.parallel.dims import Dims
from train.parallel.stages import SCHEDULES

METHODS = ("ulysses", "ring")
RECOMPUTE = ({"recompute": "full"}, {"recompute": "selective"}, {"recompute": "full", "every": 2})
SAME = ("flops_per_token", "tokens_per_step", "params")  # in a summary, whatever the layout
OFFLOAD = {"activation_offload": True, "max_inflight_activations": 2}


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(replace(case, tp=1, cp=1, cp_method="ulysses", memory=()))
    assert_equal_runs(ranks.run(cases.train, case), expected, [FP64] * case.steps)


def even(reduction: str = "fsdp", memory: dict[str, Any] | None = None, **changes: Any) -> Case:
    return Case(reduction, memory=tuple((memory or {}).items()), **({"model": "even", "cp": 2} | changes))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ulysses(two: Ranks, reduction: str) -> None:
    check(two, even(reduction, qk_norm=True, attention="flash"))


@pytest.mark.parametrize("reduction", ("ddp", "zero2o"))
def test_ring(two: Ranks, reduction: str) -> None:
    check(two, even(reduction, cp_method="ring", qk_norm=True, attention="flash"))


@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_share_two_kv_heads(four: Ranks, method: str) -> None:
    check(four, even("fsdp", cp=4, cp_method=method, kv_heads=2))


@pytest.mark.parametrize("reduction", ("ddp", "zero2o"))
def test_with_data_parallel(four: Ranks, reduction: str) -> None:
    check(four, even(reduction, grad_accum=2))


@pytest.mark.parametrize("method", METHODS)
def test_with_tensor_parallel(four: Ranks, method: str) -> None:
    check(four, even("ddp", tp=2, cp_method=method, kv_heads=2))


def test_with_a_pipeline(four: Ranks) -> None:
    check(four, even("ddp", pp=2, layers=4, grad_accum=4, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_every_pipeline(eight: Ranks, schedule: str, method: str) -> None:
    check(eight, even("fsdp", pp=2, layers=4, grad_accum=4, steps=2, pp_schedule=schedule, cp_method=method))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_with_a_pipeline_and_tensor_parallel(eight: Ranks, method: str) -> None:
    check(eight, even("ddp", pp=2, tp=2, layers=4, grad_accum=4, steps=2, cp_method=method))


@pytest.mark.parametrize("method", METHODS)
def test_recompute_and_offload(two: Ranks, method: str) -> None:
    check(two, even("ddp", OFFLOAD | {"recompute": "full"}, cp_method=method))


@pytest.mark.parametrize("method", METHODS)
def test_fp32(two: Ranks, method: str) -> None:
    # weights: AdamW's first steps are signs, noise for tiny gradients. One process is 8e-6 off fp64's weights, the ring 1.3e-5
    case = even("fsdp", dtype="fp32", cp_method=method, attention="flash")
    expected = reference(replace(case, cp=1, cp_method="ulysses"))
    assert_equal_runs(two.run(cases.train, case), expected, [1e-5, 1e-4, 1e-4], weight_bound=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_follows_fp32(two: Ranks, method: str) -> None:
    """As in test_equality: within 2 % by norm over all gradients of the first step."""
    case = even("zero2o", dtype="bf16", cp_method=method, attention="flash", steps=1, clip_norm=None)
    out = two.run(cases.train, case)[0]
    want = reference(replace(case, dtype="fp32", cp=1, cp_method="ulysses")).gradients[0]
    flat = [torch.cat([g[name].double().flatten() for name in want]) for g in (out.gradients[0], want)]
    assert relative(*flat) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("grad_accum", (1, 2))
def test_four_ranks_all(four: Ranks, reduction: str, grad_accum: int, method: str) -> None:
    check(four, even(reduction, cp_method=method, grad_accum=grad_accum, qk_norm=True))
    check(four, even(reduction, cp=4, cp_method=method, grad_accum=grad_accum, model="even_tied"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grad_accum", (1, 2))
def test_hsdp(eight: Ranks, grad_accum: int, method: str) -> None:
    """Copies, shards and cp, two each; and cp without shards beside it."""
    check(eight, even("fsdp", dp_replicate=2, grad_accum=grad_accum, cp_method=method))
    check(eight, even("fsdp", dp_replicate=4, grad_accum=1, cp_method=method))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", (1, 2, 4, 8))
@pytest.mark.parametrize("reduction", ("zero2o", "fsdp"))
def test_eight_ranks_with_any_number_of_kv_heads(eight: Ranks, reduction: str, kv_heads: int, method: str) -> None:
    check(eight, even(reduction, cp=8, kv_heads=kv_heads, cp_method=method, qk_norm=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
@pytest.mark.parametrize("degrees", ({"tp": 2, "cp": 2}, {"tp": 2, "cp": 4}, {"tp": 4, "cp": 2}))
def test_eight_ranks_with_tensor_parallel(eight: Ranks, reduction: str, degrees: dict[str, int], method: str) -> None:
    check(eight, even(reduction, OFFLOAD | {"recompute": "full"}, cp_method=method, grad_accum=2, **degrees))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offload", ({}, OFFLOAD), ids=("", "offload"))
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
@pytest.mark.parametrize("reduction", ("zero2o", "fsdp"))
def test_recompute(two: Ranks, reduction: str, recompute: dict[str, Any], offload: dict[str, Any], method: str) -> None:
    check(two, even(reduction, recompute | offload, cp_method=method, attention="flash"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "memory", ({}, {"recompute": "full"}, {"recompute": "budget", "budget": 0.5} | OFFLOAD), ids=str
)
@pytest.mark.parametrize("reduction", ("zero2o", "fsdp"))
def test_compiled(two: Ranks, reduction: str, memory: dict[str, Any], method: str) -> None:
    check(two, even(reduction, memory, cp_method=method, compiled=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_with_tensor_parallel(four: Ranks, method: str) -> None:
    check(four, even("fsdp", {"recompute": "full"}, tp=2, cp_method=method, compiled=True))


def graphs(rank: int, world: int, case: Case) -> tuple[int, list[str]]:
    """(graphs that were compiled, why there are more than one a layer)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cfg = cases.configuration(case)
    dims = Dims.of(cfg, world, rank, cases.CPU)
    cases.one_step(build(cases.make_model(case, cfg, dims), cfg, dims), dims, case, 0)
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], list(counted["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("none", "full"))
@pytest.mark.parametrize(("method", "name"), (("ulysses", "Ulysses.__call__"), ("ring", "Ring.__call__")))
def test_layers_share_graphs_that_end_at_the_exchange_alone(two: Ranks, method: str, name: str, mode: str) -> None:
    """Before attention, after it, and twice between modules; the head is the fifth."""
    for count, reasons in two.run(graphs, even("ddp", {"recompute": mode}, cp_method=method, compiled=True)):
        assert count == 5
        assert len(reasons) == 1 and name in reasons[0]


# ---- traffic and work ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "runs"), (("none", 2), ("selective", 2), ("full", 3)))
def test_bytes_of_the_exchanges(four: Ranks, mode: str, runs: int) -> None:
    """q, k, v to heads and the result back, forward and backward; full recompute goes there once more."""
    case = even("ddp", {"recompute": mode}, cp=4, kv_heads=2, steps=1, dtype="fp32", grad_accum=2)
    here, layers = cases.ROWS * cases.SEQ[True] // 4, 2
    elements = here * 8 * (8 + 4 + 4 + 8)  # of 2 KV heads every rank gets one, so 4 are sent
    for out in four.run(cases.train, case):
        assert out.traffic["bytes"]["cp_all_to_all"] == runs * layers * elements * 4 * 3 // 4
        assert out.traffic["exposed_s"]["cp_all_to_all"] > 0


def test_bytes_of_the_ring(four: Ranks) -> None:
    """Keys and values go on three times each way; their gradients come home, a fourth time."""
    case = even("fsdp", cp=4, kv_heads=2, steps=1, dtype="fp32", cp_method="ring")
    here, layers = cases.ROWS * cases.SEQ[True] // 4, 2
    for out in four.run(cases.train, case):
        assert out.traffic["bytes"]["cp_ring"] == layers * here * 2 * (2 * 8) * 4 * (3 + 3 + 4)


def counted(rank: int, world: int, case: Case) -> float:
    """FLOPs that torch's counter sees on this rank in a step."""
    cfg = cases.configuration(case)
    dims = Dims.of(cfg, world, rank, cases.CPU)
    dp = build(cases.make_model(case, cfg, dims), cfg, dims)
    with FlopCounterMode(display=False) as counter:
        cases.one_step(dp, dims, case, 0)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("mode", ("none", "full"))
def test_every_layout_does_the_work_that_mfu_counts(two: Ranks, mode: str) -> None:
    for layout in ({"cp": 1}, {"cp": 2}, {"cp": 1, "tp": 2}):
        case = even("ddp", {"recompute": mode}, dtype="fp32", **layout)
        expected = flops.flops_per_token(cases.configuration(case).model, cases.SEQ[True], mode)["hfu"]
        assert sum(two.run(counted, case)) == expected * cases.ROWS * cases.SEQ[True], layout


# ---- parts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ("flash", "math"))
def test_a_merge_of_blocks_is_attention_over_all_keys(path: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, t, 8, dtype=torch.float64, generator=generator) for n, t in ((4, 6), (2, 10), (2, 10)))
    block, block_backward = ring.KERNELS[path]
    out, lse = (x.contiguous() for x in block(q, k[:, :, :3], v[:, :, :3], False))
    ring.merge(out, lse, *block(q, k[:, :, 3:], v[:, :, 3:], False))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
    torch.testing.assert_close(out, whole.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.randn(whole.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(whole, leaves, grad)
    q, k, v = (x.detach() for x in leaves)
    first, second = (
        block_backward(grad, q, k[:, :, s], v[:, :, s], out, lse, False) for s in (slice(3), slice(3, None))
    )
    torch.testing.assert_close(first[0] + second[0], wanted[0], rtol=1e-12, atol=1e-12)
    for got, want in ((1, wanted[1]), (2, wanted[2])):
        torch.testing.assert_close(torch.cat((first[got], second[got]), 2), want, rtol=1e-12, atol=1e-12)


def test_pieces_of_a_sequence_are_each_somewhere_once() -> None:
    for method in METHODS:
        for cp in (1, 2, 4, 8):
            found = [mesh.sequence_pieces(method, cp, index) for index in range(cp)]
            assert sorted(piece for _, mine in found for piece in mine) == list(range(found[0][0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 3}, "parallelism.cp=3: must divide model.heads = 8 (valid: 1, 2, 4, 8; or parallelism.cp_method=ring)"),
        (
            {"cp": 4, "kv_heads": 6, "heads": 12},
            "parallelism.cp=4: must divide model.kv_heads = 6 or be a multiple of them"
            " (valid: 1, 2, 3, 6, 12; or parallelism.cp_method=ring)",
        ),
        (
            {"cp": 8, "tp": 2},
            "parallelism.cp=8: must divide model.heads / tp 2 = 4 (valid: 1, 2, 4; or parallelism.cp_method=ring)",
        ),
        ({"cp": 4, "seq_len": 18}, "seq_len=18: must be a multiple of cp x tp = 4 (nearest: 16, 20)"),
        (
            {"cp": 2, "seq_len": 18, "method": "ring"},
            "seq_len=18: must be a multiple of 2 x cp x tp (cp_method=ring) = 4 (nearest: 16, 20)",
        ),
        ({"cp": 2, "method": "ring", "attention": "cudnn"}, "attention=cudnn: cp_method=ring goes with flash or math"),
        (
            {"cp": 2, "recompute": "selective", "compile": "layer"},
            "memory.recompute=selective: torch can't keep parts of a layer that cp has compiled in pieces;"
            " use full, or compile=none",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    get: dict[str, Any] = {
        "attention": "auto",
        "heads": 8,
        "kv_heads": 4,
        "tp": 1,
        "seq_len": 24,
        "method": "ulysses",
        "recompute": "none",
        "compile": "none",
    }
    get |= changes
    cfg = config.Train(
        model=config.Model("m", 24, 2, get["heads"], get["kv_heads"], 8, 40, 64),
        parallelism=config.Parallelism("m", cp=get["cp"], tp=get["tp"], cp_method=get["method"]),
        reduction=config.Reduction("fsdp"),
        memory=config.Memory("m", get["recompute"]),
        compile=config.Compile(get["compile"]),
        attention=config.Attention(get["attention"]),
        seq_len=get["seq_len"],
    )
    with pytest.raises(config.ConfigError) as e:
        mesh.check_model(cfg, mesh.resolve(cfg, get["cp"] * get["tp"]))
    assert str(e.value) == message


@pytest.mark.slow
def test_the_command_line_trains_the_same_rows_under_every_layout(tmp_path: Path) -> None:
    grid = ["parallelism.cp=1,2", "parallelism.cp_method=ulysses,ring", "reduction=zero2o", "precision=fp64"]
    done = train("-m", *TINY, *grid, "micro_batch=2", "global_batch=4", "steps=3", "name=cp", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {}
    for folder in points(tmp_path / "outputs" / "cp").values():  # the method is nothing that cp=1 differs in
        degrees = frozen(folder)["parallelism"]
        losses = pd.read_json(folder / "metrics.jsonl", lines=True)["loss"].to_numpy()
        ran[degrees["cp"], degrees["cp_method"]] = status(folder)["summary"], losses
    assert set(ran) == {(1, "ulysses"), (2, "ulysses"), (2, "ring")}
    plain, expected = ran[1, "ulysses"]
    for method, sent in (("ulysses", "cp_all_to_all"), ("ring", "cp_ring")):
        summary, losses = ran[2, method]
        assert [summary[key] for key in SAME] == [plain[key] for key in SAME]
        assert losses == pytest.approx(expected, rel=1e-9)
        assert set(summary["traffic"]["bytes"]) == set(plain["traffic"]["bytes"]) | {sent}
