"""Hydra finds sweepers only in the namespace `hydra_plugins`; the work is in train.sweep."""

import sys
from typing import Any, NoReturn, Optional

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from train.config import ConfigError
from train.sweep import run


class MfuSweeper(BasicSweeper):
    """Expand the grid, validate and freeze every point, hand the folders to an executor (design: Hydra ends there)."""

    def __init__(self, params: Optional[dict[str, str]] = None, grids: Optional[list[dict[str, Any]]] = None) -> None:
        super().__init__(max_batch_size=None, params=params)  # what both hold is read in `sweep`

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing needs. `launch=slurm` selects Hydra's launcher too; points of this machine need none."""
        self.hydra_context, self.config = hydra_context, config
        self.remote = None
        if config.launch.name == "slurm":
            self.remote = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

    def sweep(self, arguments: list[str]) -> NoReturn:
        """Run the grid and exit with the sweep's code: Hydra drops what a sweeper returns."""
        assert self.hydra_context is not None and self.config is not None
        # as they are written, not as Hydra made us with them: an interpolation is each point's
        told = OmegaConf.to_container(self.config.hydra.sweeper, resolve=False)
        assert isinstance(told, dict)
        grids = [self._plain(g) for g in (told["grids"] or [told["params"] or {}])]
        sys.exit(run.sweep(self.hydra_context.config_loader, self.config, grids, arguments, self.remote))

    @staticmethod
    def _plain(grid: Any) -> dict[str, Any]:
        """A grid with text for keys. Raises ConfigError where it is no mapping."""
        if not isinstance(grid, dict):
            raise ConfigError("hydra.sweeper.grids", grid, "must list mappings of keys to values")
        return {str(key): value for key, value in grid.items()}
