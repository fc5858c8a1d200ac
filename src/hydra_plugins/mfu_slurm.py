"""hydra-submitit-launcher for frozen points: `launch=slurm` selects it (conf/launch/slurm.yaml).

The sweeper asks it for an executor of frozen point folders, so that nothing composes in a job. Hydra's own launcher
contract (overrides in, results out) is the parent's, without its loss of results; tests/slurm runs Hydra's test suite on it.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

if TYPE_CHECKING:
    from train.config import Train
    from train.launch.slurm.executor import Slurm
    from train.launch.supervisor import Stop
    from train.sweep.folder import Sweep
    from train.sweep.points import Frozen


class MfuSlurmLauncher(SlurmLauncher):
    """Hands frozen point folders to SLURM."""

    def check(self, cfg: "Train", points: list["Frozen"]) -> None:
        """Before anything is written: the template renders and SLURM would take it. Raises ConfigError."""
        from train.launch.slurm import submit

        submit.test_only(cfg, [p for p in points if not p.invalid])

    def executor(self, sweep: "Sweep", cfg: "Train", stop: "Stop", say: Callable[[str], None]) -> "Slurm":
        """The executor of an open sweep."""
        from train.launch.slurm.executor import Slurm

        return Slurm(sweep, cfg, stop, say)

    def cancel(self, cfg: "Train", say: Callable[[str], None]) -> int:
        """Cancel what the sweep `name` has in the queue; the exit code. Raises ConfigError."""
        from train.config import ConfigError
        from train.launch.slurm import executor

        path = Path(cfg.out) / str(cfg.name)
        if not (path / "sweep.json").exists():
            raise ConfigError("name", cfg.name, f"is no sweep in {cfg.out}")
        return executor.cancel(path.resolve(), say)

    def __call__(self, *args: Any, **kwargs: Any) -> JobReturn:
        """One job of another application. One result that does not unpickle loses those of all jobs in the parent."""
        import cloudpickle  # submitit's own

        result = super().__call__(*args, **kwargs)
        try:
            pickle.loads(cloudpickle.dumps(result))
        except Exception as e:
            value = result._return_value
            result.return_value = RuntimeError(f"{type(value).__name__}: {value} (does not unpickle: {e})")
        return result


ConfigStore.instance().store(
    group="hydra/launcher",
    name="mfu_slurm",
    node=SlurmQueueConf(_target_="hydra_plugins.mfu_slurm.MfuSlurmLauncher"),
    provider="mfu-sweep",
)
