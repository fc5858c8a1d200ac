"""Which points a sweep does not run: those that are final for good, and those that a smaller point's oom implies."""

import json

from train.config import Train
from train.sweep.freeze import training_config

#: final for good: a rerun keeps them
KEPT = ("ok", "oom", "infeasible", "invalid")
#: the knobs that memory grows with and what follows from them; a repeat needs as much as the first run
DERIVED = ("micro_batch", "seq_len", "global_batch", "grad_accum", "repeat")


def all_else(cfg: Train) -> str:
    """Everything of a resolved point but DERIVED: equal for points whose memory can be compared."""
    return json.dumps({k: v for k, v in training_config(cfg).items() if k not in DERIVED}, sort_keys=True)


def implies(small: Train, large: Train) -> bool:
    """Whether `small`'s oom means that `large` does not fit: no smaller along any knob, all else equal."""
    larger = large.micro_batch >= small.micro_batch and large.seq_len >= small.seq_len
    same = large.grad_accum == small.grad_accum or large.global_batch == small.global_batch
    return larger and same and all_else(large) == all_else(small)
