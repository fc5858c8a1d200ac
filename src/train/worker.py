"""One rank: read the frozen point, build, loop, measure. Run as `python -m train.worker FOLDER SCRATCH` or by a fork."""

import dataclasses
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import data
from train.config import ConfigError, Train, load
from train.launch import process, rendezvous
from train.launch.heartbeat import Heartbeat
from train.measure import flops, manifest, memory, peaks
from train.measure.breakdown import Breakdown
from train.measure.metrics import Meter, NonFinite
from train.memory import levers
from train.model import attention
from train.model.transformer import Transformer
from train.parallel.build import build, param_dtype

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Rank:
    """Everything that one rank holds while it trains a point."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.born = float(os.environ.get("MFU_SWEEP_SPAWNED", time.monotonic()))  # the supervisor's, same clock
        self.folder, self.scratch = folder, scratch
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.heart = Heartbeat(scratch, self.rank)
        self.cfg: Train = load(folder / "config.yaml")
        self.seconds: dict[str, float] = {}

    # ---- build -------------------------------------------------------------------------------------------------------

    def set_device(self) -> None:
        """The rank's device, and threads: in a fork OMP_NUM_THREADS comes too late."""
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
        if self.cfg.device == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
        else:
            self.device = torch.device("cpu")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else manifest.cpu_name()
        if self.cfg.hardware.device not in (None, name):
            raise ConfigError("hardware", self.cfg.hardware.name, f"needs {self.cfg.hardware.device}, here is {name}")
        self.device_name = name

    def build(self) -> None:
        """Model, reduction, data: in that order, each from the frozen configuration."""
        cfg, m = self.cfg, self.cfg.model
        self.dtype = DTYPES[cfg.precision.name]
        found = attention.probe(self.device, self.dtype, m.heads, m.kv_heads, m.head_dim)
        self.attention = attention.select(cfg.attention.name, found, attention.order(self.device))
        if self.rank == 0:
            print(f"attention backend: {self.attention}", flush=True)
        self.heart.beat("build")
        with torch.device("meta"):
            model = Transformer(m, self.attention)
        model.to(param_dtype(cfg, self.dtype))
        model.to_empty(device=self.device)
        model.init_weights(cfg.seed)
        levers.apply(model, cfg.memory, self.device)
        if cfg.compile.name == "layer":
            model.compile_layers()
        self.dp = build(model, cfg, self.device, self.world, self.rank)
        kept = self.folder / f"memory-rank{self.rank}.pickle"
        self.breakdown = Breakdown(cfg, model, self.dp, self.device, kept)
        assert cfg.global_batch is not None and cfg.grad_accum is not None
        self.source = data.build(cfg.data, m.vocab, cfg.seq_len, cfg.global_batch, cfg.seed, self.device)
        if getattr(self.source, "repeated", False) and self.rank == 0:
            print("data: the text is shorter than one row and repeats to fill it", flush=True)
        self.heart.beat("build")

    def make_meter(self) -> Meter:
        """FLOPs, peak and the host-side group that step times travel over."""
        cfg = self.cfg
        assert cfg.global_batch is not None
        self.flops = flops.flops_per_token(cfg.model, cfg.seq_len, cfg.memory.recompute, cfg.memory, self.attention)
        self.peak = self._peak()
        host_group = dist.new_group(backend="gloo") if self.world > 1 and self.device.type == "cuda" else None
        return Meter(
            device=self.device, rank=self.rank, world=self.world, tokens_per_step=cfg.global_batch * cfg.seq_len,
            flops_per_token=self.flops, peak_flops=self.peak["flops"], group=host_group,
            path=self.folder / "metrics.jsonl" if self.rank == 0 else None,
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
        known = peaks.lookup(self.device_name, self.cfg.precision.name) or self._measured_peak()
        return {"flops": known.flops, "source": known.source, "kind": known.kind, "device": self.device_name}

    def _measured_peak(self) -> peaks.Peak:
        """Of an unknown device, the slowest rank's; once per host and sweep, so that all points share one denominator."""
        name = f"peak-{socket.gethostname()}-{self.device.type}-{self.cfg.precision.name}-{self.world}.json"
        cache = self.folder.parent / ".sweep" / name
        stored: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {"flops": 0.0, "source": ""}
        if self.world > 1:  # every rank decides as rank 0 does
            known = torch.tensor([stored["flops"]], dtype=torch.float64, device=self.device)
            dist.broadcast(known, 0)
            stored["flops"] = known.item()
        if stored["flops"]:
            return peaks.Peak(stored["flops"], "measured", stored["source"])
        found = peaks.measure(self.device, self.dtype)
        if self.world > 1:
            value = torch.tensor([found.flops], dtype=torch.float64, device=self.device)
            dist.all_reduce(value, op=dist.ReduceOp.MIN)
            found = dataclasses.replace(found, flops=value.item())
        if self.rank == 0 and cache.parent.is_dir():
            write(cache, {"flops": found.flops, "source": found.source})
        return found

    # ---- train -------------------------------------------------------------------------------------------------------

    def rows(self, step: int, index: int) -> torch.Tensor:
        """Micro-batch `index` of this rank: [micro_batch, seq_len + 1] of the step's global batch, whatever the layout."""
        assert self.cfg.grad_accum is not None
        start = (self.rank * self.cfg.grad_accum + index) * self.cfg.micro_batch
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
        for index in range(accum):
            t = time.perf_counter()
            rows = self.rows(step, index)
            data_s += time.perf_counter() - t
            with self.dp.micro_step(index, accum):
                loss = self.dp.module(rows[:, :-1], rows[:, 1:])
                (loss / accum).backward()
            part = loss.detach() / accum
            total = part if total is None else total + part
        assert total is not None
        self.breakdown.backward_done()
        return total, self.dp.step(self.lr(step)), data_s

    def train(self, meter: Meter) -> None:
        """All steps. Step n is read after step n+1 has been launched."""
        for step in range(self.cfg.steps):
            before = meter.start(step)
            with self.breakdown.at(step):
                loss, norm, data_s = self.train_step(step)
            meter.results(loss, norm, data_s)
            meter.finish(before, last=False)
            self.heart.beat("train", step, meter.slowest if step > 1 else 0.0)
            if step == 0:
                self.mark("compile")
        meter.finish(meter.start(self.cfg.steps), last=True)
        self.mark("train")

    # ---- tell --------------------------------------------------------------------------------------------------------

    def mark(self, phase: str) -> None:
        """Seconds since the last mark belong to `phase`."""
        if self.device.type == "cuda" and phase in ("compile", "train"):
            torch.cuda.synchronize()
        self.seconds[phase] = time.monotonic() - self.born - sum(self.seconds.values())

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
            "params": flops.param_count(cfg.model),
            "tokens_per_step": cfg.global_batch * cfg.seq_len,
            "seconds": self.seconds,
            "traffic": self.dp.traffic(),
        }

    def run(self) -> None:
        """The story of a rank."""
        self.set_device()
        if self.local_rank == 0:
            write(self.scratch / "manifest.json", manifest.collect(self.device))
        rendezvous.gloo_interface()
        if self.world > 1:
            rendezvous.join(self.folder, self.rank, self.world, self.device, self.cfg.launch.first_step_timeout)
        self.mark("start")
        self.build()
        meter = self.make_meter()
        self.mark("build")
        self.train(meter)
        result: dict[str, Any] = {"rank_peak_mem_gib": meter.round_peak, "rank_step_peak_mem_gib": meter.step_peak}
        result |= {"memory_by_kind": self.breakdown.kinds, "rank_host_peak_gib": memory.host_peak()}
        if self.rank == 0:
            result["summary"] = self.summary()
        write(self.scratch / f"result-{self.rank}.json", result)
        self.heart.beat("end")
        self.dp.close()
        if self.world > 1:
            dist.barrier()  # a rank that leaves early looks like a failure to its peers
            dist.destroy_process_group()


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON into the scratch folder, whole or not at all."""
    temp = path.with_suffix(f".{os.getpid()}")
    temp.write_text(json.dumps(content))
    temp.replace(path)


def kind_of(error: BaseException) -> str:
    """oom | invalid | nonfinite | comm (may be the consequence of a peer's failure) | error."""
    text = str(error)
    if (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in text
        or "can't allocate memory" in text
    ):
        return "oom"
    if isinstance(error, ConfigError):
        return "invalid"
    if isinstance(error, NonFinite):
        return "nonfinite"
    words = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "gloo",
        "NCCL",
        "Socket",
        "recvValue failed",
    )
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in words)):
        return "comm"
    return "error"


def run(folder: str, scratch: str) -> int:
    """Train the point as this rank; the exit code. Whatever goes wrong is recorded for the supervisor, with its time."""
    faulthandler.enable()
    faulthandler.register(
        signal.SIGUSR1, all_threads=True, chain=False
    )  # the supervisor asks a hanging rank for its stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file in the run folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    rank = None
    try:
        rank = Rank(Path(folder), Path(scratch))
        rank.run()
        return 0
    except BaseException as e:
        at = time.monotonic()
        first = str(e).strip().splitlines()[0] if str(e).strip() else ""
        record = {
            "kind": kind_of(e),
            "type": type(e).__name__,
            "message": first[:500],
            "at": at,
            "step": rank.heart.step if rank else -1,
        }
        number = os.environ["RANK"]
        write(Path(scratch) / f"error-{number}.json", record)
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
