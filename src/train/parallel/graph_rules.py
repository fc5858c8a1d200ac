"""What compile.cuda_graph=true can't be combined with, before anything starts and without torch."""

from train.config import ConfigError, Train

WARMUP = 3  # steps as they are before one is captured: kernels are compiled and chosen, workspaces and tables are made
PROFILED = 2  # last steps, which profile=true records (measure/trace.py): they should be replayed ones
GROUPED = 8  # bf16 elements that torch's grouped matmul wants a row to be a multiple of (model/grouped.py)


def combination(cfg: Train, nproc: int) -> None:
    """Raises ConfigError. `cfg.device` and `cfg.precision` are resolved."""
    if not cfg.compile.cuda_graph:
        return
    least = WARMUP + 1 + (PROFILED if cfg.profile else 0)
    m, offload, precision = cfg.model, cfg.memory.optimizer_offload, cfg.precision.name
    looped = m.experts and (precision != "bf16" or m.dim % GROUPED or m.expert_ffn % GROUPED)
    for wrong, why in (
        (cfg.device != "cuda", f"device={cfg.device} has no CUDA graphs"),
        (nproc > 1, f"nproc={nproc} has collectives between ranks, which are not captured; set nproc=1"),
        (cfg.reduction.name == "fsdp", "reduction=fsdp gathers and frees weights on the host's word; set reduction=ddp"),
        (cfg.memory.activation_offload, "memory.activation_offload=true takes host buffers in every layer"),
        (offload != "none", f"memory.optimizer_offload={offload} updates by way of the host"),
        (cfg.optim.name != "adamw", f"optim={cfg.optim.name} takes its learning rate from the host; set optim=adamw"),
        (cfg.replay, "replay=true hashes gradients on the host's word in every step"),
        (cfg.fault is not None, f"fault={cfg.fault} strikes from Python, which a replayed step doesn't run"),
        (looped, f"loads of experts are read on the host unless precision=bf16, here {precision}, and model.dim={m.dim} "
                 f"and model.expert_ffn={m.expert_ffn} are multiples of {GROUPED}"),
        (cfg.steps < least, f"steps={cfg.steps} ends before a step is replayed; set steps={least} or more"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError("compile.cuda_graph", True, why)
