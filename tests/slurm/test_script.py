"""The sbatch script: one golden file per launch option, quoting, templates. `GOLDEN=write pytest …` writes the files."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from train.config import ConfigError, Launch, Train
from train.launch.slurm import options, script
from train.launch.slurm.options import Shape

GOLDEN = Path(__file__).with_name("golden")
#: one entry per option of launch.* that reaches the script
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cpus": {"cpus": 12},
    "memory": {"memory": "64G"},
    "time": {"time": "1-12:30:00"},
    "partition": {"partition": "gpu,long"},
    "account": {"account": "team a"},
    "qos": {"qos": "high"},
    "constraint": {"constraint": "h100&ib"},
    "exclude": {"exclude": "n[1-3]"},
    "sbatch": {"sbatch": {"mail_type": "END,FAIL", "reservation": "it's ours"}},
    "array_parallelism": {"array_parallelism": 2},
    "setup": {"setup": ["module load cuda/13", 'source "$HOME/venv/bin/activate"']},
    "python": {"python": "apptainer exec image.sif python"},
    "signal_seconds": {"signal_seconds": 300},
}


def array(**more: Any) -> script.Array:
    values = {
        "shape": Shape(1, 0), "tasks": 6, "name": "mfu-sweep-ab12cd", "comment": "mfu-sweep:ab12cd34ef56",
        "submission": Path("/shared/outputs/s/.sweep/slurm/ab12cd34ef56"),
        "code": Path("/shared/outputs/s/.sweep/code-12345678"),
    } | more  # fmt: skip
    return script.Array(**values)


def text(launch: dict[str, Any], **more: Any) -> str:
    return script.render(Launch(name="slurm", **({"python": "python"} | launch)), array(**more))


def compare(name: str, found: str) -> None:
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text()


@pytest.mark.parametrize("name", OPTIONS)
def test_golden(name: str) -> None:
    compare(name, text(OPTIONS[name]))


def test_golden_nodes_and_gpus() -> None:
    compare("nodes", text({}, shape=Shape(2, 0)))
    compare("gpus_per_node", text({}, shape=Shape(2, 8)))
    compare("chunk", text({"array_parallelism": 4}, after="17"))


def test_every_option_has_a_golden_file() -> None:
    """An option that is added must say here whether it reaches the script."""
    elsewhere = {"points_per_job", "wait", "dry_run", "template", "requeues"}  # tested with the queue or below
    assert set(options.SLURM_ONLY) - elsewhere <= set(OPTIONS) | {"nodes", "gpus_per_node"}


@pytest.mark.parametrize("folder", ["a b", "it's", 'say "x"', "50%", "back\\slash", "$HOME `id`", "ünï"])
def test_bash_and_sbatch_read_odd_paths_back(folder: str) -> None:
    path = Path("/shared") / folder
    found = text({}, submission=path, code=path)
    assert subprocess.run(["bash", "-n"], input=found, text=True).returncode == 0
    printed = "\n".join(line.replace("srun", "printf '%s\\n'", 1) for line in found.splitlines())
    out = subprocess.run(["bash"], input=printed, text=True, capture_output=True).stdout.splitlines()
    assert out[-1] == str(path)
    line = next(line for line in found.splitlines() if "--output" in line)
    (word,) = shlex.split(line.removeprefix("#SBATCH "))
    assert word == f"--output={path}/%A_%a.log".replace("\\", "\\\\").replace("50%", "50%%")


def test_template_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.sbatch.j2"
    file.write_text(
        "#!/bin/sh\n#SBATCH --array={{ options.array }}\nsrun {{ python }} -m train.launch.slurm.job {{ submission }}\n"
    )
    found = text({"template": str(file)})
    assert found.startswith("#!/bin/sh\n#SBATCH --array=0-5\nsrun python -m")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#!/bin/sh\n{{ nodess }}\n", "'nodess' is undefined"),
        ("#!/bin/sh\n{% if %}\n", "line 2"),
        ("srun x\n", "starts with #!"),
        (b"#!\xff", "UTF-8"),
        (None, "can't be read"),
    ],
)
def test_template_that_does_not_render(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    file = tmp_path / "t.j2"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as e:
        text({"template": str(file)})
    assert e.value.key == "launch.template"


def train(**launch: Any) -> Train:
    cfg = Train(launch=Launch(name="slurm", **launch))
    cfg.nproc, cfg.device = 8, "cuda"
    return cfg


@pytest.mark.parametrize(
    ("key", "value"),
    [("time", "soon"), ("time", "0"), ("memory", "64 GB"), ("nodes", 0), ("points_per_job", 0), ("partition", "a\nb"),
     ("cpus", -1), ("sbatch", {"array": "0-3"}), ("sbatch", {"Bad Name": "x"}), ("requeues", -1), ("signal_seconds", 10**6)],
)  # fmt: skip
def test_wrong_values_name_the_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as e:
        options.check(train(**{key: value}))
    assert e.value.key.startswith(f"launch.{key}")


def test_slurm_keys_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="launch.nodes=2: goes with launch=slurm only"):
        options.check(Train(launch=Launch(name="local", nodes=2)))
    options.check(Train(launch=Launch(name="local")))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("60", 3600),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("2-0:0:5", 172805),
        ("x", None),
        ("", None),
    ],
)
def test_time_formats(limit: str, seconds: int | None) -> None:
    assert options.seconds(limit) == seconds


def test_shapes() -> None:
    cfg = train(gpus_per_node=8)
    assert options.shape(cfg) == Shape(1, 8)
    cfg.nproc = 16
    assert options.shape(cfg) == Shape(2, 8)
    cfg.nproc = 4
    assert options.shape(cfg) == Shape(1, 4)
    cfg.nproc = 12
    assert options.shape(cfg) == Shape(2, 6)
    cfg.nproc = 9
    assert "multiple of the nodes" in (options.impossible(cfg) or "")
    cfg = train(gpus_per_node=4, nodes=1)
    assert "launch.gpus_per_node=4" in (options.impossible(cfg) or "")
    cfg = train(nodes=2)
    cfg.nproc, cfg.device = 2, "cpu"
    assert options.shape(cfg) == Shape(2, 0)
