"""torch.distributed's tensor collectives by the names that the installed torch prefers (2.13 renamed two of them)."""

import torch.distributed as dist

all_to_all = dist.all_to_all_single
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
