"""Values and pairs of memory keys that can't be, each with one line."""

from collections import namedtuple

import pytest

from train import config
from train.measure.flops import param_count
from train.memory import rules
from train.sweep import validate


def cfg(memory: dict | None = None, optim: dict | None = None, **keys: object) -> config.Train:  # type: ignore[type-arg]
    base = config.Train(
        memory=config.Memory(**({"name": "m"} | (memory or {}))),
        optim=config.Optim(**({"name": "adamw"} | (optim or {}))),
        model=config.Model("m", 32, 2, 4, 2, 8, 64, 512),
        data=config.Data("fake"),
        attention=config.Attention("auto"),
        compile=config.Compile("none"),
        precision=config.Precision(str(keys.pop("precision", "bf16"))),
        reduction=config.Reduction(str(keys.pop("reduction", "zero2o"))),
        device=str(keys.pop("device", "cuda")),
    )
    assert not keys
    return base


@pytest.mark.parametrize(
    ("memory", "optim", "line"),
    [
        ({"recompute": "half"}, {}, "memory.recompute=half: must be one of none, full, selective, budget"),
        ({"recompute": "ful"}, {}, "did you mean full"),
        ({"every": 0}, {}, "memory.every=0: must be"),
        ({"budget": 1.5}, {}, "memory.budget=1.5: must be"),
        ({"lm_head_chunk": 0}, {}, "memory.lm_head_chunk=0"),
        ({"optimizer_offload": "state"}, {}, "memory.optimizer_offload=state: must be one of none, optimizer, full"),
        ({"targets": ["aten::"]}, {}, "memory.targets=aten::: must be"),
        ({}, {"name": "sgd"}, "optim.name=sgd"),
        ({}, {"state_dtype": "fp16"}, "optim.state_dtype=fp16: must be fp32, bf16 or null"),
    ],
)
def test_values(memory: dict, optim: dict, line: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(config.ConfigError) as caught:
        validate.values(cfg(memory, optim))
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "optim", "keys", "line"),
    [
        ({"every": 2}, {}, {}, "memory.every=2: goes with memory.recompute=full|selective only"),
        ({"recompute": "full", "targets": ["aten::mm"]}, {}, {}, "goes with memory.recompute=selective only"),
        ({"budget": 0.5}, {}, {}, "memory.budget=0.5: goes with memory.recompute=budget only"),
        ({"recompute": "budget"}, {}, {}, "memory.budget=null"),
        ({"recompute": "budget", "budget": 0.5}, {}, {}, "needs compile=layer"),
        ({"lm_head_kernel": "torch"}, {}, {}, "needs memory.lm_head_chunk"),
        ({"optimizer_offload": "full"}, {}, {}, "set optim.clip_norm=null"),
        ({"optimizer_offload": "full"}, {"clip_norm": None, "state_dtype": "bf16"}, {}, "fp32 state on the host"),
        ({"optimizer_offload": "optimizer"}, {"name": "sign_sgd"}, {}, "has no state to move"),
        ({}, {"name": "sign_sgd", "state_dtype": "bf16"}, {}, "has no state"),
        ({}, {"grad_dtype": "fp32"}, {"reduction": "ddp"}, "reduces in the weights' dtype"),
        ({}, {"grad_dtype": "bf16"}, {"precision": "fp32"}, "has gradients of its own dtype"),
        ({"snapshot": True}, {}, {"device": "cpu"}, "needs device=cuda"),
    ],
)
def test_combinations(memory: dict, optim: dict, keys: dict, line: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(config.ConfigError) as caught:
        rules.combination(cfg(memory, optim, **keys), 2)
    assert line in str(caught.value)
    rules.values(cfg(memory, optim, **keys))


def test_what_can_be() -> None:
    rules.combination(cfg({"recompute": "selective", "every": 3, "targets": ["aten::mm"]}, {"grad_dtype": "fp32"}), 2)
    rules.combination(cfg({"optimizer_offload": "full"}, {"name": "sign_sgd", "clip_norm": None}), 2)
    rules.combination(cfg({}, {"grad_dtype": "fp32"}, reduction="ddp"), 1)


def test_a_model_that_cpu_ranks_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cfg({}, {}, device="cpu")
    base.model = config.Model("wide", 4096, 32, 32, 8, 128, 16384, 32000)
    gib = 8 * param_count(base.model) / 2**30
    memory = namedtuple("memory", "total")
    monkeypatch.setattr(rules.psutil, "virtual_memory", lambda: memory(int((gib + 1) * 2**30)))
    assert rules.too_large(base) is None
    monkeypatch.setattr(rules.psutil, "virtual_memory", lambda: memory(int((gib - 1) * 2**30)))
    why = f"model=wide: needs {gib:.0f} GiB of this host's memory for weights and gradients alone; it has {gib - 1:.0f} GiB"
    assert rules.too_large(base) == why
    base.device = "cuda"
    assert rules.too_large(base) is None
