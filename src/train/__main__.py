"""Command line: `python -m train [-m] key=value ...` → Hydra → our sweeper. The one place that turns errors into exit codes.

Exit codes: 0 every point ok, oom, infeasible or invalid (not all invalid); 1 a point crashed, timed out, was lost or is
left over; 2 bad input; 130, 143, 129 after SIGINT, SIGTERM, SIGHUP.
"""

import os
import sys

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from train import command_line, completion, help
from train.config import ConfigError
from train.errors import one_line
from train.launch import environment
from train.sweep.store import conf_dir, register

BAD_INPUT = (ConfigError, command_line.UsageError, HydraException, OmegaConfBaseException, yaml.YAMLError)


def main() -> None:
    """Entry point of `python -m train` and of the console script. Never returns: exits with the codes above."""
    user_args = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # LC_ALL=C must not end a sweep
    full_error = environment.USER.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises typed exceptions; ranks get environment.USER, not this

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
    def task(_: object) -> None:
        raise AssertionError("points are run by the sweeper, never by Hydra's own launcher")

    try:
        flags = command_line.parse(user_args)
        if flags.shell_completion and completion.asked(sys.argv[0], flags.overrides):
            print(completion.BASH)
            sys.exit(0)
        register(ConfigStore.instance(), help.template(flags.config_dir))
        sys.argv[1:] = command_line.for_hydra(flags)
        task()
        sys.stdout.flush()
    except BAD_INPUT as e:
        if full_error:
            raise
        sys.stderr.write(f"error: {one_line(e, user_args)}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        sys.exit(130)
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
