"""Pipeline stages by rule: schedules, which rank has which stage, which layers a stage has, and the bubble that a schedule
has by itself. No torch.

A pipeline of pp ranks is cut into pp x pp_virtual stages, one after the other through the model: `virtual` stages (torch's
word is chunks) lie on every rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from train.config import ConfigError, Train
from train.measure import flops
from train.names import nearest


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    torch: str  # its name in torch.distributed.pipelining
    virtual: int  # stages a rank, unless pp_virtual says otherwise
    least: int  # stages a rank, at least
    most: int  # and at most
    v: bool = False  # a rank has the stages s and last - s; else s, s + pp, s + 2 pp, …
    split: bool = False  # backward in two: gradients of inputs (I), then, when there is time, of weights (W)
    rounds: bool = False  # micro-batches go in rounds of equal size, of about pp


MANY = 2**16
SCHEDULES = {
    "gpipe": Schedule("GPipe", 1, 1, 1),  # Huang et al. 2018, arXiv 1811.06965
    "1f1b": Schedule("1F1B", 1, 1, 1),  # Narayanan et al. 2019, arXiv 1806.03377
    "interleaved_1f1b": Schedule("Interleaved1F1B", 2, 2, MANY, rounds=True),  # Narayanan et al. 2021, arXiv 2104.04473
    "looped_bfs": Schedule("LoopedBFS", 2, 2, MANY),  # Lamy-Poirier 2022, arXiv 2211.05953
    # Qi et al. 2023, arXiv 2401.10241
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", 2, 1, MANY, split=True, rounds=True),
    "zbv": Schedule("ZBVZeroBubble", 2, 2, 2, v=True, split=True),  # Qi et al. 2024, arXiv 2405.15362
    "dualpipev": Schedule("DualPipeV", 2, 2, 2, v=True, split=True),  # DeepSeek-AI 2024, arXiv 2412.19437
}
DEFAULT, DEFAULT_VIRTUAL = "1f1b", "interleaved_1f1b"  # with pp_virtual above 1


@dataclass(frozen=True)
class Plan:
    """A pipeline: who has what."""

    name: str
    pp: int
    split: tuple[int, ...]  # layers of each stage

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name]

    @property
    def stages(self) -> int:
        return len(self.split)

    @property
    def virtual(self) -> int:
        return self.stages // self.pp

    def rank_of(self, stage: int) -> int:
        """Place along pp."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.schedule.v and turn % 2 else place

    def of_rank(self, place: int) -> list[int]:
        """Stages of the rank at `place` along pp, in the order of forward."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == place]

    def layers(self, stage: int) -> range:
        """Indices of a stage's layers in the whole model."""
        first = sum(self.split[:stage])
        return range(first, first + self.split[stage])


def values(cfg: Train) -> None:
    """The pipeline's keys by themselves. Raises ConfigError."""
    p = cfg.parallelism
    if p.pp_schedule is not None and p.pp_schedule not in SCHEDULES:
        hint = nearest(str(p.pp_schedule), list(SCHEDULES))
        raise ConfigError("parallelism.pp_schedule", p.pp_schedule, f"must be one of {', '.join(SCHEDULES)}{hint}")
    if p.pp_virtual is not None and not 1 <= p.pp_virtual <= MANY:
        raise ConfigError("parallelism.pp_virtual", p.pp_virtual, f"must be an integer between 1 and {MANY} or null")


def plan(cfg: Train, pp: int, micro_batches: int) -> Plan | None:
    """The pipeline of a configuration, None for pp=1. Raises ConfigError for one that can't run.

    `pp`: resolved; `micro_batches`: a step, of every data-parallel rank.
    """
    p = cfg.parallelism
    if pp == 1:
        if p.pp_split is not None and len(p.pp_split) > 1 or (p.pp_virtual or 1) > 1:
            key = "pp_split" if p.pp_split is not None else "pp_virtual"
            raise ConfigError(f"parallelism.{key}", getattr(p, key), "goes with parallelism.pp above 1 only")
        return None
    name = p.pp_schedule or (DEFAULT if (p.pp_virtual or 1) == 1 else DEFAULT_VIRTUAL)
    schedule = SCHEDULES[name]
    virtual = p.pp_virtual or schedule.virtual
    if not schedule.least <= virtual <= schedule.most:
        valid = f"{schedule.least}" + ("" if schedule.most == schedule.least else " or more")
        raise ConfigError("parallelism.pp_virtual", virtual, f"pp_schedule={name} has {valid} stages a rank")
    _check_micro_batches(name, pp, virtual, micro_batches)
    _check_company(cfg, name)
    return Plan(name, pp, tuple(_split(cfg, pp, virtual)))


def settle(cfg: Train) -> None:
    """Fill in the pipeline's keys of a configuration whose degrees and grad_accum are resolved: equal ones become equal."""
    p = cfg.parallelism
    assert isinstance(p.pp, int) and cfg.grad_accum is not None
    found = plan(cfg, p.pp, cfg.grad_accum)
    p.pp_schedule, p.pp_virtual, p.pp_split = (
        (found.name, found.virtual, list(found.split)) if found is not None else (None, None, None)
    )


def _check_micro_batches(name: str, pp: int, virtual: int, count: int) -> None:
    schedule = SCHEDULES[name]
    least = 2 * pp if name == "dualpipev" else pp
    if count < least:
        what = f"parallelism.pp={pp} with pp_schedule={name} needs at least {least} micro-batches a step"
        raise ConfigError("grad_accum", count, what)
    rounds = max(1, count // pp)
    if schedule.rounds and count % rounds:
        near = [n for n in range(count - pp, count + pp + 1) if n >= pp and n % max(1, n // pp) == 0 and n != count]
        low, high = max((n for n in near if n < count), default=pp), min(n for n in near if n > count)
        why = f"pp_schedule={name} takes them in {rounds} rounds of equal size; pp={pp} (nearest: {low}, {high})"
        raise ConfigError("grad_accum", count, why)


def _check_company(cfg: Train, name: str) -> None:
    """What a pipeline, or its schedule, doesn't go with."""
    pp, r = cfg.parallelism.pp, cfg.reduction
    if cfg.model.tied:
        raise ConfigError(
            "model.tied", True, f"embedding and head lie on different stages; parallelism.pp={pp} needs false"
        )
    for key, wrong in (
        ("reshard_after_forward", r.reshard_after_forward not in (None, False)),
        ("accumulate", r.accumulate == "every"),
        ("prefetch", r.prefetch is not None),
    ):
        if wrong:
            why = f"with parallelism.pp={pp} gathered weights stay and gradients are reduced once a step; leave it out"
            raise ConfigError(f"reduction.{key}", getattr(r, key), why)
    if SCHEDULES[name].split:
        whole = ", ".join(n for n, s in SCHEDULES.items() if not s.split)
        why = f"pp_schedule={name} runs backward in two parts, each of which would start over; goes with {whole}"
        if cfg.compile.name != "none":
            raise ConfigError("compile", cfg.compile.name, why)
        if cfg.memory.recompute != "none":
            raise ConfigError("memory.recompute", cfg.memory.recompute, why)


def _split(cfg: Train, pp: int, virtual: int) -> list[int]:
    stages, layers, given = pp * virtual, cfg.model.layers, cfg.parallelism.pp_split
    if given is None:
        if layers < stages:
            why = f"pp={pp} x pp_virtual={virtual} makes {stages} stages of at least one layer; model.layers={layers}"
            raise ConfigError("parallelism.pp", pp, why)
        return balanced(*costs(cfg), stages)
    if len(given) != stages or sum(given) != layers or min(given) < 1:
        shown = f"[{','.join(map(str, given))}]"
        why = f"must be pp x pp_virtual = {stages} numbers, each at least 1, that add up to model.layers={layers}"
        raise ConfigError("parallelism.pp_split", shown, why)
    return list(given)


def costs(cfg: Train) -> tuple[list[float], float, float]:
    """FLOPs a token of each layer, and of the same kind what the embedding and the head weigh.

    The head is a matmul. The embedding is none: it counts for a tenth of one, for the gradient of its table that every
    micro-batch adds to and the optimizer reads (bytes, not FLOPs).
    """
    m = cfg.model
    head = 6.0 * m.vocab * m.dim
    layers = flops.flops_per_token(m, cfg.seq_len)["mfu_causal"] - head
    return [layers / m.layers] * m.layers, 0.1 * head, head


def balanced(layers: Sequence[float], embedding: float, head: float, stages: int) -> list[int]:
    """Layers per stage: the most expensive stage is as cheap as can be, then the sum of squares. Exact, by dynamic programming.

    `layers`: cost of each; the first stage has the embedding besides, the last one the head.
    """
    count = len(layers)
    upto = [0.0]
    for cost in layers:
        upto.append(upto[-1] + cost)
    # best[n]: (largest cost, sum of squares, split) of the first n layers over the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extra = embedding * (stage == 0) + head * (stage == stages - 1)
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        left = stages - 1 - stage
        for done, (largest, squares, split) in best.items():
            for end in range(done + 1, count - left + 1) if left else (count,):
                cost = upto[end] - upto[done] + extra
                found = (max(largest, cost), squares + cost * cost, (*split, end - done))
                if end not in after or found[:2] < after[end][:2]:
                    after[end] = found
        best = after
    return list(best[count][2])


class Action(NamedTuple):
    """Something that a rank computes for a micro-batch."""

    stage: int
    micro_batch: int
    kind: str  # F forward; B backward; I and W: its two parts


UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def idle(orders: Sequence[Iterable[Action]], stages: int, seconds: Mapping[str, float] = UNITS) -> list[float]:
    """The share of a step that each rank would be idle if nothing but computing took time and all stages were equal.

    `orders`: what each rank of a pipeline computes, in order; `seconds`: of each kind, backward twice forward by default
    (two matmuls for one). GPipe and 1F1B: (pp - 1) / (m + pp - 1). Raises ValueError for orders that never end.
    """
    queues = [list(order) for order in orders]
    at, busy = [0.0] * len(queues), [0.0] * len(queues)
    position = [0] * len(queues)
    done: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                action = queue[position[rank]]
                needs = _before(action, stages)
                if any(not set(any_of) & done.keys() for any_of in needs):
                    break
                ready = max((done[a] for any_of in needs for a in any_of if a in done), default=0.0)
                at[rank] = done[action] = max(at[rank], ready) + seconds[action.kind]
                busy[rank] += seconds[action.kind]
                position[rank] += 1
                moved = True
    if any(position[rank] < len(queue) for rank, queue in enumerate(queues)):
        raise ValueError("the ranks wait for each other without end")
    return [1 - part / max(at) for part in busy]


def _before(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What must be done before: one of each tuple."""
    stage, micro_batch, kind = action
    if kind == "F":
        return [] if stage == 0 else [(Action(stage - 1, micro_batch, "F"),)]
    if kind == "W":
        return [(Action(stage, micro_batch, "I"),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, micro_batch, "F"),)]
    if stage < stages - 1:
        needs.append((Action(stage + 1, micro_batch, "B"), Action(stage + 1, micro_batch, "I")))
    return needs
