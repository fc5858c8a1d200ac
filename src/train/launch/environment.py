"""The environment of the ranks: what the user exported, the point's own settings, and nothing left over from elsewhere."""

import os
import re
import time

from train.config import Train

#: the environment as this process got it, before Hydra or we changed anything
USER = dict(os.environ)

#: leftovers of another launcher that would make a rank join somebody else's job
LAUNCHER = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*)"
)

#: variables that torch, NCCL and CUDA read when first used, so that a forked rank still honours them
LATE = re.compile(r"(NCCL_|TORCH_NCCL_|GLOO_|CUDA_|PYTORCH_(CUDA_)?ALLOC_CONF)")


#: what ranks write into the manifest about the code: filled by the sweep
PROVENANCE: dict[str, str] = {}


def leftovers() -> list[str]:
    """Names of inherited launcher variables that are ignored."""
    return sorted(k for k in USER if LAUNCHER.fullmatch(k))


def settings(cfg: Train) -> dict[str, str]:
    """Variables that the configuration sets. `env.*` wins over everything; nccl.env yields to what the user exported."""
    out = {k: v for k, v in cfg.nccl.env.items() if k not in USER}
    if cfg.device == "cuda" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(USER):
        # seen in mfu-multigpu.md: without it a run fragments at 29.9 of 31.4 GiB; only the allocator's layout changes
        out["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if cfg.device == "cuda" and cfg.deterministic and "CUBLAS_WORKSPACE_CONFIG" not in USER:
        out["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what torch.use_deterministic_algorithms asks for
    return out | cfg.env


def needs_cold_start(cfg: Train) -> list[str]:
    """Names among the point's settings that Python, torch or OpenMP may read at import, which a fork can't honour."""
    return sorted(k for k in settings(cfg) if not LATE.match(k))


def base() -> dict[str, str]:
    """The user's environment without another launcher's variables."""
    return {k: v for k, v in USER.items() if not LAUNCHER.fullmatch(k)} | PROVENANCE


def rank_env(cfg: Train, rank: int, local_rank: int, world: int, local_world: int) -> dict[str, str]:
    """The variables that are set for one rank, on top of `base`."""
    ids = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world}
    return {k: str(v) for k, v in ids.items()} | {"MFU_SWEEP_SPAWNED": str(time.monotonic())} | settings(cfg)
