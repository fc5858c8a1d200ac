"""The one error a user can cause, and the suggestion that goes with a misspelt name."""

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """Wrong folder, column or expression; the command prints its one line and exits with 2."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the valid name closest to `name`, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""
