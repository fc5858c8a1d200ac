"""Command line: `python -m train [-m] key=value ...` → Hydra → our sweeper. The one place that turns errors into exit codes.

Exit codes: 0 every point ok, oom, infeasible or invalid (not all invalid); 1 a point crashed, timed out, was lost or is
left over; 2 bad input; 130, 143, 129 after SIGINT, SIGTERM, SIGHUP.
"""

import os
import re
import sys

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from train.config import ConfigError
from train.errors import one_line
from train.launch import environment
from train.sweep.store import conf_dir, register

#: flags with which Hydra only prints something
PRINTING = ("--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc")
PLAIN = re.compile(r"[\w.+-]+")


def prepare(args: list[str]) -> list[str]:
    """Arguments as Hydra wants them: one mode, free-form env names, and names that look like numbers kept as text."""
    out = []
    for arg in args:
        key, eq, value = arg.partition("=")
        if eq and key == "name" and PLAIN.fullmatch(value) and value != "null":
            arg = f"name='{value}'"
        elif eq and key.startswith(("env.", "nccl.env.", "launch.sbatch.")):
            parts = value.split(",")
            quoted = ",".join(f"'{p}'" for p in parts) if all(PLAIN.fullmatch(p) for p in parts) else value
            arg = f"++{key}={quoted}"  # a typed mapping is closed otherwise
        out.append(arg)
    if not any(a.split("=")[0] in PRINTING for a in out):
        out = ["--multirun"] + [a for a in out if a not in ("-m", "--multirun", "-r", "--run")]
    return out


def main() -> None:
    """Entry point of `python -m train` and of the console script. Never returns: exits with the codes above."""
    user_args = sys.argv[1:]
    full_error = environment.USER.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises typed exceptions; ranks get environment.USER, not this

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
    def task(_: object) -> None:
        raise AssertionError("points are run by the sweeper, never by Hydra's own launcher")

    try:
        register(ConfigStore.instance())
        sys.argv[1:] = prepare(user_args)
        task()
    except (ConfigError, HydraException, OmegaConfBaseException) as e:
        if full_error:
            raise
        sys.stderr.write(f"error: {one_line(e, user_args)}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
