"""What other programs left in the environment: refused, ignored and said, or harmless."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.cli.command import refused, run
from tests.helpers import TINY
from train.sweep.literal import literal

SMALL = [*TINY, "steps=3", "nproc=1", "micro_batch=1"]


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_no_visible_gpu(tmp_path: Path, value: str) -> None:
    refused(["device=cuda"], tmp_path, "CUDA_VISIBLE_DEVICES=" + value, CUDA_VISIBLE_DEVICES=value)


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["99", "0,99"])
def test_absent_gpu_is_not_dropped_silently(tmp_path: Path, value: str) -> None:
    refused([], tmp_path, f"CUDA_VISIBLE_DEVICES={value}", CUDA_VISIBLE_DEVICES=value)


@pytest.mark.parametrize("value", ["foo", "expandable_segments=True", "max_split_size_mb:128,,", ":"])
def test_malformed_allocator_variable(tmp_path: Path, value: str) -> None:
    refused([], tmp_path, f"PYTORCH_CUDA_ALLOC_CONF={value}", "expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF=value)


def test_leftovers_of_another_launcher_are_ignored_and_said(tmp_path: Path) -> None:
    left = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_NODEID": "1"}
    done = run([*SMALL, "name=x"], tmp_path, **left, **slurm)
    assert done.code == 0, done.out + done.err
    for name, value in left.items():
        assert f"ignored: {name}={value}" in done.out
    assert "[1/1]" in done.out and "1 ok" in done.out
    assert "\x1b" not in done.out and done.err == "", "plain lines in a pipe"


@pytest.fixture
def mount(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A tmpfs with the given options; needs the right to mount."""
    where = tmp_path / "disk"
    where.mkdir()

    def make(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"can't mount here: {done.stderr.strip()}")
        return where

    yield make
    subprocess.run(["umount", "-l", str(where)], capture_output=True)


def test_read_only_disk(tmp_path: Path, mount) -> None:  # type: ignore[no-untyped-def]
    disk = mount("ro,size=1m")
    refused([f"out={disk}/runs"], tmp_path, f"out={disk}/runs", "Read-only file system")


def test_full_disk(tmp_path: Path, mount) -> None:  # type: ignore[no-untyped-def]
    disk = mount("size=64k")
    (disk / "filler").write_bytes(b"x" * (60 * 1024))
    refused([f"out={disk}/runs", "name=x"], tmp_path, f"out={disk}/runs", "No space left on device")


def test_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all") if os.getuid() == 0 else ()
    if prefix and not shutil.which("setpriv"):
        pytest.skip("needs setpriv to give up root's capabilities")
    refused(["out=locked"], tmp_path, "out=locked", "Permission denied", prefix=prefix)


NAMES = ["1_1_1", "12e3", "007", "nan", "é & 'quotes', \"more\" #1", "a=b", "x: y", "true", "[1]", "back\\slash"]


def test_odd_names_and_paths_work(tmp_path: Path) -> None:
    """A real run writes exactly there, under LC_ALL=C and with a table (±) that its output can't encode."""
    folder = tmp_path / "my texts, v=2 (it's é)"
    folder.mkdir()
    (folder / "a b.txt").write_text("Some text to train on. " * 200)
    name = "é & 'quotes', \"more\" #1 a=b"
    done = run(
        [*SMALL, f"name={name}", "out=runs, all", f"data.path={folder}"], tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii"
    )
    assert done.code == 0, done.out + done.err
    assert (tmp_path / "runs, all" / name / "sweep.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_text(name: str) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([literal(f"name={name}")])
    assert parsed.value() == name
