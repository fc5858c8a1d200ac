"""The collector stays out of the steps, and nothing piles up meanwhile."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.one_rank import built, configuration
from train.garbage import EVERY, SETTLED, Garbage

STEPS = 2 * EVERY


@pytest.mark.parametrize("recompute", ("none", "selective"))  # selective leaves cycles in every layer
def test_no_collection_inside_a_step_and_nothing_piles_up(tmp_path: Path, recompute: str) -> None:
    cfg = configuration(steps=STEPS, optim__lr=1e-4, memory__recompute=recompute)
    with built(tmp_path / "point", cfg) as rank:
        meter = rank.make_meter()
        alive: list[int] = []  # at the start of each step: objects that the collector would look at
        launched = [-1]  # the newest step whose results are on their way
        ran: list[tuple[int, int]] = []  # (generation, newest launched step) of each collection
        beat, results = rank.heart.beat, meter.results

        def watched_beat(phase: str | None = None, step: int | None = None) -> None:
            beat(phase, step)
            if phase == "train":
                assert not gc.isenabled()
                alive.append(len(gc.get_objects()))

        def watched_results(*args: Any) -> None:
            results(*args)
            launched.append(rank.heart.step)

        def collected(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                assert launched[-1] == rank.heart.step, "inside a step"
                ran.append((info["generation"], launched[-1]))

        rank.heart.beat, meter.results = watched_beat, watched_results  # type: ignore[assignment, method-assign]
        gc.collect()
        gc.callbacks.append(collected)
        try:
            rank.train(meter)
        finally:
            gc.callbacks.remove(collected)
        assert gc.isenabled() and len(alive) == STEPS
        full = [step for generation, step in ran if generation == 2 and step >= 0]
        assert full == [SETTLED, EVERY - 1, 2 * EVERY - 1]
        assert [step for generation, step in ran if generation == 0] == list(range(STEPS))
        # one object a step would show between two full collections, and over both
        assert alive[2 * EVERY - 1] - alive[EVERY + 5] < EVERY // 2
        assert alive[EVERY - 1] - alive[SETTLED + 5] < EVERY // 2


def test_what_dies_in_a_cycle_is_collected_between_steps() -> None:
    class Node:
        pass

    keeper = Garbage(0)
    try:
        keeper.after(SETTLED)
        node = Node()
        node.me = node  # type: ignore[attr-defined]
        del node
        found = [o for o in gc.get_objects() if isinstance(o, Node)]
        assert len(found) == 1
        del found
        assert keeper.due(EVERY - 1) and not keeper.due(EVERY)
        keeper.after(EVERY - 1)
        assert not [o for o in gc.get_objects() if isinstance(o, Node)]
    finally:
        keeper.stop()
    assert gc.isenabled() and gc.get_freeze_count() == 0
