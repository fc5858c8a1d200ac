"""Python's garbage collector under control: it doesn't strike inside a step.

A full collection goes through every object of the process, millions once torch has compiled something, and stops the host for
tenths of a second; in a step bound by the host that is the step. Here full collections happen between steps, where nothing is
timed, and what the build left is never looked at again. What a step itself leaves in cycles (torch's checkpoints and pipeline
schedules do, tens of objects a layer) goes once the step is launched, by a look at young objects alone: 10 to 90 µs.
"""

import gc

EVERY = 100  # steps between two collections
SETTLED = 3  # steps after the first one: what is compiled, cached or captured is there by then


class Garbage:
    """From its making to `stop` nothing is collected but by `young`, at the end of a step, and `after` steps that are `due`."""

    def __init__(self, first: int) -> None:
        """`first`: the first step that follows."""
        self._settled = first + SETTLED
        gc.disable()
        self._keep()

    def due(self, step: int) -> bool:
        """Whether to collect after `step`."""
        return step == self._settled or (step + 1) % EVERY == 0

    def after(self, step: int) -> None:
        """Collect; once, also set apart for good what compilation and the first steps have made."""
        if step == self._settled:
            self._keep()
        else:
            gc.collect()

    def young(self) -> None:
        """What was made since the last collection and died."""
        gc.collect(0)

    def _keep(self) -> None:
        gc.collect()
        gc.freeze()

    def stop(self) -> None:
        """Back to Python's own ways."""
        gc.unfreeze()
        gc.enable()
