"""The collector stays out of the steps, and nothing piles up meanwhile."""

import gc
from pathlib import Path
from typing import Any

from tests.parallel.one_rank import built, configuration
from train.garbage import EVERY, SETTLED, Garbage

STEPS = 3 * EVERY


def test_no_collection_in_a_step_and_no_objects_left(tmp_path: Path) -> None:
    with built(tmp_path / "point", configuration(steps=STEPS, optim__lr=1e-4)) as rank:
        meter = rank.make_meter()
        began: list[bool] = []  # of every step: was the collector on
        alive: list[int] = []  # objects that it would look at
        ran: list[tuple[int, str]] = []  # (step, phase) of every collection
        beat = rank.heart.beat

        def watched(phase: str | None = None, step: int | None = None) -> None:
            beat(phase, step)
            if phase == "train":
                began.append(gc.isenabled())
                alive.append(len(gc.get_objects()))

        def collected(phase: str, _: Any) -> None:
            if phase == "start":
                ran.append((rank.heart.step, rank.heart.phase))

        rank.heart.beat = watched  # type: ignore[method-assign]
        gc.callbacks.append(collected)
        try:
            rank.train(meter)
        finally:
            gc.callbacks.remove(collected)
        assert len(began) == STEPS and not any(began) and gc.isenabled()
        inside = [each for each in ran if each[0] >= 0]
        assert inside == [(step, "garbage") for step in (SETTLED, EVERY - 1, 2 * EVERY - 1, 3 * EVERY - 1)]
        # a cycle a step would show within a stretch without a collection, one kept object a step over all of them
        assert alive[2 * EVERY - 1] - alive[EVERY + 5] < EVERY // 2
        assert alive[-1] - alive[EVERY + 5] < EVERY // 2


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
