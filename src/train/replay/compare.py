"""Passes of a run side by side: Merkle roots, the first difference, and what it points to. No torch.

A pass is a list over ranks of lists over steps of {stage: {name: hex}}. Stages in the order of cause and effect: `grad`,
a rank's own gradients in the order of backward; `grad_sum`, what it owns of the reduced ones; `state`, its shard of
weights and optimizer state.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

Step = dict[str, dict[str, str]]
Pass = list[list[Step]]

STAGES = ("grad", "grad_sum", "state")


def leaf(step: int, rank: int, content: Step) -> bytes:
    """32 bytes over everything that was hashed of a rank's step, by name, whatever the order of backward."""
    state = blake3(b"leaf\0%d\0%d\0" % (step, rank))
    for stage in STAGES:
        for name, digest in sorted(content[stage].items()):
            state.update(f"{name}\0{digest}\0".encode())
    return state.digest()


def merkle_root(leaves: Sequence[bytes]) -> str:
    """Hex root of a binary tree over the leaves; an odd node at the end of a level moves up as it is.

    Leaves and inner nodes are hashed under different prefixes (as in RFC 6962, section 2.1), so that none passes for the
    other.
    """
    level = [blake3(b"\0" + each).digest() for each in leaves]
    while len(level) > 1:
        pairs = [blake3(b"\1" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(level) & ~1 :]
    return level[0].hex() if level else ""


def leaves(run: Pass) -> list[list[bytes]]:
    """[step][rank] leaves of a pass."""
    return [[leaf(step, rank, steps[step]) for rank, steps in enumerate(run)] for step in range(len(run[0]))]


def root(run: Pass) -> str:
    """Merkle root of a pass, leaves by step, then rank."""
    return merkle_root([each for step in leaves(run) for each in step])


@dataclass(frozen=True)
class Difference:
    """Where a pass first left the first pass."""

    in_pass: str  # second | fresh
    step: int
    stage: str
    ranks: list[int]  # all that differ at this stage of this step
    rank: int
    tensor: str
    world: int

    def __str__(self) -> str:
        count = f"{len(self.ranks)} of {self.world} ranks differ"
        return f"{self.in_pass} pass: step {self.step}, rank {self.rank}, {self.tensor} ({count}): {self.cause()}"

    def cause(self) -> str:
        """Whether it looks like a kernel or like a device."""
        if self.world == 1:
            return "with one rank a nondeterministic kernel and a bad device can't be told apart"
        if len(self.ranks) == self.world:
            return "all ranks: a nondeterministic kernel or setting"
        if len(self.ranks) == 1:
            return f"one rank alone: suspect the device or link of rank {self.rank}"
        return "some ranks: neither one device nor all of them"


def first_difference(name: str, first: Pass, other: Pass) -> Difference | None:
    """The earliest step, and in it the earliest stage, at which any rank of `other` differs from `first`."""
    world = len(first)
    for step in range(max(len(first[0]), len(other[0]))):
        for stage in STAGES:
            found: dict[int, str] = {}
            for rank in range(world):
                a, b = (run[rank][step][stage] if step < len(run[rank]) else {} for run in (first, other))
                tensor = next((key for key in {**a, **b} if a.get(key) != b.get(key)), None)
                if tensor is not None:
                    found[rank] = tensor
            if found:
                rank = min(found)
                return Difference(name, step, stage, sorted(found), rank, found[rank], world)
    return None


def conclude(passes: dict[str, Pass]) -> dict[str, Any]:
    """status.json's keys about the passes `first`, `second` and `fresh`."""
    first = passes["first"]
    roots = {name: root(run) for name, run in passes.items()}
    differences = [d for name, run in passes.items() if name != "first" and (d := first_difference(name, first, run))]
    return {
        "leaf_root": roots["first"],
        "replay_match": len(set(roots.values())) == 1,
        "replay_difference": str(differences[0]) if differences else None,
        "replay": {
            "roots": roots,
            "leaves": len(first) * len(first[0]),
            "differences": [asdict(d) | {"cause": d.cause()} for d in differences],
        },
    }
