"""deterministic=true: torch's deterministic kernels (and train.launch.environment sets cuBLAS's workspace).

Has a price, so it is on with replay=true or when asked for only.
"""

import torch


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
