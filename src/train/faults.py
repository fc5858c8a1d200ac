"""fault=KIND@rank:step: what can't be injected from outside. Part of a point's identity. No torch."""

from dataclasses import dataclass

from train.config import ConfigError

#: kinds that change bits (train.flips); in a replayed run they strike in its second pass
FLIPS = ("bitflip_weight", "bitflip_grad", "bitflip_wire", "nondeterministic")
KINDS = FLIPS


@dataclass(frozen=True)
class Fault:
    """`rank` None: all of them. `bit`: which one a flip flips, counted from the lowest."""

    kind: str
    rank: int | None
    step: int
    bit: int = 0

    def on(self, rank: int) -> bool:
        """Whether it strikes on this rank."""
        return self.rank in (None, rank)


def parse(text: str) -> Fault:
    """KIND@rank:step or KIND@rank:step:bit; rank is a number or `all`. Raises ConfigError."""
    kind, at, where = text.partition("@")
    numbers = where.split(":")
    valid = f"must be KIND@rank:step[:bit] with KIND one of {', '.join(KINDS)}"
    if kind not in KINDS or not at or len(numbers) not in (2, 3):
        raise ConfigError("fault", text, valid)
    rank, rest = numbers[0], numbers[1:]
    if not all(n.isdecimal() for n in rest) or not (rank == "all" or rank.isdecimal()):
        raise ConfigError("fault", text, valid)
    return Fault(kind, None if rank == "all" else int(rank), *map(int, rest))
