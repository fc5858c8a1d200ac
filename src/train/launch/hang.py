"""Is a rank hanging, and which: heartbeats tell that nothing moves, stacks tell who waits for whom."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Optional

from train.config import Launch
from train.launch.classify import Verdict, at_step
from train.launch.heartbeat import FIRST_STEPS, Watch
from train.launch.stacks import Stack

#: phases of a rank between steps that may take long: the first steps' limit holds
UNTIMED = ("replay", "checkpoint", "round", "end")


@dataclass
class Silence:
    """The rank that has been quiet for longest, and for longer than it may."""

    rank: int
    seconds: float  # since its last sign of life
    limit: float  # seconds


def silence(watches: Mapping[int, Watch], ended: Container[int], launch: Launch) -> Optional[Silence]:
    """max(launch.hang_seconds, 5 x the slowest step so far) without a heartbeat; first steps have their own limit."""
    quiet = {rank: w.look() for rank, w in watches.items() if rank not in ended}
    if not quiet:
        return None
    rank, seconds = max(quiet.items(), key=lambda item: item[1])
    if min(watches[r].step for r in quiet) < FIRST_STEPS or watches[rank].phase in UNTIMED:
        limit = launch.first_step_timeout
    else:
        limit = max(launch.hang_seconds, 5 * max(w.slowest for w in watches.values()))
    return Silence(rank, seconds, limit) if seconds > limit else None


def accuse(quiet: Silence, watches: Mapping[int, Watch], found: Mapping[int, Stack]) -> Verdict:
    """The verdict on a hang. The quietest rank may only be waiting for another, so the stacks tell whose fault it is."""
    rank = quiet.rank
    culprits = [r for r, s in found.items() if s.stopped] or [r for r, s in found.items() if s.where and not s.waiting]
    where = ""
    if culprits:
        rank = culprits[0]
        where = ", stopped by a signal" if found[rank].stopped else f", {found[rank].where}"
    elif rank in found and found[rank].where:
        where = f", {found[rank].where}"
    w = watches[rank]
    return Verdict(
        "timeout", f"rank {rank} gave no sign of life for {quiet.limit:.1f} s{at_step(w.step)} ({w.phase}){where}", rank
    )
