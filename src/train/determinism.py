"""deterministic=true: torch's deterministic kernels. Has a price, so it is on with replay=true or when asked for only."""

import torch

#: cuBLAS is reproducible with a workspace of its own alone; what torch.use_deterministic_algorithms asks for
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def enable(compiled: bool) -> None:
    """For the whole process. Operations that have no deterministic kernel raise RuntimeError from here on."""
    torch.use_deterministic_algorithms(True)
    # torch fills empty tensors with NaN under the switch, to show reads of them: a debugging aid that costs a pass over
    # every allocation and would be counted as the price of determinism
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if compiled:
        import torch._inductor.config as inductor

        if hasattr(inductor, "deterministic"):
            inductor.deterministic = True  # no choice of a kernel by its time
