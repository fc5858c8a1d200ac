"""compile.kernels on the command line: what is refused, what runs here, and what the record says of it."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.command import run
from tests.kernels import given
from tests.memory.test_rules import cfg
from train import config
from train.kernels import backend, names
from train.parallel import mesh
from train.sweep import validate


def test_names() -> None:
    assert names.chosen("inductor") == ()
    assert names.chosen("fused") == names.chosen("auto") == ("adamw", "loss", "norm", "carry", "stacked")
    assert names.chosen("loss+adamw") == ("loss", "adamw")
    assert names.spelled("auto") == "auto" and names.spelled("inductor") == "inductor"
    assert names.spelled("stacked+carry+loss+norm+adamw") == names.spelled("fused") == "adamw+loss+norm+carry+stacked"


@pytest.mark.parametrize("value", ["", "adamw+", "+", "norms", "fused+loss", "rope+rope", "norm+input_grad"])
def test_values_that_are_none(value: str) -> None:
    wrong = cfg()
    wrong.compile.kernels = value
    with pytest.raises(
        config.ConfigError, match=f"^compile.kernels={value.replace('+', '.')}: must be auto, inductor, fused, or"
    ):
        validate.values(wrong)


def test_what_stands_alone_is_not_taken_for_a_misspelling() -> None:
    wrong = cfg()
    for value, hint in (("auto+stacked", False), ("stackd", True)):
        wrong.compile.kernels = value
        with pytest.raises(config.ConfigError) as caught:
            validate.values(wrong)
        assert ("did you mean" in str(caught.value)) == hint


@pytest.mark.parametrize(
    ("kernels", "keys", "line"),
    [
        (
            "fused",
            {"compile.name": "layer", "optim.name": "sign_sgd"},
            "adamw is optim=adamw's update; without it: loss+norm+carry+stacked",
        ),
        ("adamw", {"memory.optimizer_offload": "optimizer"}, "adamw wants its state on the device"),
        (
            "loss",
            {"parallelism.tp": 2},
            "loss takes the whole vocabulary, here it is shared by tp=2; without it: inductor",
        ),
        (
            "loss",
            {"memory.lm_head_kernel": "torch", "memory.lm_head_chunk": 8},
            "loss is not memory.lm_head_kernel=torch",
        ),
        ("loss", {"parallelism.pp": 2, "parallelism.pp_schedule": "zbv"}, "loss has one backward"),
        ("norm", {"parallelism.pp": 2, "parallelism.pp_schedule": "zbv"}, "norm has one backward"),
        ("norm", {"parallelism.pp": 2, "parallelism.pp_schedule": "dualpipev"}, "norm has one backward"),
        ("swiglu", {"model.experts": 4}, "swiglu is of a dense layer"),
        ("swiglu_down", {"model.experts": 4}, "swiglu_down is of a dense layer"),
        ("swiglu+swiglu_down", {}, "swiglu_down takes swiglu's place; without it: swiglu"),
        ("swiglu_down", {}, "swiglu_down needs compile=layer"),
        ("swiglu_down", {"compile.name": "layer", "parallelism.async_tp": True}, "swiglu_down was not tried"),
        (
            "swiglu_down",
            {"compile.name": "layer", "precision.name": "fp8", "precision.scaling": "tensorwise"},
            "swiglu_down has w_down's",
        ),
        ("stacked+rope", {}, "stacked takes the place of swiglu, swiglu_down and rope; without it: rope"),
        (
            "stacked",
            {"reduction.name": "fsdp"},
            "stacked wants whole weights in one place, reduction=fsdp gathers them one by one",
        ),
        ("stacked", {"model.experts": 4}, "stacked is of a dense layer"),
        ("stacked", {"model.qk_norm": True}, "stacked turns q and k as they come"),
        (
            "stacked",
            {"precision.name": "fp8", "precision.scaling": "rowwise"},
            "stacked makes one matmul of two or three",
        ),
        ("stacked", {"memory.recompute": "selective"}, "stacked would make memory.recompute=selective keep q too"),
        (
            "adamw+norm+stacked",
            {"compile.name": "layer", "memory.recompute": "full"},
            "norm would keep more of layers that run again: memory.recompute=full; stacked would keep more of layers that run "
            "again: memory.recompute=full; without them: adamw",
        ),
        ("stacked", {"memory.recompute": "budget"}, "stacked was not tried with memory.recompute=budget"),
        ("stacked", {"memory.activation_offload": True}, "stacked was not tried with memory.activation_offload"),
        ("stacked", {"memory.optimizer_offload": "full"}, "stacked was not tried with memory.optimizer_offload"),
        ("stacked", {"parallelism.cp": 2}, "stacked was not tried with cp above 1, here cp=2"),
        ("stacked", {"parallelism.async_tp": True}, "stacked was not tried with parallelism.async_tp"),
        ("stacked", {"parallelism.pp": 2, "parallelism.pp_schedule": "zbv"}, "stacked has one backward"),
        ("carry", {}, "carry saves what Inductor fuses with the sum: needs compile=layer; without it: inductor"),
        ("loss+carry", {"compile.name": "layer", "model.experts": 4}, "carry is of a dense layer, here are experts; "),
        (
            "carry",
            {"compile.name": "layer", "memory.recompute": "full"},
            "carry hands on two tensors, and memory.recompute would keep both",
        ),
        (
            "carry",
            {"compile.name": "layer", "memory.activation_offload": True},
            "carry hands on two tensors, memory.activation_offload follows one",
        ),
        ("carry", {"compile.name": "layer", "parallelism.pp": 2}, "carry was not tried with pp above 1, here pp=2"),
        ("carry", {"compile.name": "layer", "parallelism.cp": 2}, "carry was not tried with cp above 1, here cp=2"),
        (
            "carry",
            {"compile.name": "layer", "parallelism.async_tp": True},
            "carry was not tried with parallelism.async_tp",
        ),
    ],
)
def test_combinations_that_cannot_be(kernels: str, keys: dict[str, object], line: str) -> None:
    wrong = cfg(reduction="ddp")
    wrong.compile.kernels = kernels
    for key, value in keys.items():
        group, name = key.split(".")
        setattr(getattr(wrong, group), name, value)
    degrees = dict.fromkeys(mesh.DIMS, 1) | {d: getattr(wrong.parallelism, d) for d in ("pp", "cp", "tp")}
    with pytest.raises(config.ConfigError) as caught:
        names.combination(wrong, degrees)
    assert f"compile.kernels={kernels}: {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({}, ("adamw", "loss")),
        ({"compile.name": "layer"}, ("adamw", "loss", "norm", "carry", "stacked")),
        ({"compile.name": "layer", "memory.recompute": "full"}, ("adamw", "loss")),
        ({"compile.name": "layer", "memory.recompute": "selective"}, ("adamw", "loss")),
        ({"compile.name": "layer", "reduction.name": "fsdp"}, ("adamw", "loss", "norm", "carry")),
        ({"compile.name": "layer", "optim.name": "sign_sgd"}, ("loss", "norm", "carry", "stacked")),
        ({"memory.optimizer_offload": "full"}, ("loss",)),
        ({"compile.name": "layer", "parallelism.tp": 2}, ("adamw", "norm", "carry", "stacked")),
        ({"parallelism.tp": 2, "optim.name": "sign_sgd"}, ()),
    ],
)
def test_auto_takes_what_fits_and_refuses_nothing(keys: dict[str, object], left: tuple[str, ...]) -> None:
    mine = cfg(reduction="ddp")
    for key, value in keys.items():
        group, name = key.split(".")
        setattr(getattr(mine, group), name, value)
    degrees = dict.fromkeys(mesh.DIMS, 1) | {"tp": int(mine.parallelism.tp)}
    names.combination(mine, degrees)
    assert names.fitting(mine, degrees) == left


def test_auto_takes_none_on_a_cpu() -> None:
    mine = cfg(reduction="ddp")
    mine.parallelism.tp = 1
    assert mine.compile.kernels == "auto" and backend.used(mine, torch.device("cpu")) == ()


def test_a_command_runs_the_plain_forms_here_and_says_so(tmp_path: Path) -> None:
    words = ["device=cpu", "nproc=1", "steps=4", "seq_len=32", "micro_batch=2", "name=k", "-m"]
    done = run([*words, f"compile.kernels=inductor,{given.ALL}"], tmp_path)
    assert done.code == 0, done.err
    runs = {}
    for folder in (tmp_path / "outputs" / "k").glob("*-*"):
        used = json.loads((folder / "status.json").read_text())["summary"]["engine"]["kernels"]
        runs[tuple(used.items())] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain, ours = runs[()], runs[tuple((name, "plain") for name in given.ALL.split("+"))]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in plain], rel=1e-5)
