"""Real gloo ranks that stay up for a whole test session and run one case after the other."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASE_SECONDS = 60.0  # a case that takes longer hangs


class Ranks:
    """`world` processes with an initialised gloo group. Use as a context manager."""

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once, for all ranks
        context.set_forkserver_preload(["tests.parallel.cases"])
        self.world = world
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, world, str(folder / f"store{world}"), theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """case(rank, world, ...) on every rank at once; what they return, by rank. Raises what a rank raised."""
        for pipe in self.pipes:
            pipe.send((case, args, kwargs))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(CASE_SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} of {self.world} hangs in {case.__name__}{args} {kwargs}")
            ok, result = pickle.loads(pipe.recv_bytes())
            results.append(result)
            assert ok, f"rank {rank} of {self.world}, {case.__name__}{args} {kwargs}:\n{result}"
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rank(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=50))
    while True:
        try:
            case, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            reply = True, case(rank, world, *args, **kwargs)
        except BaseException:
            reply = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(reply))  # plain pickle: tensors by value, not by shared memory
