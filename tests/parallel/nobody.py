"""torch's "fake" process group: this process plays a rank of any number, and collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """This process is `rank` of `world` inside."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
