"""Values and combinations that can't be, each as one line that says what is valid."""

import pytest

from train import config
from train.config import ConfigError
from train.sweep import validate


def point(**changes: object) -> config.Train:
    """A valid point of two ranks on a CPU, changed."""
    cfg = config.Train(
        model=config.Model("m", 32, 2, 4, 2, 8, 64, 512), data=config.Data("fake"), reduction=config.Reduction("zero2o"),
        compile=config.Compile("none"), attention=config.Attention("auto"), precision=config.Precision("fp32"),
        optim=config.Optim("adamw"), device="cpu",
    )  # fmt: skip
    for key, value in changes.items():
        setattr(cfg, key, value)
    return cfg


def test_the_point_itself_is_fine() -> None:
    validate.values(point())
    assert validate.combination(point(), 2) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": config.Round("delta", bits=5)}, "round.bits=5: must be 32, 8 or 4"),
        ({"round": config.Round("delta", topk=0.0)}, "round.topk=0.0: must be"),
        ({"fault": "bitflip_weight@0:1:3"}, "fault=bitflip_weight@0:1:3: must be KIND@rank:step"),
        ({"checkpoint": config.Checkpoint(every=0)}, "checkpoint.every=0: must be"),
    ],
)
def test_wrong_by_itself(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate.values(point(**changes))
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": config.Round("delta", inner_steps=3)}, "steps=20: must be a multiple of round.inner_steps=3"),
        ({"replay": True, "checkpoint": config.Checkpoint(every=2)}, "replay=true: all passes start at step 0"),
        ({"replay": True, "profile": True}, "profile=true: would record the second pass"),
        ({"fault": "bitflip_grad@2:1"}, "fault=bitflip_grad@2:1: rank must be below nproc=2"),
    ],
)
def test_wrong_together(changes: dict[str, object], words: str) -> None:
    reason = validate.combination(point(**changes), 2)
    assert reason is not None and reason.startswith(words)
