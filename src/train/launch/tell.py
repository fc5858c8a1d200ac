"""Lines for the terminal. A closed terminal or a reader that has gone must not end a sweep of hours."""

import io
import os
import sys


def say(text: str) -> None:
    """One line of progress on standard output; into nothing once nobody reads."""
    try:
        print(text, flush=True)
    except (OSError, ValueError, AttributeError):  # broken pipe, terminal gone, closed or no stdout
        _silence()
    except UnicodeEncodeError:
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = open(1, "w", closefd=False)


class Unbreakable(io.StringIO):
    """Standard output for a live view that goes on writing when the terminal is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stdout  # a live view puts itself in the place of sys.stdout later

    def write(self, text: str) -> int:
        """Into nothing once the terminal is gone."""
        try:
            return self.stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        """See write."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass

    def isatty(self) -> bool:
        """Of the stream behind."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Of the stream behind."""
        return self.stream.fileno()


def fill_standard_files() -> None:
    """Descriptors 0, 1 and 2 that the caller closed become /dev/null, lest a pipe of ours gets their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is `fd`
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
