"""What a verdict owes to the machine rather than to the point: memory held by others, limits of the system."""

from collections.abc import Iterable
from pathlib import Path

from train.launch import limits
from train.launch.classify import RankEnd, Verdict
from train.measure.telemetry import Guest

#: words in a rank's log that mean a limit of the system was met
LIMIT_WORDS = ("Resource temporarily unavailable", "can't start new thread", "Too many open files")


def held_by_others(verdict: Verdict, end: RankEnd, guests: Iterable[Guest]) -> Verdict:
    """A device's out of memory that would not have happened without other processes on it is no property of the point."""
    if verdict.status != "oom" or not end.error or end.error.get("where") != "device":
        return verdict
    guests = list(guests)
    held = sum(g.memory_gib or 0 for g in guests)
    if not guests or held < end.error["memory"].get("requested_gib", 0):
        return verdict
    names = ", ".join(f"pid {g.pid} ({g.name})" if g.pid else g.name for g in guests)
    return Verdict("crashed", f"{verdict.reason}; another process holds {held:.1f} GiB: {names}", end.rank)


def name_limits(verdict: Verdict, end: RankEnd, log: Path) -> None:
    """Add the limits to a crash's reason, where the rank's record or the end of its log says that one was met."""
    if verdict.status != "crashed":
        return
    if own := (end.error or {}).get("limits"):
        verdict.reason += own
    elif any(word in _tail(log) for word in LIMIT_WORDS):
        verdict.reason += limits.named()


def last_line(verdict: Verdict, end: RankEnd, log: Path) -> None:
    """A rank that left with an error and no record of it (no room for one, an import that failed) has said why in its log."""
    if verdict.status == "crashed" and end.error is None and (end.code or 0) > 0:
        lines = _tail(log).split("\n")
        verdict.reason += next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")


def limits_of(error: BaseException) -> str:
    """The limits, when the error is that one was met (no more processes: EAGAIN; no more files: EMFILE)."""
    return limits.named() if getattr(error, "errno", None) in (11, 24) else ""


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, path.stat().st_size - 4000))
            return f.read().decode(errors="replace")
    except OSError:
        return ""
