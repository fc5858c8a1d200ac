"""Degrees: what is left of nproc, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train import config
from train.parallel import mesh


def resolve(reduction: str, nproc: int, replicate: int = -1, shard: int = -1) -> tuple[int, int]:
    degrees = config.Parallelism("test", dp_replicate=replicate, dp_shard=shard)
    got = mesh.resolve(config.Train(parallelism=degrees, reduction=config.Reduction(reduction)), nproc)
    assert [got[name] for name in ("pp", "cp", "tp", "ep")] == [1, 1, 1, 1]
    return got["dp_replicate"], got["dp_shard"]


@pytest.mark.parametrize(
    ("reduction", "degrees", "expected"),
    [
        ("ddp", (-1, -1), (8, 1)),
        ("ddp", (8, 1), (8, 1)),
        ("zero2", (-1, -1), (1, 8)),
        ("zero2o", (1, 8), (1, 8)),
        ("fsdp", (-1, -1), (1, 8)),
        ("fsdp", (2, -1), (2, 4)),
        ("fsdp", (-1, 2), (4, 2)),
        ("fsdp", (8, 1), (8, 1)),
    ],
)
def test_degrees(reduction: str, degrees: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resolve(reduction, 8, *degrees) == expected


@pytest.mark.parametrize(
    ("reduction", "degrees", "message"),
    [
        ("ddp", (-1, 2), "parallelism.dp_shard=2: ddp shards nothing; it must be 1 or -1"),
        ("ddp", (4, -1), "parallelism.dp_replicate=4: dp_replicate 4 must multiply to nproc=8"),
        ("zero2o", (2, -1), "parallelism.dp_replicate=2: zero2o keeps one copy; it must be 1 or -1"),
        ("zero2", (-1, 3), "parallelism.dp_shard=3: dp_shard 3 must divide nproc=8"),
        ("fsdp", (3, -1), "parallelism.dp_replicate=3: dp_replicate 3 must divide nproc=8"),
        ("fsdp", (-1, 16), "parallelism.dp_shard=16: dp_shard 16 must divide nproc=8"),
        ("fsdp", (2, 2), "parallelism.dp_replicate=2: dp_replicate 2 x dp_shard 2 must multiply to nproc=8"),
        (
            "fsdp",
            (0, -1),
            "parallelism.dp_replicate=0: must be a degree between 1 and 65536, or auto (-1)",
        ),
    ],
)
def test_refused(reduction: str, degrees: tuple[int, int], message: str) -> None:
    with pytest.raises(config.ConfigError) as e:
        resolve(reduction, 8, *degrees)
    assert str(e.value) == message


def experts(nproc: int, count: int, ep: int | str, reduction: str = "fsdp", **degrees: int) -> int:
    cfg = config.Train(
        parallelism=config.Parallelism("test", ep=ep, **degrees), reduction=config.Reduction(reduction),
        model=config.Model(experts=count),
    )  # fmt: skip
    return mesh.resolve(cfg, nproc)["ep"]


@pytest.mark.parametrize(
    ("nproc", "count", "degrees", "expected"),
    [
        (6, 128, {}, 2),  # the scaling guide's example
        (8, 0, {}, 1),
        (8, 128, {}, 8),
        (64, 128, {}, 8),
        (64, 128, {"dp_replicate": 16}, 4),
        (8, 12, {}, 4),
        (7, 128, {}, 1),
        (8, 128, {"tp": 2}, 8),
    ],
    ids=str,
)
def test_ep_auto(nproc: int, count: int, degrees: dict[str, int], expected: int) -> None:
    assert experts(nproc, count, "auto", **degrees) == experts(nproc, count, -1, **degrees) == expected


@pytest.mark.parametrize(
    ("nproc", "count", "ep", "reduction", "message"),
    [
        (8, 0, 2, "fsdp", "parallelism.ep=2: model=??? has no experts; it must be 1 or auto"),
        (8, 6, 4, "fsdp", "ep=4: must divide dp_shard x cp x tp = 8 and model.experts=6 (valid: 1, 2)"),
        (8, 64, 2, "ddp", "ep=2: must divide dp_shard x cp x tp = 1 and model.experts=64 (valid: 1)"),
        (8, 64, 2, "zero2o", "ep=2: zero2o goes with cp only; ddp and fsdp go with ep"),
    ],
)
def test_ep_refused(nproc: int, count: int, ep: int, reduction: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as e:
        experts(nproc, count, ep, reduction)
    assert str(e.value).endswith(message)


@given(
    st.sampled_from(["ddp", "zero2", "zero2o", "zero2rs", "fsdp"]),
    st.integers(1, 64),
    st.integers(-2, 70),
    st.integers(-2, 70),
)
def test_what_is_not_refused_multiplies_to_nproc(reduction: str, nproc: int, replicate: int, shard: int) -> None:
    try:
        got = resolve(reduction, nproc, replicate, shard)
    except config.ConfigError:
        return
    assert got[0] * got[1] == nproc
    assert replicate in (-1, got[0])
    assert shard in (-1, got[1])


def test_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; import train.parallel.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
