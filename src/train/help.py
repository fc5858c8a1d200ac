"""The text of `python -m train --help`: every group's options with the first comment of their files, scalars, examples.

Hydra prints it through its own `hydra.help` (it stays its `--help`, so `--config-dir` and overrides still count).
"""

import textwrap
from pathlib import Path
from typing import Any, Optional

import yaml

from train.sweep.store import conf_dir, data_dir

WIDTH = 100
EXAMPLES = """\
  python -m train                                                       # a small model, in seconds
  python -m train reduction=zero2o,zero2 micro_batch=4,8,12 plan=true   # list a grid, write nothing
  python -m train reduction=zero2o,zero2 micro_batch=4,8,12 name=one    # run it, or go on with it
  python -m train recipe=dense_1b_h200 micro_batch=8,16,24 repeats=3    # a recipe, three runs each
  python -m train data.path=my-texts/ env.OMP_NUM_THREADS=1,2           # own text, swept variable"""
#: two columns: what is trained, how the sweep is run
KEYS = (
    ("micro_batch", "rows a rank takes per forward", "name", "folder under out; again: go on"),
    ("grad_accum", "micro-batches a step", "out", "where sweeps go (outputs)"),
    ("global_batch", "rows a step; derives grad_accum", "plan", "true: list the points, write nothing"),
    ("seq_len", "tokens a row", "repeats", "runs of every point, shuffled"),
    ("steps", "optimizer steps a point", "timeout", "seconds that a point may take"),
    ("seed", "of weights and row order", "retries", "of crashes and timeouts"),
    ("device", "auto, cuda or cpu", "prune", "skip larger points after an oom"),
    ("nproc", "ranks; all GPUs, 2 on a CPU", "max_failures", "equal crashes in a row: stop"),
    ("env.NAME", "environment of the ranks", "code", "new: go on though src/train changed"),
    ("profile", "true: a trace of two late steps", "", ""),
)


def comment(path: Path) -> str:
    """The first comment line of a configuration file that says something; empty where there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            for line in f:
                text = line.strip()
                if text.startswith("#") and "@package" not in text:
                    return text.lstrip("# ")
                if text and not text.startswith("#"):
                    break
    except (OSError, UnicodeDecodeError):
        pass
    return ""


def groups(folders: list[Path]) -> dict[str, dict[str, str]]:
    """Group → option → comment, over all configuration folders; the first folder wins, as for Hydra."""
    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.yaml")):
            group = str(path.parent.relative_to(folder))
            if not group.startswith(("hydra", "schema")):
                found.setdefault(group, {}).setdefault(path.stem, comment(path))
    sweeps = {p.stem: comment(p) for p in sorted(data_dir("sweeps").glob("*.yaml"))}
    return found | {"sweeps": found.get("sweeps", {}) | sweeps}


def defaults() -> dict[str, Any]:
    """Group → default option, from the primary configuration."""
    primary = yaml.safe_load((conf_dir() / "train.yaml").read_text(encoding="utf-8"))
    return {k: v for item in primary["defaults"] if isinstance(item, dict) for k, v in item.items()}


def body(folders: list[Path]) -> str:
    """The whole help text, at most WIDTH columns."""
    found, chosen = groups(folders), defaults()
    order = [g for g in chosen if g in found] + sorted(g for g in found if g not in chosen)
    name_width = max(len(g) for g in order)
    lines = ["Which configuration trains a model fastest here? Every combination of the values is trained."]
    lines += ["python -m train [-m] GROUP=OPTION[,OPTION…] KEY=VALUE[,VALUE…] …", ""]
    lines += ["Groups (* default; GROUP.KEY=VALUE changes a value inside, `--cfg job` shows all of them)"]
    for group in order:
        option_width = max(map(len, found[group]), default=0)
        for i, (option, text) in enumerate(found[group].items()):
            star = "*" if chosen.get(group) == option else " "
            head = f"  {group if i == 0 else '':<{name_width}} {star}{option:<{option_width}}  "
            lines.append((head + shortened(text, WIDTH - len(head))).rstrip())
    lines += ["Keys (meaning and range of each: docs/configuration.md)"]
    lines += [f"  {a:<12} {b:<33} {c:<12} {d}".rstrip() for a, b, c, d in KEYS]
    lines += ["Examples", EXAMPLES]
    lines += ["Also: --cfg job, --info, --hydra-help, --config-dir DIR (own options); TAB completes after"]
    lines += ['  eval "$(python -m train -sc install=bash)"']
    return "\n".join(lines) + "\n"


def shortened(text: str, width: int) -> str:
    """The longest run of whole clauses that fits, else of whole words."""
    if len(text) <= width:
        return text
    for cut in range(width, width // 2, -1):
        if text[cut] in ";:,(":
            return text[:cut].rstrip()
    return textwrap.shorten(text, width - 1, placeholder=" …")


def template(config_dir: Optional[str]) -> str:
    """`body` as hydra.help.template, in which `$` is special."""
    folders = [*([Path(config_dir)] if config_dir else []), conf_dir()]
    return body(folders).replace("$", "$$")
