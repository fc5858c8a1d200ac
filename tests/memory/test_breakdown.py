"""A record of allocations split by kind, and what a CPU rank can say."""

from typing import Any

import pytest
import torch

from tests.memory import cases
from tests.memory.cases import Case
from train.measure.breakdown import GIB, KINDS, Breakdown, Known, blocks, by_kind, since_mark


def alloc(addr: int, size: int, at: int, *frames: tuple[str, str]) -> dict[str, Any]:
    shown = [{"filename": file, "name": name, "line": 1} for file, name in frames]
    return {"action": "alloc", "addr": addr, "size": size, "time_us": at, "frames": shown}


def free(addr: int, at: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": addr, "size": 0, "time_us": at, "frames": []}


ALIVE = [(1000, 100), (2000, 200), (3000, 50)]  # weights, state, something from before
KNOWN = Known(
    fixed=[(1000, 1100, "weights"), (2000, 2200, "optimizer state")], gradients=[(5000, 35.0)], logits=frozenset({64})
)


def test_kinds_at_the_peak() -> None:
    trace = [
        alloc(5000, 7, 10),  # an activation at the address that a gradient has later
        free(5000, 20),
        alloc(5000, 30, 30),
        alloc(6000, 64, 40),
        alloc(7000, 11, 50, ("/x/torch/autograd/graph.py", "run"), ("/x/train/parallel/bucket.py", "pack_grads")),
        alloc(7500, 13, 55, ("/x/train/parallel/zero2.py", "Zero2._sum")),
        alloc(8000, 5, 60, ("/x/train/model/transformer.py", "forward")),
        free(3000, 70),
        alloc(9000, 20, 80),  # less than what went: no new peak
        {"action": "segment_alloc", "addr": 1, "size": 10**9, "time_us": 90, "frames": []},
    ]
    assert by_kind(ALIVE, trace, KNOWN) == {
        "weights": 100, "optimizer state": 200, "gradients": 30 + 13, "logits": 64, "communication": 11,
        "activations": 50 + 5,
    }  # fmt: skip


def test_a_peak_at_the_start() -> None:
    assert by_kind(ALIVE, [free(3000, 1), alloc(4000, 10, 2)], KNOWN) == {
        "weights": 100,
        "optimizer state": 200,
        "activations": 50,
    }


def test_an_address_that_is_used_again_counts_once() -> None:
    trace = [
        free(3000, 1),
        alloc(3000, 500, 2, ("/x/train/memory/streamed.py", "fetch")),
        free(3000, 3),
        alloc(3000, 9, 4),
    ]
    assert by_kind(ALIVE, trace, KNOWN)["optimizer state"] == 200 + 500


def test_gradients_from_before_the_step_are_found_by_address() -> None:
    known = Known(gradients=[(3000, 1.0)])
    assert by_kind(ALIVE, [], known) == {"activations": 300, "gradients": 50}


def test_the_record_begins_behind_the_second_mark() -> None:
    mark = {"action": "snapshot", "addr": 0, "size": 0}
    assert since_mark([alloc(1, 1, 1), mark, mark, alloc(2, 2, 2), mark]) == [alloc(2, 2, 2), mark]


def test_blocks_follow_each_other() -> None:
    found = list(blocks({"address": 100, "blocks": [{"size": 8, "state": "x"}, {"size": 4, "state": "y"}]}))
    assert [b["address"] for b in found] == [100, 108]


@pytest.mark.parametrize("reduction", ["ddp", "fsdp"])
def test_on_a_cpu_what_tensors_say(reduction: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = Case(reduction)
    cfg, dp, model = cases.setup(0, 1, case)
    breakdown = Breakdown(cfg, model, dp, torch.device("cpu"), tmp_path / "never")
    for step in range(3):
        with breakdown.at(step):
            cases.one_step(dp, 0, 1, case, step)
            breakdown.backward_done()
            dp.step(1e-3)
    dp.close()
    size = 4 * sum(p.numel() for p in model.parameters())
    assert breakdown.kinds["weights"] * GIB == pytest.approx(size)
    assert breakdown.kinds["gradients"] * GIB == pytest.approx(size)
    assert 2 * size < breakdown.kinds["optimizer state"] * GIB < 2.05 * size  # two moments and step counters
    assert set(breakdown.kinds) < set(KINDS)
    assert not (tmp_path / "never").exists()
