"""compile.kernels: which kernels a run takes from this folder, and what each goes with. No torch here."""

from train.config import ConfigError, Train
from train.names import nearest
from train.parallel import stages

NAMES = ("adamw", "loss", "swiglu", "swiglu_down", "rope")
FUSED = ("adamw", "loss", "swiglu", "rope")  # swiglu_down is swiglu for less memory


def chosen(value: str) -> tuple[str, ...]:
    """The kernels that compile.kernels names: `inductor` none, `fused` those that save time, else names joined by +."""
    return {"inductor": (), "fused": FUSED}.get(value, tuple(value.split("+")))


def values(cfg: Train) -> None:
    """Raises ConfigError for a name that isn't one, and for a name that is there twice."""
    value = cfg.compile.kernels
    names = chosen(value)
    wrong = [name for name in names if name not in NAMES]
    if wrong or len(set(names)) != len(names):
        close = nearest(wrong[0], ["inductor", "fused", *NAMES]) if wrong else ""
        valid = f"must be inductor, fused, or some of {', '.join(NAMES)} joined by +, each once{close}"
        raise ConfigError("compile.kernels", value, valid)


def combination(cfg: Train, degrees: dict[str, int]) -> None:
    """Kernels that can't be had with the rest of the point. Raises ConfigError."""
    names, memory, tp = chosen(cfg.compile.kernels), cfg.memory, degrees["tp"]
    schedule = cfg.parallelism.pp_schedule or stages.DEFAULT
    for name, refused, why in (
        ("adamw", cfg.optim.name != "adamw", "is optim=adamw's update"),
        ("adamw", memory.optimizer_offload != "none", "wants its state on the device: memory.optimizer_offload=none"),
        ("loss", tp > 1, f"takes the whole vocabulary, here it is shared by tp={tp}"),
        ("loss", memory.lm_head_kernel != "own", f"is not memory.lm_head_kernel={memory.lm_head_kernel}"),
        (
            "loss",
            stages.SCHEDULES[schedule].split,
            f"has one backward, parallelism.pp_schedule={schedule} runs it in two",
        ),
        ("swiglu", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        ("swiglu_down", cfg.model.experts > 0, "is of a dense layer, here are experts"),
        ("swiglu_down", "swiglu" in names, "takes swiglu's place"),
        # eager recompute would run its matmul again, which perf/hfu doesn't count
        ("swiglu_down", cfg.compile.name == "none", "needs compile=layer"),
        ("swiglu_down", cfg.precision.name == "fp8", "has w_down's matmul in it, which precision=fp8 makes in fp8"),
        ("swiglu_down", cfg.parallelism.async_tp, "was not tried with parallelism.async_tp=true"),
    ):
        if name in names and refused:
            rest = "+".join(n for n in names if n != name) or "inductor"
            raise ConfigError("compile.kernels", cfg.compile.kernels, f"{name} {why}; without it: {rest}")
