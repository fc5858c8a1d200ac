"""Pipelines at sizes that no test machine has: a process group that sends nothing, one process that plays one rank."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.pipelining import schedules

from tests.parallel.fake import shapes_are_known
from tests.parallel.nobody import fake_group
from train import config
from train.memory import levers
from train.model.transformer import Transformer
from train.parallel import pipeline, tensor
from train.parallel.build import build
from train.parallel.dims import Dims

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These layers are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("place", (0, 31, 63))
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
@pytest.mark.parametrize("reduction", ("ddp", "fsdp"))
def test_64_stages_by_16(name: str, virtual: int, reduction: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks: 64 pipeline ranks x 16 data-parallel ones; the middle of the 16."""
    cfg = config.Train(
        model=config.Model("test", 16, 64 * virtual, 2, 1, 8, 16, 32),
        parallelism=config.Parallelism("test", 64, pp_schedule=name, pp_virtual=virtual),
        reduction=config.Reduction(reduction), precision=config.Precision("fp32"), optim=config.Optim("adamw"),
        memory=config.Memory("none"), compile=config.Compile("none"), micro_batch=1, grad_accum=64, seq_len=8,
    )  # fmt: skip
    rank = place * 16 + 7
    monkeypatch.setattr(schedules._PipelineSchedule, "_warmup_p2p", shapes_are_known)
    with fake_group(1024, rank):
        dims = Dims.of(cfg, 1024, rank, CPU)
        with torch.device("meta"):
            model = Transformer(cfg.model, "math")
            tensor.apply(model, dims)
            pipeline.prune(model, cfg, dims)
        model.materialise(CPU, 0)
        levers.apply(model, cfg.memory, CPU)
        dp = build(model, cfg, dims)
        line = pipeline.Pipeline(model, cfg, dims, torch.float32)
        own = {n for n, _ in model.named_parameters()}
        assert line.stages == ([place] if virtual == 1 else [place, 127 - place if name == "zbv" else place + 64])
        assert {int(n.split(".")[1]) for n in own if n.startswith("layers.")} == set(line.stages)
        assert ("embed.weight" in own) == (0 in line.stages)
        assert ("head.weight" in own) == (64 * virtual - 1 in line.stages)
        tokens = torch.zeros(64, 8, dtype=torch.int64)
        assert line.step(tokens, tokens).shape == ()
        dp.step(1e-3)
        done = [action for action, _, _ in line.timeline._steps[-1].actions]
        assert sum(a.kind == "F" for a in done) == 64 * virtual
        dp.close()
