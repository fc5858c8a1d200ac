"""How many points ended how, and why; the counts add up to the grid."""

from dataclasses import dataclass

import pandas as pd

from analysis.load import STATUSES


@dataclass(frozen=True)
class Census:
    """`counts` in the order of STATUSES; `reasons` lists (status, reason, points that share it)."""

    counts: dict[str, int]
    reasons: list[tuple[str, str, list[str]]]
    extra: int  # point folders on disk that no grid names

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def line(self) -> str:
        """`6 points: 4 ok, 1 oom, 1 pending`."""
        parts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        extra = f" (and {self.extra} folder{'s' * (self.extra != 1)} outside the grid)" if self.extra else ""
        return f"{self.total} point{'s' * (self.total != 1)}: {parts or 'none'}{extra}"


def census(points: pd.DataFrame) -> Census:
    """The census of all points of the grid, finished or not."""
    listed = points[points["in_grid"].astype(bool)]
    found = listed["status"].value_counts()
    names = [*STATUSES, *sorted(set(found.index) - set(STATUSES))]
    reasons = []
    for status in names:
        if status in ("ok", "running"):
            continue
        part = listed[listed["status"] == status]
        for reason, same in part.groupby("reason", sort=False):
            reasons.append((status, str(reason) or "no reason recorded", [str(name) for name in same["point"]]))
    return Census({s: int(found[s]) for s in names if s in found}, reasons, len(points) - len(listed))
