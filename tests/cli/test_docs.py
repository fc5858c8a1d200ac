"""Every fenced bash command of README.md and docs/*.md is run here, top to bottom, one folder a page.

Fences: `bash` runs; `bash gpu` is a dry run (plan=true; of a benchmark --help) where there is no GPU; `bash setup` needs a
network or an installed wheel (tests/wheel runs those) and is not run. To keep it short, a `python -m train` that names no steps
gets steps=3, and no seq_len gets seq_len=64; `make TARGET` is only asked what it would do (`make -n`; tests/e2e runs
`make sweep` itself).
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, environment
from train.config import Train

#: pages whose commands need more than a folder: tests/slurm has the cluster, tests/analysis the run folders
ELSEWHERE = ("slurm.md", "analysis.md")
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in ELSEWHERE)]
SHORT = {"steps=": "steps=3", "seq_len=": "seq_len=64"}


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """(what follows `bash` in the fence, commands) of each block; a backslash at the end of a line continues it."""
    found = re.findall(r"^```bash *(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [(kind, [c for c in text.replace("\\\n", " ").splitlines() if c.strip()]) for kind, text in found]


def shortened(command: str, kind: str) -> str:
    """The command as it is run here."""
    if command.startswith("make "):
        return f"make -n -C '{ROOT}' {command.removeprefix('make ')}"
    if command.startswith("python -m train ") and not re.search(r"--help|--cfg|-sc |recipe=|sweeps=", command):
        command += "".join(f" {short}" for key, short in SHORT.items() if f" {key}" not in command)
    if kind == "gpu" and command.startswith("python -m benchmarks."):
        return f"{command} --help"
    return command + " plan=true" * (kind == "gpu" and "plan=true" not in command)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_commands_of_a_page(page: Path, tmp_path: Path) -> None:
    temp = tmp_path / "tmp"
    temp.mkdir()
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    env = environment(TMPDIR=str(temp), PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    count = 0
    for kind, commands in blocks(page):
        assert kind in ("", "gpu", "setup"), f"{page.name}: unknown fence: bash {kind}"
        for command in commands if kind != "setup" else []:
            run = shortened(command.partition("  #")[0], kind)
            done = subprocess.run(["bash", "-c", run], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, f"{page.name}: {run}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            count += 1
    assert count, f"{page.name} has no command"


def test_every_key_is_documented() -> None:
    """Groups and keys of the command line, in docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [f.name for f in dataclasses.fields(Train) if f"| `{f.name}" not in text]
    assert not missing


def test_every_option_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = {m[1]: m[2] for m in re.finditer(r"^\| `(\w+)` \|.*\| (.+) \|$", text, re.MULTILINE)}
    for group, listed in table.items():
        folder = ROOT / ("sweeps" if group == "sweeps" else f"conf/{group}")
        assert {p.stem for p in folder.glob("*.yaml")} == set(listed.split(", ")), group


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
