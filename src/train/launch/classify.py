"""How a point ended, from what its ranks left: pure functions, so that every fault in the book can be a test."""

import re
import signal
from dataclasses import dataclass, field
from typing import Any, Optional

#: statuses with which a command ends with exit code 1
FAILED = ("crashed", "timeout", "lost", "interrupted", "pending", "running")


@dataclass
class RankEnd:
    """One rank: exit code (negative: signal; None: still running when the supervisor ended it), when, and its own record."""

    rank: int
    code: Optional[int] = None
    at: float = float("inf")  # monotonic seconds of the end
    killed: bool = False  # by the supervisor, after the point was decided
    step: int = -1  # last step it was in
    done: bool = False  # it left its result: an exit code of 0 alone proves nothing
    error: Optional[dict[str, Any]] = field(default=None)  # launch.failure.describe


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


def failed(end: RankEnd) -> bool:
    """Did the rank fail by itself, so that the point is over?"""
    return not end.killed and (end.code not in (0, None) or end.error is not None or (end.code == 0 and not end.done))


def at_step(step: int) -> str:
    """Words for a reason, with a space before them; -1: no rank was in a step yet."""
    return f" at step {step}" if step >= 0 else " before the first step"


def _from_error(end: RankEnd) -> Verdict:
    assert end.error is not None
    kind, message = end.error["kind"], end.error["message"]
    step = at_step(end.error.get("step", -1))
    if kind == "oom":
        return Verdict("oom", f"rank {end.rank}{step}: {message}", end.rank)
    if kind == "host_oom":
        return Verdict("oom", f"rank {end.rank}{step}: {message}", end.rank)
    if kind == "invalid":
        return Verdict("invalid", message, end.rank)
    if kind == "nonfinite":  # found on every rank alike, in the gathered numbers, which say whose it was
        culprit = re.search(r"first on rank (\d+)", message)
        return Verdict("crashed", message, int(culprit[1]) if culprit else end.rank)
    return Verdict("crashed", f"rank {end.rank}{step}: {end.error['type']}: {message}", end.rank)


def _from_death(end: RankEnd, oom_killed: bool) -> Verdict:
    step = at_step(end.step)
    if end.code is not None and end.code < 0:
        if oom_killed and end.code == -signal.SIGKILL:
            return Verdict("oom", f"rank {end.rank}: out of host memory, killed by the kernel{step}", end.rank)
        return Verdict("crashed", f"rank {end.rank} killed by signal {signal_name(-end.code)}{step}", end.rank)
    return Verdict("crashed", f"rank {end.rank} left with exit code {end.code}{step} and no result", end.rank)


def judge(ends: list[RankEnd], oom_killed: bool = False) -> Verdict:
    """The verdict on ranks that have all ended by themselves or were ended after the first failure.

    A rank's death by signal, or its leaving without a result, explains its peers' communication errors, whoever was heard
    first: with gloo a peer raises 0.01 s after a rank dies. Among real exceptions the earliest on the monotonic clock is
    the first. A failure with only communication errors is the earliest of those.
    """
    bad = [e for e in ends if failed(e)]
    if not bad:
        return Verdict("ok", "")
    comm = [e for e in bad if e.error is not None and e.error["kind"] == "comm"]
    own = [e for e in bad if e not in comm]
    first = min(own or comm, key=lambda e: e.error["at"] if e.error else e.at)
    verdict = _from_error(first) if first.error is not None else _from_death(first, oom_killed)
    if verdict.status != "crashed":
        return verdict
    later = [
        e for e in own if e is not first and not (e.error and e.error["message"] == (first.error or {}).get("message"))
    ]
    if later:
        verdict.reason += f" (later: {'; '.join(_short(e) for e in later)})"
    consequences = [e for e in comm if e is not first]
    if consequences:
        verdict.reason += f" (consequence on rank {', '.join(str(e.rank) for e in consequences)})"
    return verdict


def _short(end: RankEnd) -> str:
    if end.error is not None:
        return f"rank {end.rank}: {end.error['type']}: {end.error['message'][:80]}"
    return f"rank {end.rank}: {_from_death(end, False).reason.partition(f'rank {end.rank} ')[2]}"


def same_cause(reason: str) -> str:
    """A crash's reason without what differs between two points that crash alike: rank, step, peers, host, addresses, ports."""
    text = re.sub(r" \((later|consequence|on )[^)]*\)", "", reason)
    return re.sub(r"rank \d+|at step \d+|0x[0-9a-f]+|\[[^\]]*\]:\d+|:\d{4,5}\b|\b\d{5,}\b", "", text)
