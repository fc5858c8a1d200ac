"""The commands of docs/slurm.md, in order, on the test cluster; and its settings file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT

TEXT = (ROOT / "docs/slurm.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands(cluster: Cluster, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{cluster.env()['PATH']}"
    env = {**cluster.env(PYTHONPATH=f"{ROOT}/src:{ROOT}", PYTHONSAFEPATH="1"), "PATH": path}
    commands = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    assert len(commands) >= 7
    said = {}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
    for name, points in (("first", 4), ("later", 2), ("pair", 2), ("packed", 4)):
        found = [yaml.safe_load(f.read_text()) for f in (tmp_path / "outputs" / name).glob("*/status.json")]
        assert [s["status"] for s in found] == ["ok"] * points
    assert (tmp_path / "outputs/first/report.html").exists()


def test_a_settings_file_of_ones_own(tmp_path: Path) -> None:
    for part in ("src", "conf", "sweeps"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "conf/launch/mine.yaml").write_text(block)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}/src", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "train", "launch=mine", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launch = yaml.safe_load(done.stdout)["launch"]
    assert launch["name"] == "slurm" and launch["gpus_per_node"] == 8 and launch["time"] == "30"


def test_every_setting_is_in_the_page() -> None:
    from train.launch.slurm.options import SLURM_ONLY

    for key in SLURM_ONLY:
        assert f"`{key}`" in TEXT or f"`{key}.NAME`" in TEXT, key
