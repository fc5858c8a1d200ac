"""compile.cuda_graph: what it goes with, that a step reads nothing on the host, and that replayed steps are the eager ones."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analysis import kernels
from tests.helpers import environment, metrics, points, train
from tests.kernels import given
from tests.parallel import cases, one_rank
from tests.parallel.one_rank import MOE, built, configuration
from train import config
from train.parallel.graph import GraphedStep
from train.parallel.graph_rules import WARMUP
from train.sweep import validate

REDUCTIONS = ("ddp", "zero2", "zero2o", "zero2rs")  # that one rank can capture


# ---- what it goes with -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"device": "cpu"}, "device=cpu has no CUDA graphs"),
        ({"nproc": 2}, "set nproc=1"),
        ({"reduction__name": "fsdp"}, "set reduction=ddp"),
        ({"memory__activation_offload": True}, "memory.activation_offload=true"),
        ({"memory__optimizer_offload": "optimizer"}, "memory.optimizer_offload=optimizer"),
        ({"optim__name": "sign_sgd"}, "set optim=adamw"),
        ({"replay": True}, "replay=true hashes"),
        ({"fault": "nan@0:3"}, "fault=nan@0:3 strikes"),
        ({"model": MOE, "precision__name": "fp32"}, "unless precision=bf16, here fp32"),
        ({"steps": WARMUP}, "set steps=4 or more"),
        ({"steps": WARMUP + 2, "profile": True}, "set steps=6 or more"),
    ],
)
def test_refused_in_one_line(keys: dict[str, Any], line: str) -> None:
    cfg = configuration("cuda", **keys)
    assert cfg.nproc is not None
    cfg.parallelism, cfg.global_batch = config.Parallelism("data"), None
    assert validate.combination(cfg, cfg.nproc) is None
    cfg.compile.cuda_graph = True
    found = validate.combination(cfg, cfg.nproc)
    assert found is not None and found.startswith("compile.cuda_graph=true: ") and line in found and "\n" not in found


# ---- what a step asks of the host ------------------------------------------------------------------------------------

aten = torch.ops.aten
#: operators that wait for the device to tell the host a value or a size, and those that bring the host's data to the device
HOST = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.bincount, aten.unique_consecutive, aten.lift_fresh, aten.lift,
}  # fmt: skip


class NoHost(TorchDispatchMode):
    """Raises for an operator that a capture could not record, and for what reads a CPU's tensor without any."""

    def __enter__(self) -> Any:
        self._undo = ExitStack()
        for name in ("tolist", "numpy", "cpu", "pin_memory"):
            self._undo.enter_context(mock.patch.object(torch.Tensor, name, _refuse))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [t for t in (args[1] if func is aten.index.Tensor else ()) if t is not None and t.dtype == torch.bool]
        if func.overloadpacket in HOST or masks:
            raise AssertionError(f"{func} needs the host")
        return func(*args, **(kwargs or {}))


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("it needs the host")


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0, 2.0]) + 1,
        lambda x: x.sum().tolist(),
        lambda x: bool(x.sum() > 0),
    ],
)
def test_the_watch_sees_the_host(read: Any) -> None:
    with pytest.raises(AssertionError, match="needs the host"), NoHost():
        read(torch.ones(2))


LEVERS: list[dict[str, Any]] = [
    {"grad_accum": 2, "optim__clip_norm": None},
    {"memory__recompute": "full", "memory__lm_head_chunk": 7},
    {"memory__recompute": "selective", "model__tied": True},
    {"optim__state_dtype": "bf16", "precision__name": "bf16", "optim__grad_dtype": "fp32"},
    {"model__rope_cache": False, "model__qk_norm": True},
    {"precision__name": "fp8", "precision__scaling": "tensorwise"},
]


@pytest.mark.parametrize(("reduction", "keys"), [*((r, {}) for r in REDUCTIONS), *(("zero2", keys) for keys in LEVERS)])
def test_a_step_needs_nothing_of_the_host(tmp_path: Path, reduction: str, keys: dict[str, Any]) -> None:
    if "optim__grad_dtype" in keys and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch ties a gradient's dtype to its weight's")
    cfg = configuration(reduction__name=reduction, **keys)
    with built(tmp_path / "point", cfg) as rank:
        rank.train_step(0)
        rows, lr = list(rank.micro_batches(1)), torch.tensor(1e-2)
        with NoHost():
            loss, norm = rank.compute(rows, lr)
        assert float(loss) > 0 and float(norm) > 0


@pytest.mark.parametrize("kernels", ("inductor", given.ALL))
def test_steps_before_the_capture_are_the_plain_ones(tmp_path: Path, kernels: str) -> None:
    """With the same bits, though rows and learning rate come from tensors that are filled."""
    cfg = configuration(grad_accum=2, optim__warmup_steps=7, compile__kernels=kernels)
    found = []
    for graphed in (False, True):
        with built(tmp_path / str(graphed), cfg) as rank:
            if graphed:
                rank.graphed = GraphedStep(rank.compute, rank.dp.owners(), 2, (2, 17), rank.device)
            steps = [[t.item() for t in rank.train_step(step)[:2]] for step in range(WARMUP)]
            found.append((steps, {name: t.clone() for name, t in rank.dp.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# ---- on a GPU --------------------------------------------------------------------------------------------------------

CAPTURED: list[dict[str, Any]] = [
    {},
    {"optim__clip_norm": 0.05},
    {"optim__clip_norm": None, "grad_accum": 2},
    {"compile__name": "layer"},
    {"compile__name": "layer", "grad_accum": 2, "optim__clip_norm": 0.05},
    {"memory__recompute": "full", "memory__lm_head_chunk": 7},
    {"compile__name": "layer", "memory__recompute": "full"},
    {"compile__kernels": given.ALL},
    {"compile__kernels": given.ALL, "compile__name": "layer", "grad_accum": 2, "optim__clip_norm": 0.05},
    {"compile__kernels": "adamw+loss+carry", "compile__name": "layer"},
    {"compile__kernels": given.STACKED + "+carry", "compile__name": "layer", "grad_accum": 2},
    {"optim__state_dtype": "bf16"},
    {"precision__name": "fp64"},
    {"precision__name": "fp8", "precision__scaling": "tensorwise"},
    {"model": MOE},
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys", CAPTURED, ids=[" ".join(f"{k}={v}"[:30] for k, v in each.items()) for each in CAPTURED]
)
def test_replayed_steps_are_the_eager_ones(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Loss, norm, masters and moments over 20 steps, bit for bit, while the learning rate warms up."""
    runs = []
    for graphed in (None, True):
        cfg = configuration("cuda", optim__warmup_steps=12, compile__cuda_graph=graphed, **keys)
        runs.append(one_rank.train(tmp_path / str(graphed), cfg))
    (eager, eager_state), (replayed, replayed_state) = runs
    assert len(eager) == len(replayed) == 20
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in eager] == [line[key] for line in replayed]
    assert_same(eager_state, replayed_state)
    assert len({line["loss"] for line in replayed}) == 20  # every step has rows and weights of its own


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("none", "layer"))
def test_memory_is_not_above(tmp_path: Path, name: str) -> None:
    """What a replayed step is said to take is what its capture took: the eager step's peak, within its rows (1 MiB) and what
    torch's allocator rounds: it cuts no block of which less than 1 MiB would be over, and a capture's blocks are others. (One
    H200 showed 2 and 3 MiB, of the eager model's 549.)"""
    model = config.Model("wide", dim=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab=8192)
    eager, replayed = (
        one_rank.train(
            tmp_path / str(graphed),
            configuration("cuda", model=model, seq_len=512, compile__name=name, compile__cuda_graph=graphed),
        )[0][-1]["perf/peak_memory"]
        for graphed in (None, True)
    )
    assert 0.1 < replayed <= 1.01 * eager + 2**-10


@pytest.mark.gpu
def test_warm_up_of_the_learning_rate_is_followed(tmp_path: Path) -> None:
    """In replayed steps too: with another schedule the weights differ."""
    ends = []
    for warmup_steps in (0, 18):
        cfg = configuration("cuda", compile__cuda_graph=True, optim__warmup_steps=warmup_steps)
        ends.append(one_rank.train(tmp_path / str(warmup_steps), cfg)[1])
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0] if name.endswith(".weight"))


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", (None, True))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_host_never_waits(tmp_path: Path, reduction: str, graphed: bool | None) -> None:
    cfg = configuration("cuda", compile__cuda_graph=graphed, reduction__name=reduction)
    with built(tmp_path / "point", cfg) as rank:
        meter = rank.make_meter()
        if graphed:
            rank.graphed = GraphedStep(rank.compute, rank.dp.owners(), 1, (2, 17), rank.device)
        for step in range(WARMUP + 2):  # random rows are made in the first ones
            rank.train_step(step)
        before = meter.start(WARMUP + 2)
        assert before is None
        for step in range(WARMUP + 2, WARMUP + 8):
            with cases.no_host_synchronisation(rank.device):
                loss, norm, data_s = rank.train_step(step)
                meter.results(loss, norm, data_s)
                before = meter.start(step + 1)
            meter.finish(before, last=False)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_one_line() -> None:
    """In a process of its own: a broken capture may leave the device's context behind in any state."""
    code = """
import torch
from train.config import ConfigError
from train.parallel import graph
device = torch.device("cuda", 0)
graph.use_stream(device)
step = graph.GraphedStep(lambda rows, lr: (rows[0].sum() * lr.item(),), [], 1, (2, 3), device)
try:
    for _ in range(5):
        step([torch.ones(2, 3, dtype=torch.int64)], 1.0)
except ConfigError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("compile.cuda_graph=true: this step can't be captured ("), done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.gpu
def test_a_checkpoint_of_replayed_steps(tmp_path: Path) -> None:
    """Written while the graph lives, and gone on from with another graph: the eager run's losses and weights."""
    eager = one_rank.train(tmp_path / "eager", configuration("cuda", steps=24))
    for steps in (16, 24):
        cfg = configuration("cuda", steps=steps, compile__cuda_graph=True, checkpoint__every=8)
        lines, state = one_rank.train(tmp_path / "graph", cfg)
    assert [line["step"] for line in lines] == list(range(24))
    assert [line["loss"] for line in lines] == [line["loss"] for line in eager[0]]
    assert_same(eager[1], state)


@pytest.mark.gpu
def test_the_command_on_text_with_a_trace(tmp_path: Path) -> None:
    """Rows from the host, and a trace of replayed steps that shows their kernels."""
    common = [
        "model=debug", "nproc=1", "data=text", "attention=math", "seq_len=64", "micro_batch=2", "grad_accum=2", "steps=12",
        "optim.warmup_steps=6", "fabric=false", "profile=true",
    ]  # fmt: skip
    losses, traced = [], []
    for name, more in (("eager", []), ("graph", ["compile.cuda_graph=true"])):
        done = train(*common, *more, f"name={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        point = next(iter(points(tmp_path / "outputs" / name).values()))
        losses.append([line["loss"] for line in metrics(point)])
        traced.append(kernels.breakdown(kernels.read(point / "traces" / "rank0.json.gz")))
    assert losses[0] == losses[1]
    assert 0.5 < traced[1]["matmul"] / traced[0]["matmul"] < 2  # the same work, by its kernels' own time
