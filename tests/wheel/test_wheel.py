"""An installed wheel in an empty folder: conf/ and sweeps/ are inside, own options are added, own train.py is left alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cli.test_docs import blocks
from tests.helpers import ROOT, TINY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; its dependencies are those of the interpreter that runs the tests."""
    at = tmp_path_factory.mktemp("a wheel")
    source = at / "source"
    left_out = shutil.ignore_patterns(
        ".venv", ".git", "outputs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".whl*"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(at),
        str(source),
    ]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(at / "venv")], check=True)
    python = at / "venv" / "bin" / "python"
    (wheel,) = at.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True
    )
    packages = next((at / "venv" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return at / "venv" / "bin"


def run(venv: Path, name: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One command of that environment, with nothing of the checkout on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(venv / name), *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


def test_everything_comes_from_the_wheel(venv: Path, tmp_path: Path) -> None:
    code = (
        "import train, analysis, train.sweep.store as s;"
        "print(train.__file__, analysis.__file__, s.conf_dir(), s.data_dir('sweeps'))"
    )
    done = run(venv, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(venv.parent)) == 4 and str(ROOT) not in done.stdout


def test_the_same_commands_work_in_an_empty_folder(venv: Path, tmp_path: Path) -> None:
    done = run(venv, "python", "-m", "train", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "dp2_reductions" in done.stdout and "zero2o" in done.stdout
    done = run(venv, "python", "-m", "train", "sweeps=dp2_reductions", "nproc=2", "plan=true", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("pending") == 20 - 2, done.stdout + done.stderr
    done = run(venv, "python", "-m", "train", "micro_batc=1", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean micro_batch?" in done.stderr


def test_the_readmes_commands(venv: Path, tmp_path: Path) -> None:
    """The two lines on pip are the fixture's; the rest as it stands there, cut to three short steps."""
    ((make, install, *rest),) = [commands for kind, commands in blocks(ROOT / "README.md") if kind == "setup"]
    assert make.startswith("pip wheel --no-deps ") and install.startswith("pip install ")
    assert list(venv.parents[1].glob(Path(install.split()[-1]).name)), "the wheel has another name"
    for command in rest:
        name, *args = command.split()
        short = [*TINY, "steps=3"] if name == "mfu-sweep" else []
        done = run(venv, name, *args, *(s for s in short if s.partition("=")[0] not in command), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs" / "first" / "report.html").exists()


def test_own_option_from_own_folder(venv: Path, tmp_path: Path) -> None:
    model = tmp_path / "my conf" / "model" / "mine.yaml"
    model.parent.mkdir(parents=True)
    sizes = "\n".join(
        f"{key}: {value}" for key, _, value in (t.removeprefix("model.").partition("=") for t in TINY[:-1])
    )
    model.write_text(f"# mine, two layers\nname: mine\nvocab: 512\n{sizes}\n")
    args = ["--config-dir", "my conf", "model=mine", "seq_len=32", "steps=3", "name=x"]
    done = run(venv, "python", "-m", "train", *args, cwd=tmp_path)
    assert done.returncode == 0 and "1 ok" in done.stdout, done.stdout + done.stderr
    done = run(venv, "python", "-m", "analysis", "table", "outputs/x", cwd=tmp_path)
    assert done.returncode == 0 and "1 ok" in done.stdout


def test_console_scripts_beside_an_own_train_py(venv: Path, tmp_path: Path) -> None:
    """`python -m train` runs the user's own file there; `mfu-sweep` runs ours, ranks included."""
    (tmp_path / "train.py").write_text("raise SystemExit('this is my own train.py')\n")
    done = run(venv, "python", "-m", "train", "--help", cwd=tmp_path)
    assert "this is my own train.py" in done.stderr
    done = run(venv, "mfu-sweep", *TINY, "steps=3", "reduction=zero2o,ddp", "name=x", cwd=tmp_path)
    assert done.returncode == 0 and "2 ok" in done.stdout, done.stdout + done.stderr
    done = run(venv, "mfu-analysis", "table", "outputs/x", cwd=tmp_path)
    assert done.returncode == 0 and "2 ok" in done.stdout
    assert (tmp_path / "outputs" / "x" / "sweep.json").read_text().count("mfu-sweep ") == 1
