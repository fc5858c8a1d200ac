"""What precision=fp8 refuses, each with one line that names key, value and what is valid."""

import pytest

from train import config
from train.config import ConfigError
from train.model import fp8_rules
from train.sweep import points, validate


def cfg(model: dict | None = None, **keys: object) -> config.Train:
    """An fp8 point that is fine, with changes."""
    made = config.Train(
        model=config.Model(**({"name": "m", "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64,
                               "vocab": 50} | (model or {}))),
        data=config.Data("fake"), attention=config.Attention("auto"), compile=config.Compile("none"),
        precision=config.Precision(str(keys.pop("precision", "fp8")), keys.pop("scaling", "tensorwise")),  # type: ignore[arg-type]
        reduction=config.Reduction("fsdp"), optim=config.Optim("adamw"), memory=config.Memory("none"),
        hardware=config.Hardware("auto"), nccl=config.Nccl("default"), launch=config.Launch("local"),
        parallelism=config.Parallelism("data", **{k: keys.pop(k) for k in ("tp", "cp", "pp", "async_tp") if k in keys}),  # type: ignore[arg-type]
    )  # fmt: skip
    for key, value in keys.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "keys", [{}, {"scaling": "rowwise"}, {"tp": 2}, {"cp": 2}, {"pp": 2, "grad_accum": 2}], ids=str
)
def test_what_is_fine(keys: dict) -> None:
    validate.values(cfg(**keys))
    assert validate.combination(cfg(device="cpu", **keys), 2) is None


@pytest.mark.parametrize(
    ("model", "keys", "line"),
    [
        ({"dim": 40}, {}, "model.dim=40: must be a multiple of 16 with precision=fp8"),
        ({"ffn": 72}, {}, "model.ffn=72: must be a multiple of 16"),
        ({"ffn": 48}, {"tp": 2}, "model.ffn=48: / tp 2 = 24 must be a multiple of 16"),
        ({"head_dim": 6}, {}, "model.heads=4: x model.head_dim 6 = 24 must be a multiple of 16"),
        ({"head_dim": 4}, {}, "model.kv_heads=2: x model.head_dim 4 = 8 must be a multiple of 16"),
        ({"head_dim": 8}, {"tp": 2}, "model.kv_heads=2: x model.head_dim 8 / tp 2 = 8 must be a multiple of 16"),
        ({}, {"micro_batch": 3, "seq_len": 24}, "micro_batch=3: x seq_len = 72 tokens must be a multiple of 16"),
        ({}, {"cp": 2, "micro_batch": 1, "seq_len": 16}, "micro_batch=1: x seq_len / cp 2 = 8 tokens must be"),
        ({}, {"scaling": None}, "precision.scaling=null: precision=fp8 needs one of tensorwise, rowwise"),
        ({}, {"precision": "bf16"}, "precision.scaling=tensorwise: goes with precision=fp8 only; here it is bf16"),
        ({"ffn": 0, "experts": 8, "experts_per_token": 2, "expert_ffn": 32}, {}, "precision=fp8: model=m has experts"),
        ({}, {"tp": 2, "async_tp": True, "device": "cuda", "compile": config.Compile("layer")},
         "parallelism.async_tp=true: splits bf16 matmuls; with precision=fp8 it must be false"),
    ],
)  # fmt: skip
def test_what_can_not_be(model: dict, keys: dict, line: str) -> None:
    reason = validate.combination(cfg(model, **({"device": "cpu"} | keys)), 2)
    assert reason is not None and reason.startswith(line) and "\n" not in reason


def test_an_unknown_scaling_is_bad_input() -> None:
    with pytest.raises(ConfigError, match="^precision.scaling=blockwise: must be one of tensorwise, rowwise"):
        validate.values(cfg(scaling="blockwise"))


@pytest.mark.parametrize(
    ("capability", "why"), [([8, 0], "has 8.0"), ([7, 5], "has 7.5"), ([8, 9], None), ([9, 0], None), ([12, 0], None)]
)
def test_gpus_without_fp8_are_invalid(capability: list[int], why: str | None) -> None:
    host = {"gpus": [{"name": "NVIDIA A100-SXM4-80GB", "capability": capability}] * 2}
    point = points.freeze_all([(points.Point([], []), cfg(device="cuda", nproc=2))], host, 2)[0]
    line = None if why is None else f"precision=fp8: needs GPU capability 8.9; NVIDIA A100-SXM4-80GB {why}"
    assert point.invalid == line
    assert fp8_rules.impossible(cfg(device="cpu", nproc=2), host) is None
    assert fp8_rules.impossible(cfg(device="cuda"), {"gpus": [{}]}) is None  # a login node knows nothing of the GPUs
