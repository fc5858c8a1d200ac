"""Composition: the same as Hydra's own, point by point, and fast enough for large grids."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import OmegaConf

from train.config import ConfigError
from train.sweep import grid
from train.sweep.literal import literal
from train.sweep.store import conf_dir, register


@pytest.fixture(scope="module")
def loader() -> Iterator[ConfigLoaderImpl]:
    Plugins.instance()  # registers the kinds of config source
    register(ConfigStore.instance(), "")
    path = ConfigSearchPathImpl()
    path.append("main", f"file://{conf_dir()}")
    path.append("hydra", "pkg://hydra.conf")
    path.append("schema", "structured://")  # Hydra insists that it comes last
    yield ConfigLoaderImpl(config_search_path=path)


def hydra_composes(loader: ConfigLoaderImpl, overrides: list[str]) -> dict[str, Any]:
    cfg = loader.load_configuration("train", overrides, run_mode=RunMode.MULTIRUN, from_shell=False)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


CHOICES = {
    "model": ["debug", "llama3_1b", "qwen3_0_6b"], "reduction": ["ddp", "zero2", "fsdp"], "data": ["fake", "text"],
    "memory": ["none", "full_recompute"], "micro_batch": ["1", "8"], "seed": ["0", "9223372036854775807"],
    "optim.lr": ["1e-4", "0.0001", "1"], "optim.clip_norm": ["null", "0.5"], "model.qk_norm": ["true", "false"],
    "model.rope_scaling.factor": ["1", "32"],
    "name": ["'a b'", "x"], "nproc": ["null", "2"], "++env.OMP_NUM_THREADS": ["3"], "recipe": ["mfu_dense_1b_pcie"],
    "fault": ["null", "nan@1:2"], "budget.hours": ["0.5"], "grad_accum": ["2", "${micro_batch}"],
}  # fmt: skip


def test_every_sampled_point_is_what_hydra_composes(loader: ConfigLoaderImpl) -> None:
    master = loader.load_configuration("train", [], run_mode=RunMode.MULTIRUN, from_shell=False)
    composer = grid.Composer(loader, master)
    draw = random.Random(0)
    for _ in range(25):
        keys = draw.sample(list(CHOICES), draw.randint(0, 7))
        overrides = [f"{key}={draw.choice(CHOICES[key])}" for key in keys]
        mine = composer.compose(overrides)
        assert mine == hydra_composes(loader, overrides), overrides
        mine["model"]["dim"] = -1  # a caller may change what it gets
        assert composer.compose(overrides)["model"]["dim"] != -1


def test_time_is_linear(loader: ConfigLoaderImpl) -> None:
    master = loader.load_configuration("train", [], run_mode=RunMode.MULTIRUN, from_shell=False)
    assert OverridesParser.create(config_loader=loader)

    def seconds(n: int) -> float:
        composer = grid.Composer(loader, master)
        began = time.process_time()
        points = list(grid.expand(loader, [{}], ["reduction=ddp,zero2o", f"seed=range(0,{n // 2})"]))
        assert len({str(composer.compose(p.overrides)) for p in points}) == n
        return time.process_time() - began

    small, large = seconds(200), seconds(2000)
    assert large < 20 * small and large < 20, (small, large)


def test_a_named_grid_takes_the_command_lines_spelling(loader: ConfigLoaderImpl) -> None:
    """Variables without a +, commas as lists, text as typed; and the command line wins."""
    named = {"env.CUDA_DEVICE_MAX_CONNECTIONS": [1, "08"], "nccl.env.NCCL_P2P_DISABLE": "1,0", "name": "1_1"}
    master = loader.load_configuration("train", [], run_mode=RunMode.MULTIRUN, from_shell=False)
    composer = grid.Composer(loader, master)
    points = [
        composer.compose(p.overrides) for p in grid.expand(loader, [named], [literal("nccl.env.NCCL_P2P_DISABLE=2")])
    ]
    assert [p["env"] for p in points] == [{"CUDA_DEVICE_MAX_CONNECTIONS": value} for value in ("1", "08")]
    assert all(p["nccl"]["env"]["NCCL_P2P_DISABLE"] == "2" and p["name"] == "1_1" for p in points)


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([{"launch": "slurm"}], "launch=slurm: is for the command line, not for a grid"),
        ([{"compile": None}], "compile=null: must be the name of an option"),
        ([{"memory": ["none", None]}], "memory=none,null: must be the name of an option"),
        ([{"env.A": []}], r"env.A=\[\]: has no values"),
        ([{"env.A": 1, "+env.A": 2}], "env.A=2: is given twice in one grid"),
        ([{"~optim.lr": None}], "~optim.lr=null: is no key of a grid"),
        ([{"name": "a"}, {"name": "b"}], "name=b: belongs to the whole sweep, and another grid says a"),
    ],
)
def test_what_no_grid_can_have(loader: ConfigLoaderImpl, grids: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        list(grid.expand(loader, grids, []))


def test_a_variable_in_quotes_is_one_value(loader: ConfigLoaderImpl) -> None:
    """Two of them are two, on the command line as in a grid."""
    assert literal("env.A='a,b'") == "++env.A='a,b'"
    points = list(grid.expand(loader, [{"env.A": ["'a,b'", "'c'"], "recipe": None}], []))
    assert [p.overrides for p in points] == [["++env.A='a,b'"], ["++env.A='c'"]]
