"""Hydra's own launcher test suite on our launcher, which keeps Hydra's contract for other applications' tasks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra.test_utils.test_utils import TSweepRunner
from omegaconf import DictConfig

from hydra_plugins.mfu_slurm import MfuSlurmLauncher
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def on_the_cluster(session_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key, value in session_cluster.env(PYTHONPATH=f"{ROOT}/src:{ROOT}:{ROOT}/tests/slurm").items():
        if os.environ.get(key) != value:
            monkeypatch.setenv(key, value)
    yield


def test_discovery() -> None:
    assert MfuSlurmLauncher.__name__ in [x.__name__ for x in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("mfu_slurm", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=mfu_slurm"])])
class TestIntegration(IntegrationTestSuite):
    pass


class Unpicklable(Exception):
    """Pickles well and does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def task(cfg: DictConfig) -> int:
    if cfg.x == 1:
        raise Unpicklable("no ", "way back")
    return int(cfg.x)


def test_an_exception_that_does_not_unpickle_is_told(hydra_sweep_runner: TSweepRunner, tmpdir: Path) -> None:
    """The parent's launcher raises TypeError while it collects the results, and loses those of all jobs."""
    sweep = hydra_sweep_runner(
        calling_file=None, calling_module="hydra.test_utils.a_module", task_function=task, config_path=None,
        config_name=None, overrides=["hydra/launcher=mfu_slurm", "+x=2,1"], temp_dir=tmpdir,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="Unpicklable: no way back"), sweep:
        pass  # BasicSweeper raises the first failed job's exception once it has all results
