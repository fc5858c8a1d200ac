"""One rank: read the frozen point, build, loop, measure. Run as `python -m train.worker FOLDER SCRATCH` or by a fork."""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from train import checkpoint, seeds, summary
from train.garbage import Garbage
from train.launch import failure, process, rendezvous, stacks
from train.measure import fabric, manifest
from train.measure.metrics import Meter
from train.measure.trace import Trace
from train.parallel import graph
from train.parallel.dims import DATA
from train.prepare import Prepared
from train.replay import passes
from train.sweep.freeze import write_json


class Rank(Prepared):
    """The loop of one rank."""

    fabric: dict[str, Any] | None = None
    checkpoints: checkpoint.Checkpoints | None = None
    graphed: graph.GraphedStep | None = None
    garbage: Garbage | None = None
    data_s = 0.0  # seconds that a step's rows took
    stack: TextIO | None = None  # see stacks.answer

    def rows(self, step: int, index: int) -> torch.Tensor:
        """Micro-batch `index` of this rank: [micro_batch, seq_len + 1] of the step's global batch, whatever the layout."""
        assert self.cfg.grad_accum is not None
        start = (self.dims.index(*DATA) * self.cfg.grad_accum + index) * self.cfg.micro_batch
        rows = self.source.batch(step, start, self.cfg.micro_batch)
        if self.device.type == "cuda" and not rows.is_cuda:
            rows = rows.pin_memory()  # out of pageable memory a copy may wait for all that was launched before
        return rows.to(self.device, non_blocking=True)

    def micro_batches(self, step: int) -> Iterator[torch.Tensor]:
        """All of a step's, each made when it is asked for; the seconds that this takes add up in `data_s`."""
        assert self.cfg.grad_accum is not None
        self.data_s = 0.0
        for index in range(self.cfg.grad_accum):
            t = time.perf_counter()
            rows = self.rows(step, index)
            self.data_s += time.perf_counter() - t
            yield rows

    def lr(self, step: int) -> float:
        """Linear warm-up over warmup_steps, constant after; of fp32's precision, in which a captured step reads it."""
        o = self.cfg.optim
        return float(np.float32(o.lr * min(1.0, (step + 1) / o.warmup_steps) if o.warmup_steps else o.lr))

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One optimizer step: (mean loss of this rank, gradient norm, seconds spent on data). The tensors are valid until the
        next step."""
        if self.stack is not None:
            stacks.answer(self.stack)
        lr = self.lr(step)
        self.dp.announce(lr)
        run = self.compute if self.graphed is None else self.graphed
        loss, norm, *load = run(self.micro_batches(step), lr)
        self.load = load[0] if load else None
        return loss, norm, self.data_s

    def compute(self, micro_batches: Iterable[torch.Tensor], lr: float | torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Forward, backward and update: (mean loss of this rank, gradient norm), and with experts their imbalance. On a GPU
        the host only launches; where a step is captured this runs once for all of them."""
        accum = self.cfg.grad_accum
        total: torch.Tensor | None = None
        if self.pipeline is not None:
            rows = torch.cat(list(micro_batches))
            total = self.pipeline.step(*(self.dims.rows_of_sequence(part) for part in (rows[:, :-1], rows[:, 1:])))
        else:
            assert accum is not None
            for index, rows in enumerate(micro_batches):
                with self.dp.micro_step(index, accum):
                    tokens, targets = (self.dims.rows_of_sequence(part) for part in (rows[:, :-1], rows[:, 1:]))
                    loss = self.dp.module(tokens, targets)
                    (loss / accum).backward()
                part = loss.detach() / accum
                total = part if total is None else total + part
        assert total is not None
        self.breakdown.backward_done()
        norm = self.dp.step(lr)
        return (total, norm) if self.balance is None else (total, norm, self.balance.step())

    def broken(self) -> Any:
        """The module that a fault breaks."""
        return self.dp.module if self.pipeline is None else self.pipeline.chunks[-1]

    def after_step(self, step: int, meter: Meter | None = None) -> None:
        """What follows a step and is not timed as part of it: end of a round, hashes, a checkpoint."""
        named = (
            ("round", self.rounds),
            ("replay", self.replay),
            ("checkpoint", self.checkpoints),
            ("garbage", self.garbage),
        )
        due = [(phase, it) for phase, it in named if it is not None and it.due(step)]
        if due and meter is not None:
            meter.pause()
        for phase, it in due:
            self.heart.beat(phase)
            it.after(step)

    def seed_generators(self) -> None:
        """The same random numbers in every pass and after every build, whatever was measured before."""
        torch.manual_seed(seeds.derive(self.cfg.seed, "rank", self.rank))

    def train(self, meter: Meter) -> None:
        """All steps. Step n is read after step n+1 has been launched."""
        self.trace = Trace(self.cfg.profile, self.cfg.steps, self.folder, self.rank, self.device)
        self.checkpoints = checkpoint.Checkpoints(
            self.cfg, self.folder, self.dp, self.rounds, self.rank, self.world, self.host_group, self.balance
        )
        self.seed_generators()
        first = self.checkpoints.restore()
        if self.cfg.compile.cuda_graph:
            assert self.cfg.grad_accum is not None
            shape = (self.cfg.micro_batch, self.cfg.seq_len + 1)
            owners = self.dp.owners()
            self.graphed = graph.GraphedStep(self.compute, owners, self.cfg.grad_accum, shape, self.device)
        self.garbage = Garbage(first)
        for step in range(first, self.cfg.steps):
            self.heart.beat("train", step)
            before = meter.start(step)
            self.trace.before(step)
            if self.pipeline is not None:
                self.pipeline.timeline.align = self.dims.group("pp") if step in self.trace.steps else None
            with self.faults.at(step, self.broken()), self.breakdown.at(step):
                loss, norm, data_s = self.train_step(step)
            meter.floor = self.graphed.peak if self.graphed is not None else 0.0
            meter.results(loss, norm, data_s, self.load)
            if self.checkpoints.due(step):
                meter.settle(before)
                before = None
            self.after_step(step, meter)
            self.garbage.young()
            meter.finish(before, last=False)
            if step == first:
                self.mark("compile")
        meter.finish(meter.start(self.cfg.steps), last=True)
        self.garbage.stop()
        self.garbage = None
        self.mark("train")

    def again(self, name: str) -> None:
        """A pass for replay: the same steps from the start, hashed and not measured."""
        assert self.replay is not None
        if name == "second":
            self.replay.end("first", self.scratch, self.rank, self.world, self.host_group)
            self.replay.rewind()
            if self.rounds is not None:
                self.rounds.restart()
            if self.balance is not None:
                self.balance.restart()
        self.seed_generators()
        for step in range(self.cfg.steps):
            self.heart.beat("replay", step)
            with self.faults.at(step, self.broken()):
                self.train_step(step)
            self.after_step(step)
        self.replay.end(name, self.scratch, self.rank, self.world, self.host_group)

    def mark(self, phase: str) -> None:
        """Seconds since the last mark belong to `phase`."""
        if self.device.type == "cuda" and phase in ("compile", "train"):
            torch.cuda.synchronize()
        self.seconds[phase] = time.monotonic() - self.born - sum(self.seconds.values())

    def tell(self, meter: Meter) -> None:
        """The result of the measured pass, then the second one where it is asked for."""
        result = summary.result(self, meter)
        if self.replay is not None:
            self.again("second")
            self.mark("replay")
        write_json(self.scratch / f"result-{self.rank}.json", result, sync=False)

    def probe_fabric(self) -> None:
        """Links and collectives of these ranks, measured once a host and sweep; on a CPU only when asked for."""
        wanted = self.cfg.fabric
        if wanted or (wanted is None and self.device.type == "cuda"):
            cache = self.folder.parent / ".sweep" / "fabric.json"
            self.fabric = fabric.cached(cache, self.device, self.rank, self.world)
            self.mark("fabric")

    def run(self) -> None:
        """The story of a rank."""
        self.set_device()
        fresh = passes.current() == "fresh"
        if self.local_rank == 0 and not fresh:
            write_json(self.scratch / "manifest.json", manifest.collect(self.device), sync=False)
        rendezvous.gloo_interface()
        if self.world > 1:
            # longer than the heartbeat's limit: the supervisor ends a hang and names its culprit, not a victim's timeout
            limit = self.cfg.launch.first_step_timeout + 60
            file = "rendezvous-fresh" if fresh else "rendezvous"
            rendezvous.join(self.folder, self.rank, self.world, self.device, limit, file)
        self.mark("start")
        if not fresh:
            self.probe_fabric()
        if self.cfg.compile.cuda_graph:
            graph.use_stream(self.device)
        self.build()
        meter = self.make_meter()
        self.mark("build")
        if fresh:
            self.again("fresh")
            if self.rank == 0:
                passes.conclude(self.folder, self.scratch, time.monotonic() - self.born)
        else:
            self.train(meter)
            self.tell(meter)
        again = self.replay is not None and not fresh
        self.heart.beat("replay" if again else "end")
        self.dp.close()
        if not fresh:
            self.trace.write()
        if self.world > 1:
            dist.barrier()  # a rank that leaves early looks like a failure to its peers
            dist.destroy_process_group()
        if again:
            passes.become_fresh(self.folder, self.scratch)


def run(folder: str, scratch: str) -> int:
    """Train the point as this rank; the exit code. Whatever goes wrong is recorded for the supervisor, with its time."""
    faulthandler.enable()
    stack = open(stacks.file(Path(scratch), int(os.environ["RANK"])), "w")  # filled when the supervisor asks for it
    stacks.answer(stack)
    process.volunteer_for_oom()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file in the run folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    rank = None
    try:
        rank = Rank(Path(folder), Path(scratch))
        rank.stack = stack
        rank.run()
        return 0
    except BaseException as e:
        record = failure.describe(e, rank.heart.step if rank else -1, getattr(rank, "device", None))
        write_json(Path(scratch) / f"error-{os.environ['RANK']}.json", record, sync=False)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    process.die_with(int(os.environ.pop("MFU_SWEEP_PARENT")))
    exit_code = run(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(exit_code)  # no destructor may hang on a peer that is gone
