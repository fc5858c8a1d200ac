"""What is refused before anything starts."""

from dataclasses import replace
from typing import Any

import pytest

from train import config
from train.model import moe_rules

EXPERTS = {"ffn": 0, "experts": 8, "experts_per_token": 2, "expert_ffn": 96}


def point(dispatch: str = "torch", round_name: str = "none", recompute: str = "none", **model: Any) -> config.Train:
    return config.Train(
        model=replace(config.Model(name="m", ffn=64), **model),
        memory=config.Memory("m", recompute),
        parallelism=config.Parallelism("data", dispatch=dispatch),
        round=config.Round(round_name),
    )


def test_what_is_fine() -> None:
    moe_rules.combination(point())
    moe_rules.combination(point(**EXPERTS, balance="aux_loss_free"))
    moe_rules.combination(point(**EXPERTS, force_balance=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ffn": 0}, "model.ffn=0: must be at least 1 in a model without experts"),
        ({"experts_per_token": 2}, "model.experts_per_token=2: needs model.experts; this model has none"),
        ({"force_balance": True}, "model.force_balance=true: needs model.experts; this model has none"),
        ({**EXPERTS, "ffn": 64}, "model.ffn=64: every layer has experts: must be 0; their width is model.expert_ffn"),
        ({**EXPERTS, "expert_ffn": 0}, "model.expert_ffn=0: must be at least 1 in a model with experts"),
        ({**EXPERTS, "experts_per_token": 9}, "model.experts_per_token=9: must be between 1 and model.experts=8"),
        ({**EXPERTS, "experts_per_token": 0}, "model.experts_per_token=0: must be between 1 and model.experts=8"),
        (
            {**EXPERTS, "balance": "aux_loss", "force_balance": True},
            "model.force_balance=true: leaves model.balance=aux_loss nothing to do; set it to none",
        ),
        (
            {**EXPERTS, "round_name": "delta"},
            "round=delta: goes with dense models; model=m has experts",
        ),
        (
            {**EXPERTS, "dispatch": "deepep"},
            "parallelism.dispatch=deepep: needs the package deep_ep, which isn't installed here",
        ),
        (
            {**EXPERTS, "recompute": "budget"},
            "memory.recompute=budget: torch's partitioner would choose a token's experts once more in backward, maybe others;"
            " use full or selective",
        ),
        ({"dispatch": "deepep"}, "parallelism.dispatch=deepep: model=m has no experts"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ConfigError) as e:
        moe_rules.combination(point(**given))
    assert str(e.value) == message
