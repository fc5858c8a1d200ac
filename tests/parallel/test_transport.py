"""reduction.transport=peer: what it goes with. That its copies are the collectives', bit for bit, is in test_gpu.py."""

import pytest

from tests.memory.test_rules import cfg
from train.parallel import mesh
from train.sweep import validate


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, None),
        ({"reduction.name": "zero2"}, None),
        ({"reduction.name": "fsdp"}, "reduction=fsdp"),
        ({"device": "cpu"}, "device=cpu"),
        ({"nproc": 1}, "one rank alone"),
        ({"round.name": "delta"}, "round=delta"),
        ({"optim.grad_dtype": "fp32"}, "optim.grad_dtype=fp32"),
    ],
)
def test_what_it_goes_with(keys: dict[str, object], why: str | None) -> None:
    point = cfg(device="cuda")
    point.reduction.transport = "peer"
    ranks = int(str(keys.pop("nproc", 2)))
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        setattr(getattr(point, group) if group else point, name, value)
    degrees = dict.fromkeys(mesh.DIMS, 1) | {"dp_shard": ranks}
    if why is None:
        validate.transport(point, degrees)
        return
    with pytest.raises(validate.ConfigError, match="^reduction.transport=peer: ") as caught:
        validate.transport(point, degrees)
    assert str(caught.value).endswith(f", here {why}; set it to collective")
