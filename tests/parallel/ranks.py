"""Real ranks that stay up for a whole test session and run one case after the other."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from train.launch.process import die_with

CASE_SECONDS = 150.0  # a case that takes longer hangs (compiled ones on eight ranks and two busy cores need a minute)
MANY_THREADS = 60  # of a rank: three a gloo group; fresh ranks cost 0.1 s


class Ranks:
    """`world` processes with an initialised group: gloo for "cpu", NCCL and a GPU each for "cuda". A context manager."""

    def __init__(self, world: int, folder: Path, device: str = "cpu") -> None:
        self.world, self.folder, self.device = world, folder, device
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.starts = 0

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once, for all ranks
        context.set_forkserver_preload(["tests.parallel.cases"])
        store = str(self.folder / f"store{self.starts}")
        self.starts += 1
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, self.world, store, self.device, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """case(rank, world, ...) on every rank at once; what they return, by rank. Raises what a rank raised.

        After a failure the next case gets fresh processes. So does this one, once and with a warning, when a rank died of a
        signal: gloo's threads of groups that an earlier case left have been seen to do that ("free(): invalid pointer").
        """
        what = f"{case.__name__}{args} {kwargs}"
        for attempt in (1, 2):
            if not self.processes:
                self._start()
            try:
                self._signal(signal.SIGCONT)
                for pipe in self.pipes:
                    pipe.send((case, args, kwargs))
                found = self._answers(what)
                self._rest()
                return found
            except (EOFError, OSError, psutil.NoSuchProcess):
                time.sleep(0.5)  # until the dead are known as such
                ends = [process.exitcode for process in self.processes if process.exitcode]
                self.close()
            if attempt == 2 or not any(code < 0 for code in ends):
                break
            warnings.warn(f"ranks of {self.world} died with exit codes {ends} and start again for {what}", stacklevel=2)
        raise AssertionError(f"ranks of {self.world} ended with exit codes {ends} in {what}")

    def _rest(self) -> None:
        """Until the next case: stopped, for gloo's threads wake 128 times a second each and would slow all other tests.

        And gone when cases have left many: DTensor's caches and others hold groups of finished cases, with their threads.
        """
        if self.device != "cpu":  # NCCL's watchdogs go by the clock
            return
        if any(psutil.Process(rank.pid).num_threads() > MANY_THREADS for rank in self.processes):
            self.close()
        else:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.processes:
            os.kill(rank.pid, number)

    def _answers(self, what: str) -> list[Any]:
        results, failures = [], []
        deadline = time.monotonic() + CASE_SECONDS
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} of {self.world} hangs in {what}")
                continue
            ok, result = pickle.loads(pipe.recv_bytes())
            if not ok:
                failures.append(f"rank {rank} of {self.world}, {what}:\n{result}")
                deadline = min(deadline, time.monotonic() + 2)  # the others wait for this one
            results.append(result)
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rank(rank: int, world: int, store: str, device: str, pipe: Connection) -> None:
    die_with(os.getppid())  # a stopped rank doesn't see its pipe's end
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    group = dist.FileStore(store, world)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=timedelta(seconds=CASE_SECONDS))
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
