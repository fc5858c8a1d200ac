"""The sbatch script of one array, from a Jinja2 template."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import jinja2

from train.config import ConfigError, Launch
from train.launch.slurm.options import Shape

DEFAULT = Path(__file__).with_name("default.sbatch.j2")


@dataclass
class Array:
    """What one script needs beside launch.*."""

    shape: Shape
    tasks: int  # of the array
    name: str  # job name: tells our jobs from those of a reused id
    comment: str  # token by which the array is found in the queue
    submission: Path  # folder with tasks.json, the script and the logs
    code: Path  # snapshot that runs
    after: Optional[str] = None  # array that must have ended: the previous chunk


def filename(path: Path) -> str:
    """A path inside SLURM's filename patterns, where % and backslashes have a meaning."""
    return str(path).replace("\\", "\\\\").replace("%", "%%")


def options(launch: Launch, array: Array) -> dict[str, Optional[str]]:
    """#SBATCH options, long names in sbatch's order of importance; None for a flag without value."""
    limit = f"%{launch.array_parallelism}" if launch.array_parallelism else ""
    logs = filename(array.submission)
    out: dict[str, Optional[str]] = {
        "job-name": array.name,
        "comment": array.comment,
        "array": f"0-{array.tasks - 1}{limit}",
        "nodes": str(array.shape.nodes),
        "ntasks-per-node": "1",
        "output": f"{logs}/%A_%a.log",
        "open-mode": "append",  # a requeued task goes on in the same log
        "requeue": None,
        "signal": f"USR2@{launch.signal_seconds}",
    }
    given = {
        "gpus-per-node": array.shape.gpus or None,
        "cpus-per-task": launch.cpus,
        "mem": launch.memory,
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclude": launch.exclude,
        "dependency": f"afterany:{array.after}" if array.after else None,
    }
    out |= {k: str(v) for k, v in given.items() if v is not None}
    return out | {k.replace("_", "-"): v for k, v in launch.sbatch.items()}


def render(launch: Launch, array: Array) -> str:
    """The script's text. Raises ConfigError when launch.template can't be read or doesn't render."""
    path = Path(launch.template) if launch.template else DEFAULT
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render(
            options=options(launch, array),
            launch=launch,
            shape=array.shape,
            cpus=launch.cpus,
            setup=launch.setup,
            code=str(array.code),
            python=launch.python or shlex.quote(sys.executable),
            submission=str(array.submission),
            log=f"{filename(array.submission)}/%A_%a-%t.log",
        )
    except OSError as e:
        raise ConfigError("launch.template", path, f"can't be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("launch.template", path, "is not UTF-8 text") from None
    except jinja2.TemplateError as e:
        line = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
        raise ConfigError("launch.template", path, f"doesn't render: {e}{line}") from None
    if not text.startswith("#!"):
        raise ConfigError("launch.template", path, "must render to a script that starts with #!")
    return text
