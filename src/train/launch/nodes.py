"""A point over several nodes: one supervisor a node, which see each other through nodes/<n>.json in the point's folder.

Every node writes its own file: a counter while it lives, then how its ranks ended. Node 0 alone judges the point, over the
ranks of all nodes. Only the shared folder is needed, no network between supervisors.
"""

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import psutil

from train.launch.classify import RankEnd, Verdict, failed, judge
from train.sweep.freeze import write_json

#: a node writes its counter so often
BEAT_SECONDS = 1.0
#: and is dead when it has not for so long: well above the attribute cache of NFS (acdirmax 60 s does not apply, every beat
#: is a new file by rename), below the 30 s in which the other nodes' ranks must end
SILENT_SECONDS = 20.0
#: a node whose supervisor has not started so long after node 0's never will
JOIN_SECONDS = 180.0
#: a scheduler signals all nodes at once and kills within 30 s (KillWait); a node that has not ended by now is dead
SIGNAL_SECONDS = 3.0
#: when several nodes decided differently, this comes first
ORDER = ("lost", "timeout", "interrupted")


@dataclass
class Seen:
    """What is known of another node; `changed` on this node's monotonic clock."""

    record: dict[str, Any] = field(default_factory=dict)
    changed: float = field(default_factory=time.monotonic)

    def ended(self) -> bool:
        return self.record.get("state") == "ended"

    def failed(self) -> bool:
        return self.ended() and self.record["verdict"]["status"] != "ok"


class Nodes:
    """This node's place among `count`; `address` is what the other nodes reach this one at."""

    def __init__(self, folder: Path, node: int, count: int, address: str) -> None:
        self.folder, self.node, self.count, self.address = folder / "nodes", node, count, address
        self.peers = {n: Seen() for n in range(count) if n != node}
        self.beats, self.beaten = 0, float("-inf")
        self.folder.mkdir(exist_ok=True)

    def ranks(self, world: int) -> range:
        """The ranks of this node, consecutive and equally many on every node."""
        each = world // self.count
        return range(self.node * each, (self.node + 1) * each)

    def env(self) -> dict[str, str]:
        """Variables of the ranks: where rank 0 listens, and the interface that gloo uses between nodes."""
        out = {"MFU_SWEEP_HOST": self.address}
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(self.address)):
            out["GLOO_SOCKET_IFNAME"] = name  # gloo takes what the host's name resolves to: often 127.0.1.1
        return out

    def look(self) -> Optional[Verdict]:
        """Beat, and read the others' files, about once a second. A verdict when a node is gone."""
        now = time.monotonic()
        if now - self.beaten < BEAT_SECONDS:
            return None
        self.beaten, self.beats = now, self.beats + 1
        self._write({"state": "running", "beat": self.beats})
        return self._read()

    def failed(self) -> bool:
        """Whether another node has ended badly; for nodes other than 0 only node 0 counts, it judges for all."""
        return any(s.failed() for n, s in self.peers.items() if self.node == 0 or n == 0)

    def end(self, verdict: Verdict, decided: bool, ends: list[RankEnd], results: dict[str, Any], **more: Any) -> None:
        """Tell the others how this node ended. Times of ends travel as time of day: monotonic clocks differ by host."""
        shift = time.time() - time.monotonic()
        told = []
        for e in ends:
            d = dataclasses.asdict(e)
            d["at"] = e.at + shift if e.at != float("inf") else None
            if e.error is not None:
                d["error"] = {**e.error, "at": e.error["at"] + shift}
            told.append(d)
        self._write(
            {"state": "ended", "verdict": {**dataclasses.asdict(verdict), "decided": decided}, "ends": told,
             "results": results, **more},
        )  # fmt: skip

    def judge(self, verdict: Verdict, decided: bool, ends: list[RankEnd], oom_killed: bool) -> Verdict:
        """Node 0: wait for the others' ends and judge over the ranks of all nodes."""
        lost: Optional[Verdict] = None
        soon = verdict.status in ("interrupted", "lost")  # the scheduler kills us too, before long
        limit = time.monotonic() + (SIGNAL_SECONDS if soon else float("inf"))
        while lost is None and not all(s.ended() for s in self.peers.values()):
            time.sleep(0.1)
            lost = self._read()
            if time.monotonic() > limit:
                silent = ", ".join(str(n) for n, s in self.peers.items() if not s.ended())
                lost = Verdict("lost", f"node {silent} did not answer the signal that ended the others")
        everyone = list(ends)
        decisions = [verdict] if decided else []
        shift = time.time() - time.monotonic()
        for seen in self.peers.values():
            for d in seen.record.get("ends", []):
                d = {**d, "at": float("inf") if d["at"] is None else d["at"] - shift}
                if d["error"] is not None:
                    d["error"] = {**d["error"], "at": d["error"]["at"] - shift}
                everyone.append(RankEnd(**d))
            said = dict(seen.record.get("verdict", {}))
            if said.pop("decided", False):
                decisions.append(Verdict(**said))
        if any(_own_failure(e) for e in everyone):
            return judge(everyone, oom_killed)
        if lost is not None and verdict.status != "lost":
            return lost
        if decisions:
            return min(decisions, key=lambda v: ORDER.index(v.status) if v.status in ORDER else -1)
        return judge(everyone, oom_killed)

    def failure(self, rank: int) -> Optional[dict[str, Any]]:
        """{rank, host, step, …} of a rank on another node, as it said when it ended."""
        for seen in self.peers.values():
            for d in seen.record.get("ends", []):
                if d["rank"] == rank:
                    return {"rank": rank, "host": seen.record["host"], "step": d["step"], **(d["error"] or {})}
        return None

    def told(self, key: str) -> list[Any]:
        """What the other nodes said under `key` when they ended, in node order."""
        return [s.record[key] for _, s in sorted(self.peers.items()) if s.record.get(key)]

    def _write(self, content: dict[str, Any]) -> None:
        host = {"node": self.node, "host": socket.gethostname(), "pid": os.getpid()}
        write_json(self.folder / f"{self.node}.json", host | content)

    def _read(self) -> Optional[Verdict]:
        now = time.monotonic()
        for n, seen in self.peers.items():
            if seen.ended():
                continue
            try:
                record = json.loads((self.folder / f"{n}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                record = {}
            if record and record != seen.record:
                seen.record, seen.changed = record, now
            if not seen.record and now - seen.changed > JOIN_SECONDS:
                return Verdict("crashed", f"infrastructure: no supervisor on node {n} within {JOIN_SECONDS:.0f} s")
            if seen.record and not seen.ended() and now - seen.changed > SILENT_SECONDS:
                where = f"node {n} ({seen.record['host']})"
                return Verdict("lost", f"{where} gave no sign of life for {SILENT_SECONDS:.0f} s")
        return None


def _own_failure(end: RankEnd) -> bool:
    """A rank that failed by itself, not because a peer or its supervisor did."""
    return failed(end) and (end.error is None or end.error["kind"] != "comm")


def interface(address: str) -> Optional[str]:
    """The network interface with that IPv4 address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    return None


def address_towards(other: str) -> str:
    """This host's address on the way to `other` (a host's name), which `other` can reach in turn. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((socket.gethostbyname(other), 9))  # UDP: nothing is sent, the kernel picks the route
        return str(s.getsockname()[0])
