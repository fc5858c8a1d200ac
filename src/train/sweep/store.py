"""What Hydra's ConfigStore must know: the typed schema, our sweeper, the named grids of sweeps/ and the help text."""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from train.config import ConfigError, Train

PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """Folder `conf` or `sweeps`: of the checkout when there is one (also an editable install), else of the wheel."""
    checkout = PACKAGE.parents[1] / name
    return checkout if (checkout / ("train.yaml" if name == "conf" else "")).exists() else PACKAGE / name


def conf_dir() -> Path:
    """The folder of the primary configuration."""
    return data_dir("conf")


def register(cs: ConfigStore, help_template: str) -> None:
    """Fill the ConfigStore; `help_template` is what `--help` prints.

    The project root is never on Hydra's search path, so sweeps/ is stored file by file.
    """
    cs.store(group="schema", name="train", node=Train, package="_global_")
    sweeper: dict[str, Any] = {"_target_": "hydra_plugins.mfu_sweep.MfuSweeper", "params": None, "grids": []}
    cs.store(group="hydra/sweeper", name="mfu", node=sweeper, provider="mfu-sweep")
    words = {"app_name": "train", "header": "", "footer": "", "template": help_template}
    cs.store(group="hydra/help", name="mfu", node=words, provider="mfu-sweep")
    for path in sorted(data_dir("sweeps").glob("*.yaml")):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(node, dict):
            raise ConfigError(f"sweeps/{path.name}", node, "must be a mapping with hydra.sweeper.grids")
        cs.store(group="sweeps", name=path.stem, node=node, package="_global_", provider="sweeps")
