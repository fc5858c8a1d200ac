"""One rank: read the frozen point, build, loop, measure. Run as `python -m train.worker FOLDER SCRATCH` or by a fork."""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

<<<<<<< HEAD
from train import checkpoint, data, determinism, faults, seeds
from train.config import ConfigError, Train, load
from train.kernels import apply as kernels
from train.kernels import backend
=======
from train import checkpoint, seeds, summary
>>>>>>> main
from train.launch import failure, process, rendezvous, stacks
from train.measure import fabric, manifest
from train.measure.metrics import Meter
from train.measure.trace import Trace
from train.parallel.dims import DATA
from train.prepare import Prepared
from train.replay import passes
from train.sweep.freeze import write_json


class Rank(Prepared):
    """The loop of one rank."""

<<<<<<< HEAD
    def __init__(self, folder: Path, scratch: Path) -> None:
        self.born = float(os.environ.get("MFU_SWEEP_SPAWNED", time.monotonic()))  # the supervisor's, same clock
        self.folder, self.scratch = folder, scratch
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.heart = Heartbeat(scratch, self.rank)
        self.cfg: Train = load(folder / "config.yaml")
        self.faults = faults.Injector(self.cfg.fault, self.rank)
        self.seconds: dict[str, float] = {}
        self.replay: passes.Replay | None = None
        self.rounds: Round | None = None
        self.pipeline: pipeline.Pipeline | None = None
        self.pipelined: dict[str, Any] | None = None  # what came of it
        self.fabric: dict[str, Any] | None = None
        self.checkpoints: checkpoint.Checkpoints | None = None

    # ---- build -------------------------------------------------------------------------------------------------------

    def set_device(self) -> None:
        """The rank's device, and threads: in a fork OMP_NUM_THREADS comes too late."""
        cores = int(os.environ.get("MFU_SWEEP_CORES") or len(os.sched_getaffinity(0)))  # a scheduler may give fewer
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
        if self.cfg.device == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
        else:
            self.device = torch.device("cpu")
        if self.cfg.deterministic:
            determinism.enable(self.cfg.compile.name != "none")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else manifest.cpu_name()
        if self.cfg.hardware.device not in (None, name):
            raise ConfigError("hardware", self.cfg.hardware.name, f"needs {self.cfg.hardware.device}, here is {name}")
        self.device_name = name

    def build(self) -> None:
        """Model, reduction, data: in that order, each from the frozen configuration."""
        cfg, m = self.cfg, self.cfg.model
        self.dtype = DTYPES[cfg.precision.name]
        self.dims = Dims.of(cfg, self.world, self.rank, self.device)
        self._select_attention(context.probe(cfg, self.dims.degrees, self.device, self.dtype))
        self.heart.beat("build")
        if cfg.parallelism.async_tp:
            async_tp.enable(self.dims)
        with torch.device("meta"):
            model = Transformer(tensor.local(m, self.dims.size("tp")), self.attention)
            tensor.apply(model, self.dims)
            expert.apply(model, cfg, self.dims)
            pipeline.prune(model, cfg, self.dims)
        self.model = model
        context.apply(model, self.dims, cfg.parallelism.cp_method)
        model.to(param_dtype(cfg, self.dtype))
        model.to_empty(device=self.device)
        model.init_weights(cfg.seed)
        levers.apply(model, cfg.memory, self.device)
        kernels.apply(model, cfg)
        if cfg.compile.name == "layer":
            model.compile_layers()
        if cfg.replay:  # its hooks have to see gradients before the reduction takes them
            self.replay = passes.Replay(model, self.device)
        self.balance = balance.Balance(model, m, self.dims) if m.experts else None
        self._reduction(model)
        kept = self.folder / f"memory-rank{self.rank}.pickle"
        self.breakdown = Breakdown(cfg, model, self.dp, self.device, kept)
        assert cfg.global_batch is not None and cfg.grad_accum is not None
        self.source = data.build(cfg.data, m.vocab, cfg.seq_len, cfg.global_batch, cfg.seed, self.device)
        if getattr(self.source, "repeated", False) and self.rank == 0:
            print("data: the text is shorter than one row and repeats to fill it", flush=True)
        self.heart.beat("build")

    def _select_attention(self, probed: Mapping[str, str | None]) -> None:
        """With replay, a path that is known to be reproducible; without a record for one, the result is unqualified."""
        cfg, m, order = self.cfg, self.cfg.model, attention.order(self.device)
        self.qualified: bool | None = None
        if not cfg.replay:
            self.attention = attention.select(cfg.attention.name, probed, order)
        else:
            files = qualified.load(qualified.shipped(), qualified.cache())
            heads = context.local_heads(m, self.dims.degrees, cfg.parallelism.cp_method)
            known = qualified.paths(
                files, qualified.Stack.here(self.device), cfg.precision.name, heads[0] // heads[1], m.head_dim,
                bool(cfg.deterministic),
            )  # fmt: skip
            self.attention, self.qualified = attention.select_replayable(cfg.attention.name, probed, order, known)
        if self.rank == 0:
            note = " (unqualified: no record shows it to be reproducible here)" if self.qualified is False else ""
            print(f"attention backend: {self.attention}{note}", flush=True)

    def _reduction(self, model: Transformer) -> None:
        """Over all ranks, or with rounds over those of an island."""
        cfg = self.cfg
        if cfg.round.name == "none":
            self.dp = build(model, cfg, self.dims)
        else:
            islands = Islands.of(cfg, self.rank)
            inner = islands.inner_config(cfg)
            place = Dims.of(inner, islands.size, self.rank % islands.size, self.device, islands.inner)
            self.dp = build(model, inner, place)
            self.rounds = Round(cfg.round, self.dp, islands, self.device)
        if self.dims.size("pp") > 1:
            self.pipeline = pipeline.Pipeline(model, cfg, self.dims, self.dtype)
        if self.replay is not None:
            self.replay.attach(self.dp)

    def make_meter(self) -> Meter:
        """FLOPs, peak and the host-side group that step times travel over."""
        cfg = self.cfg
        assert cfg.global_batch is not None
        over_ranks = self.dims.size("cp") > 1
        kernel = "ring" if over_ranks and cfg.parallelism.cp_method == "ring" else self.attention
        in_pieces = (over_ranks or self.dims.size("ep") > 1) and cfg.compile.name != "none"
        self.flops = flops.flops_per_token(cfg.model, cfg.seq_len, cfg.memory.recompute, cfg.memory, kernel, in_pieces)
        self.peak = self._peak()
        self.host_group = dist.new_group(backend="gloo") if self.world > 1 and self.device.type == "cuda" else None
        return Meter(
            device=self.device, rank=self.rank, world=self.world, tokens_per_step=cfg.global_batch * cfg.seq_len,
            flops_per_token=self.flops, peak_flops=self.peak["flops"], group=self.host_group,
            loss_weight=1.0 if self.pipeline is None or self.pipeline.last else 0.0,
            path=self.folder / "metrics.jsonl" if self.rank == 0 else None,
            more=balance.METRICS if self.balance is not None else (),
            extra=telemetry.Reader(self.scratch) if self.device.type == "cuda" else None,
        )  # fmt: skip

    def _peak(self) -> dict[str, Any]:
        hw = self.cfg.hardware
        if hw.peak_tflops is not None:
            return {
                "flops": hw.peak_tflops * 1e12,
                "source": "hardware.peak_tflops",
                "kind": "given",
                "device": self.device_name,
            }
        known = peaks.lookup(self.device_name, self.cfg.precision.name)
        if known is None:
            name = f"peak-{socket.gethostname()}-{self.device.type}-{self.cfg.precision.name}-{self.world}.json"
            cache = self.folder.parent / ".sweep" / name
            known = peaks.of_ranks(cache, self.device, self.dtype, self.rank, self.world)
        return {"flops": known.flops, "source": known.source, "kind": known.kind, "device": self.device_name}

    # ---- train -------------------------------------------------------------------------------------------------------
=======
    fabric: dict[str, Any] | None = None
    checkpoints: checkpoint.Checkpoints | None = None
>>>>>>> main

    def rows(self, step: int, index: int) -> torch.Tensor:
        """Micro-batch `index` of this rank: [micro_batch, seq_len + 1] of the step's global batch, whatever the layout."""
        assert self.cfg.grad_accum is not None
        start = (self.dims.index(*DATA) * self.cfg.grad_accum + index) * self.cfg.micro_batch
        return self.source.batch(step, start, self.cfg.micro_batch).to(self.device, non_blocking=True)

    def lr(self, step: int) -> float:
        """Linear warm-up over warmup_steps, constant after."""
        o = self.cfg.optim
        return o.lr * min(1.0, (step + 1) / o.warmup_steps) if o.warmup_steps else o.lr

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One optimizer step: (mean loss of this rank, gradient norm, seconds spent on data)."""
        accum = self.cfg.grad_accum
        assert accum is not None
        total: torch.Tensor | None = None
        data_s = 0.0
        self.dp.announce(self.lr(step))
        if self.pipeline is not None:
            t = time.perf_counter()
            rows = torch.cat([self.rows(step, index) for index in range(accum)])
            data_s = time.perf_counter() - t
            loss = self.pipeline.step(*(self.dims.rows_of_sequence(part) for part in (rows[:, :-1], rows[:, 1:])))
            return loss, self.update(step), data_s
        for index in range(accum):
            t = time.perf_counter()
            rows = self.rows(step, index)
            data_s += time.perf_counter() - t
            with self.dp.micro_step(index, accum):
                tokens, targets = (self.dims.rows_of_sequence(part) for part in (rows[:, :-1], rows[:, 1:]))
                loss = self.dp.module(tokens, targets)
                (loss / accum).backward()
            part = loss.detach() / accum
            total = part if total is None else total + part
        assert total is not None
        return total, self.update(step), data_s

    def update(self, step: int) -> torch.Tensor:
        """What follows the last backward of a step; the gradient norm."""
        self.breakdown.backward_done()
        norm = self.dp.step(self.lr(step))
        self.load = self.balance.step() if self.balance is not None else None
        return norm

    def broken(self) -> Any:
        """The module that a fault breaks."""
        return self.dp.module if self.pipeline is None else self.pipeline.chunks[-1]

    def after_step(self, step: int, meter: Meter | None = None) -> None:
        """What follows a step and is not timed as part of it: end of a round, hashes, a checkpoint."""
        named = (("round", self.rounds), ("replay", self.replay), ("checkpoint", self.checkpoints))
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
        for step in range(first, self.cfg.steps):
            self.heart.beat("train", step)
            before = meter.start(step)
            self.trace.before(step)
            if self.pipeline is not None:
                self.pipeline.timeline.align = self.dims.group("pp") if step in self.trace.steps else None
            with self.faults.at(step, self.broken()), self.breakdown.at(step):
                loss, norm, data_s = self.train_step(step)
            meter.results(loss, norm, data_s, self.load)
            if self.checkpoints.due(step):
                meter.settle(before)
                before = None
            self.after_step(step, meter)
            meter.finish(before, last=False)
            if step == first:
                self.mark("compile")
        meter.finish(meter.start(self.cfg.steps), last=True)
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

<<<<<<< HEAD
    def engine(self) -> dict[str, Any]:
        """What ran, for a reader of this one file; config.yaml has all of it."""
        cfg = self.cfg
        return {
            "reduction": cfg.reduction.name,
            "bucket_mib": cfg.reduction.bucket_mib,
            "accumulate": cfg.reduction.accumulate,
            "recompute": cfg.memory.recompute,
            "compile": cfg.compile.name,
            "kernels": backend.report(cfg.compile, self.device),
            "attention": self.attention,
            "precision": cfg.precision.name,
            "rope_cache": cfg.model.rope_cache,
            "deterministic": bool(cfg.deterministic),
            "replay": cfg.replay,
            "force_balance": cfg.model.force_balance,
            "micro_batch": cfg.micro_batch,
            "environment": {
                k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "PYTORCH_", "CUBLAS_"))
            },
        }

    def traffic(self) -> dict[str, Any]:
        """What the reduction and the layers' own collectives sent."""
        found = self.dp.traffic()
        layers = tensor.traffic(self.model, self.cfg, self.dims, self.dtype.itemsize)
        stages = self.pipeline.traffic() if self.pipeline is not None else {}
        return found | {"bytes": found["bytes"] | layers | stages}

    def summary(self) -> dict[str, Any]:
        """What status.json keeps of rank 0."""
        cfg = self.cfg
        assert cfg.global_batch is not None
        return {
            "flops_per_token": self.flops,
            "peak": self.peak,
            "memory_kind": memory.kind(self.device),
            "capacity_gib": memory.capacity(self.device),
            "precision": cfg.precision.name,
            "attention_backend": self.attention,
            "attention_qualified": self.qualified,
            "params": flops.param_count(cfg.model),
            "params_active": flops.param_count(cfg.model, active=True),
            "experts": self.experts,
            "tokens_per_step": cfg.global_batch * cfg.seq_len,
            "seconds": self.seconds,
            "profiled_steps": self.trace.steps,
            "traffic": self.traffic(),
            "engine": self.engine(),
            "fabric": self.fabric,
            "round": self.rounds.report() if self.rounds else None,
            "checkpoint": self.checkpoints.report() if self.checkpoints else None,
            "pipeline": self.pipelined,
        }

    def report_pipeline(self, result: dict[str, Any]) -> None:
        """Its measured and theoretical bubble; with profile=true the schedule as executed stays in the folder. Collective."""
        line = self.pipeline
        if line is None or not (found := timeline.report(line.timeline, line.plan, self.dims, self.host_group)):
            return
        executed = found.pop("executed")
        if self.cfg.profile and self.rank == 0:
            write(self.folder / "schedule.json", {"schema": 1} | found | executed)
        result["rank_stages"], result["rank_idle"] = (found.pop(key)[self.rank] for key in ("rank_stages", "rank_idle"))
        self.pipelined = found

=======
>>>>>>> main
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
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=False)
    process.volunteer_for_oom()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file in the run folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    rank = None
    try:
        rank = Rank(Path(folder), Path(scratch))
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
