"""compile.kernels: which kernels a run takes from this folder, and what each goes with. No torch here."""

from collections.abc import Iterator, Mapping

from train.config import ConfigError, Train
from train.names import nearest
from train.parallel import stages

NAMES = ("adamw", "loss", "swiglu", "swiglu_down", "rope", "norm", "carry", "stacked")
FUSED = ("adamw", "loss", "norm", "carry", "stacked")  # the others only match what Inductor makes: docs/kernels.md


def chosen(value: str) -> tuple[str, ...]:
    """The kernels that compile.kernels names: `inductor` none, `fused` those that save time, else names joined by +.

    Of `auto` those it may take: `fitting` says which.
    """
    return {"inductor": (), "fused": FUSED, "auto": FUSED}.get(value, tuple(value.split("+")))


def spelled(value: str) -> str:
    """A valid value in the one spelling that it has in a point's identity: names, if it is any, in this file's order."""
    return value if value in ("auto", "inductor") else "+".join(sorted(chosen(value), key=NAMES.index))


def fitting(cfg: Train, degrees: Mapping[str, int]) -> tuple[str, ...]:
    """The kernels of a valid point where Triton runs: what compile.kernels names; of `auto` what goes with the rest."""
    left_out = {name for name, _ in _refusals(cfg, degrees)}
    if cfg.compile.kernels == "auto" and cfg.compile.name == "none":
        # their gain is measured against Inductor's; the host, which eager layers wait for, has more to do
        left_out |= {"norm", "stacked"}
    return tuple(name for name in chosen(cfg.compile.kernels) if name not in left_out)


def values(cfg: Train) -> None:
    """Raises ConfigError for a name that isn't one, and for a name that is there twice."""
    value = cfg.compile.kernels
    names = chosen(value)
    wrong = [name for name in names if name not in NAMES]
    if wrong or len(set(names)) != len(names):
        alone = "+" in value and bool({"auto", "inductor", "fused"} & set(names))
        close = nearest(wrong[0], ["auto", "inductor", "fused", *NAMES]) if wrong and not alone else ""
        valid = f"must be auto, inductor, fused, or some of {', '.join(NAMES)} joined by +, each once{close}"
        raise ConfigError("compile.kernels", value, valid)


def combination(cfg: Train, degrees: Mapping[str, int]) -> None:
    """Kernels that were asked for and can't be had with the rest of the point. Raises ConfigError."""
    refused: dict[str, str] = {}
    for name, why in _refusals(cfg, degrees):
        refused.setdefault(name, why)
    if refused and cfg.compile.kernels != "auto":
        rest = "+".join(name for name in chosen(cfg.compile.kernels) if name not in refused) or "inductor"
        said = "; ".join(f"{name} {why}" for name, why in refused.items())
        left = f"without {'it' if len(refused) == 1 else 'them'}: {rest}"
        raise ConfigError("compile.kernels", cfg.compile.kernels, f"{said}; {left}")


def _refusals(cfg: Train, degrees: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(kernel, why) of those in compile.kernels that don't go with the rest."""
    names, memory, tp = chosen(cfg.compile.kernels), cfg.memory, degrees["tp"]
    schedule = cfg.parallelism.pp_schedule or stages.DEFAULT
    # on torch 2.11; 2.13 doesn't
    again = f"would keep more of layers that run again: memory.recompute={memory.recompute}"
    kept = cfg.compile.name != "none" and memory.recompute in ("full", "selective")
    twice = f"has one backward, parallelism.pp_schedule={schedule} runs it in two"
    for name, refused, why in (
        ("adamw", cfg.optim.name != "adamw", "is optim=adamw's update"),
        ("adamw", memory.optimizer_offload != "none", "wants its state on the device: memory.optimizer_offload=none"),
        ("loss", tp > 1, f"takes the whole vocabulary, here it is shared by tp={tp}"),
        ("loss", memory.lm_head_kernel != "own", f"is not memory.lm_head_kernel={memory.lm_head_kernel}"),
        *((name, stages.SCHEDULES[schedule].split, twice) for name in ("loss", "norm", "stacked")),
        *((name, kept, again) for name in ("norm", "stacked")),
        ("norm", cfg.model.norm_eps == 0, "needs model.norm_eps above 0"),
        ("swiglu", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        ("carry", cfg.compile.name == "none", "saves what Inductor fuses with the sum: needs compile=layer"),
        ("carry", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        (
            "carry",
            memory.recompute in ("full", "selective"),
            "hands on two tensors, and memory.recompute would keep both",
        ),
        ("carry", memory.recompute == "budget", "was not tried with memory.recompute=budget"),
        ("carry", memory.activation_offload, "hands on two tensors, memory.activation_offload follows one"),
        *(("carry", degrees[d] > 1, f"was not tried with {d} above 1, here {d}={degrees[d]}") for d in ("pp", "cp")),
        ("carry", cfg.parallelism.async_tp, "was not tried with parallelism.async_tp=true"),
        ("swiglu_down", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        ("swiglu_down", "swiglu" in names, "takes swiglu's place"),
        # eager recompute would run its matmul again, which perf/hfu doesn't count
        ("swiglu_down", cfg.compile.name == "none", "needs compile=layer"),
        ("swiglu_down", cfg.precision.name == "fp8", "has w_down's matmul in it, which precision=fp8 makes in fp8"),
        ("swiglu_down", cfg.parallelism.async_tp, "was not tried with parallelism.async_tp=true"),
        (
            "stacked",
            bool({"swiglu", "swiglu_down", "rope"} & set(names)),
            "takes the place of swiglu, swiglu_down and rope",
        ),
        (
            "stacked",
            cfg.reduction.name == "fsdp",
            "wants whole weights in one place, reduction=fsdp gathers them one by one",
        ),
        ("stacked", cfg.precision.name == "fp8", "makes one matmul of two or three, which precision=fp8 scales apart"),
        ("stacked", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        ("stacked", cfg.model.qk_norm, "turns q and k as they come, model.qk_norm=true norms them before"),
        ("stacked", memory.recompute == "selective", "would make memory.recompute=selective keep q too"),
        ("stacked", memory.recompute == "budget", "was not tried with memory.recompute=budget"),
        ("stacked", memory.activation_offload, "was not tried with memory.activation_offload"),
        ("stacked", memory.optimizer_offload != "none", "was not tried with memory.optimizer_offload"),
        ("stacked", degrees["cp"] > 1, f"was not tried with cp above 1, here cp={degrees['cp']}"),
        ("stacked", cfg.parallelism.async_tp, "was not tried with parallelism.async_tp=true"),
    ):
        if name in names and refused:
            yield name, why
