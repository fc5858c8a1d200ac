"""How a point ended, from what its ranks left: pure functions, so that every fault in the book can be a test."""

import signal
from dataclasses import dataclass, field
from typing import Any, Optional

#: exit codes of the sweep for the worst status
FAILED = ("crashed", "timeout", "lost", "interrupted", "pending", "running")


@dataclass
class RankEnd:
    """One rank: exit code (negative: signal; None: still running when the supervisor ended it), when, and its own record."""

    rank: int
    code: Optional[int] = None
    at: float = float("inf")  # monotonic seconds of the end, or of the exception
    killed: bool = False  # by the supervisor, after the point was decided
    step: int = -1  # last step it was in
    error: Optional[dict[str, Any]] = field(default=None)  # {kind, type, message, at, step}


@dataclass
class Verdict:
    """status, reason, and the rank that it is about."""

    status: str
    reason: str
    rank: Optional[int] = None


def signal_name(number: int) -> str:
    """`9 (SIGKILL)`."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _from_error(end: RankEnd) -> Verdict:
    assert end.error is not None
    kind, message = end.error["kind"], end.error["message"]
    if kind == "oom":
        return Verdict("oom", f"rank {end.rank}: {message}", end.rank)
    if kind == "invalid":
        return Verdict("invalid", message, end.rank)
    if kind == "nonfinite":
        return Verdict("crashed", message, end.rank)
    where = f" at step {end.error['step']}" if end.error.get("step", -1) >= 0 else ""
    return Verdict("crashed", f"rank {end.rank}{where}: {end.error['type']}: {message}", end.rank)


def judge(ends: list[RankEnd], oom_killed: bool = False) -> Verdict:
    """The verdict on ranks that have all ended by themselves or were ended after the first failure.

    A rank's death by signal or without a record explains its peers' communication errors, whoever was heard first: with
    gloo a peer raises 0.01 s after a rank dies. Among real exceptions the earliest on the monotonic clock is the first.
    """
    failed = [e for e in ends if not e.killed and (e.code != 0 or e.error is not None)]
    if not failed:
        return Verdict("ok", "")
    own = [e for e in failed if e.error is not None and e.error["kind"] != "comm"]
    dead = [e for e in failed if e.error is None]
    signalled = [e for e in dead if e.code is not None and e.code < 0]
    comm = [e for e in failed if e.error is not None and e.error["kind"] == "comm"]
    first = min(own + dead or comm, key=lambda e: e.error["at"] if e.error else e.at)
    if first.error is not None:
        verdict = _from_error(first)
    elif first in signalled:
        assert first.code is not None
        at = f" at step {first.step}" if first.step >= 0 else " before the first step"
        if oom_killed and first.code == -signal.SIGKILL:
            verdict = Verdict("oom", f"rank {first.rank}: host memory used up, killed by the kernel{at}", first.rank)
        else:
            verdict = Verdict(
                "crashed", f"rank {first.rank} killed by signal {signal_name(-first.code)}{at}", first.rank
            )
    else:
        verdict = Verdict("crashed", f"rank {first.rank} left with exit code {first.code} and no result", first.rank)
    others = [e for e in own if e is not first]
    if others and verdict.status == "crashed":
        listed = "; ".join(f"rank {e.rank}: {e.error['type']}" for e in others if e.error)
        verdict.reason += f" (later: {listed})"
    consequences = [e for e in comm if e is not first]
    if consequences and verdict.status == "crashed":
        verdict.reason += f" (consequence on rank {', '.join(str(e.rank) for e in consequences)})"
    return verdict
