"""The typed configuration of one run: what a point's frozen config.yaml holds.

Hydra composes conf/ into these dataclasses (schema/train in the ConfigStore checks keys and types), the sweeper freezes
the result, and supervisors and ranks read it back with `load`. No torch and no Hydra here, so that everything can import it.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

import yaml

#: libyaml's safe loader where PyYAML was built with it: 1 ms instead of 25 ms for a frozen point
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YAML_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class ConfigError(Exception):
    """A value that can't be used: one line that names the key, the value and what is valid."""

    def __init__(self, key: str, value: object, valid: str) -> None:
        self.key, self.value, self.valid = key, value, valid
        super().__init__(f"{key}={_show(value)}: {valid}")


def _show(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class RopeScaling:
    """Of the rotary frequencies, as in Llama 3.1; see train.model.rope. The defaults are that model's, unscaled."""

    factor: float = 1.0  # what wavelengths beyond the trained context are stretched by; 1 for no scaling
    low_freq_factor: float = 1.0  # turns in the original context: below, stretched whole
    high_freq_factor: float = 4.0  # above, kept
    original_max_position: float = 8192.0  # the context it was trained with


@dataclass
class Model:
    """A Llama-style decoder. MISSING ("???") fields are given by every option of conf/model."""

    name: str = "???"
    dim: int = "???"  # type: ignore[assignment]  # width of the residual stream
    layers: int = "???"  # type: ignore[assignment]
    heads: int = "???"  # type: ignore[assignment]  # query heads
    kv_heads: int = "???"  # type: ignore[assignment]  # key/value heads; divides heads (grouped-query attention)
    head_dim: int = "???"  # type: ignore[assignment]  # need not be dim / heads
    ffn: int = "???"  # type: ignore[assignment]  # hidden width of SwiGLU; 0 in a model with experts
    vocab: int = "???"  # type: ignore[assignment]
    tied: bool = False  # LM head shares the embedding's weight
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys, before the rotation
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_cache: bool = True  # compute the cos/sin tables once per process instead of in every layer and recompute
    experts: int = 0  # networks in place of each layer's feed-forward; 0: a dense model
    experts_per_token: int = 0  # of which a token goes to so many
    expert_ffn: int = 0  # hidden width of one expert
    router_score: str = "softmax"  # softmax | sigmoid: of the router's logits
    norm_topk: bool = True  # the chosen experts' weights add up to 1
    balance: str = "none"  # none | aux_loss | aux_loss_free (a bias on the choice, moved once a step)
    balance_coef: float = 1e-3  # weight of the auxiliary loss, or what a bias moves in a step
    force_balance: bool = False  # experts in turn instead of the router's choice: for benchmarks


@dataclass
class Data:
    """What the model reads."""

    name: str = "???"  # text | fake
    path: Optional[str] = None  # text: a UTF-8 file, a folder or a glob; null: CPython's pydoc_data.topics
    tokenizer: Optional[str] = None  # text: a Hugging Face tokenizer.json; null: bytes
    content: Optional[str] = None  # resolved: sha256 over the files and the tokenizer


Degree = Union[int, str]  # ranks along a dimension of the mesh; -1 or auto: worked out from the others


@dataclass
class Parallelism:
    """Degrees of the mesh; pp x dp_replicate x dp_shard x cp x tp is nproc. One of pp, cp and tp may be -1."""

    name: str = "???"
    pp: Degree = 1  # pipeline stages' ranks: each has some of the layers
    dp_replicate: Degree = -1  # copies of the state; -1: what is left of nproc (ddp; fsdp with dp_shard given), else 1
    dp_shard: Degree = -1  # ranks that share one copy of the state; -1: what is left of nproc (zero2*, fsdp), else 1
    cp: Degree = 1  # ranks that share one sequence
    cp_method: str = "ulysses"  # ulysses: ranks exchange heads for positions | ring: keys and values go round the ranks
    tp: Degree = 1  # ranks that share every layer's matrices
    async_tp: bool = False  # compiled layers overlap tp's gathers and scatters with their matmuls (GPUs)
    ep: Degree = 1  # ranks of dp_shard x cp x tp that share the experts; -1: the largest up to 8 that fits
    dispatch: str = "torch"  # how tokens travel to their experts: torch | deepep
    # gpipe | 1f1b | interleaved_1f1b | looped_bfs | interleaved_zero_bubble | zbv | dualpipev; null: 1f1b, with pp_virtual
    # above 1 interleaved_1f1b
    pp_schedule: Optional[str] = None
    pp_virtual: Optional[int] = None  # pipeline stages a rank; null: what the schedule usually has
    pp_split: Optional[list[int]] = None  # layers of each stage; null: balanced, embedding and head weighed


@dataclass
class Reduction:
    """How gradients become one update."""

    name: str = "???"  # ddp | zero2 | zero2o | zero2rs | fsdp
    bucket_mib: Optional[float] = None  # size of a gradient bucket (ddp, zero2*)
    accumulate: Optional[str] = None  # zero2*, fsdp: reduce `once` a step, or after `every` micro-batch
    # fsdp: free gathered weights after forward; a number: keep them over so many neighbouring ranks
    reshard_after_forward: Optional[Union[bool, int]] = None
    prefetch: Optional[int] = None  # fsdp: layers whose weights are gathered ahead; null: torch's own choice, one
    transport: Optional[str] = None  # zero2, zero2o: by `collective`, the default, or `peer`: copy engines, on one node


@dataclass
class Memory:
    """What is traded for memory."""

    name: str = "???"
    # which activations backward computes again: none | full (a layer keeps its input) | selective (and what `targets`
    # name) | budget (what torch picks for `budget`, under compile)
    recompute: str = "none"
    every: int = 1  # full, selective: in every n-th layer only
    # selective: operators (aten::mm) or namespaces whose results are kept; null: the list in memory/recompute.py
    targets: Optional[list[str]] = None
    budget: Optional[float] = None  # budget: share of the saved activations that is kept, 0..1
    activation_offload: bool = False  # what a layer saves for backward waits in host memory
    max_inflight_activations: int = 5  # saved tensors that may be on their way at once, each way
    optimizer_offload: str = "none"  # none | optimizer (its state) | full (gradients, fp32 masters and state)
    lm_head_chunk: Optional[int] = None  # tokens whose logits exist at once; null: all
    lm_head_kernel: str = "own"  # own | torch (F.linear_cross_entropy, where torch has it)
    snapshot: bool = False  # keep torch's memory snapshot of one step (a pickle a rank)


@dataclass
class Compile:
    """What torch.compile covers."""

    name: str = "???"  # none | layer: an Inductor graph a layer, or one for each piece
    # auto: fused, on GPUs and where it fits | inductor: none | fused: this project's own | some of them: adamw+loss
    kernels: str = "auto"
    cuda_graph: Optional[bool] = None  # one rank's whole step as one CUDA graph; null: no, for now


@dataclass
class Nccl:
    """NCCL's environment."""

    name: str = "???"
    env: dict[str, str] = field(default_factory=dict)  # set unless the user exported the variable


@dataclass
class Attention:
    """Which kernel runs attention."""

    name: str = "???"  # auto | flash | cudnn | efficient | math


@dataclass
class Precision:
    """Dtype of weights and activations."""

    name: str = "???"  # auto | bf16 | fp8 | fp32 | fp64; auto: bf16 on a GPU, fp32 on a CPU
    scaling: Optional[str] = None  # fp8: tensorwise | rowwise, see model/fp8.py

    @property
    def weights(self) -> str:
        """The dtype of the weights that forward reads: fp8 is what the layers' matmuls round them to on the way."""
        return "bf16" if self.name == "fp8" else self.name


@dataclass
class Optim:
    """The optimizer."""

    name: str = "???"
    lr: float = 3e-4
    warmup_steps: int = 0  # linear from lr/warmup_steps; constant after
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: Optional[float] = 1.0  # gradient clipping by total norm; null for none
    state_dtype: Optional[str] = None  # fp32 | bf16: of the moments between steps; null: as the master weights
    grad_dtype: Optional[str] = None  # fp32 | bf16: gradients add up in it; null: the weights' (fsdp: the masters')


@dataclass
class Hardware:
    """The device and its peak."""

    name: str = "???"  # auto: take what is there; else assert that the device is this one
    device: Optional[str] = None  # exact device name that is asserted
    peak_tflops: Optional[float] = None  # dense peak for MFU in place of the table's or the measured one


@dataclass
class Round:
    """Local steps between exchanges of weights, over `parallelism.dp_replicate` islands."""

    name: str = "none"  # none | delta
    inner_steps: int = 1  # steps an island takes by itself; `steps` is a multiple of it
    topk: float = 1.0  # share of a delta's elements that is sent; what is not sent now is sent later
    bits: int = 32  # of a sent element: 32 | 8 | 4
    outer_lr: float = 1.0
    outer_momentum: float = 0.0  # Nesterov


@dataclass
class Checkpoint:
    """Sharded, synchronous checkpoints in the point's folder; a rerun of the point goes on from the newest."""

    every: Optional[int] = None  # steps; null: none
    keep: int = 2  # complete ones that are kept


@dataclass
class Launch:
    """Where and how ranks are started."""

    name: str = "???"  # local | slurm
    warm: bool = True  # fork ranks from a server that has imported torch
    first_step_timeout: float = 600.0  # seconds without a heartbeat until step 2 (imports, compile, autotune)
    hang_seconds: float = (
        10.0  # later: a hang is max(this, 5 x the slowest step so far) seconds after the last heartbeat
    )
    # launch=slurm only; docs/slurm.md
    nodes: Optional[int] = None  # nodes of a point; null: as many as nproc GPUs need, 1 on CPUs
    gpus_per_node: Optional[int] = None  # GPUs that a node has; null: points run on CPUs
    cpus: Optional[int] = None  # CPUs of a point on each node
    memory: Optional[str] = None  # host memory on each node: 64G
    time: Optional[str] = None  # limit of a job: minutes, H:MM:SS or D-HH:MM:SS
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None  # nodes to keep away from
    sbatch: dict[str, str] = field(default_factory=dict)  # any other option: launch.sbatch.reservation=x
    array_parallelism: Optional[int] = None  # tasks that run at once; null: as many as the cluster gives
    points_per_job: int = 1  # points that one task runs one after the other, from one warm server
    wait: bool = True  # stay and show progress; false: submit and leave
    dry_run: bool = False  # write scripts and configurations, submit nothing
    template: Optional[str] = None  # a Jinja2 file in place of the package's default.sbatch.j2
    setup: list[str] = field(default_factory=list)  # shell lines before the ranks start: modules, an environment
    python: Optional[str] = None  # interpreter in the job, a shell word; null: this one's path
    signal_seconds: int = 60  # USR2 comes so long before the time limit
    requeues: int = 3  # times that a job is requeued after preemption or a dead node


@dataclass
class Budget:
    """What a command may spend."""

    hours: Optional[float] = None  # wall time of one command; what does not fit stays pending


@dataclass
class Train:
    """One point. The scalars are the command line's own: `micro_batch=4`."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    reduction: Reduction = field(default_factory=Reduction)
    memory: Memory = field(default_factory=Memory)
    compile: Compile = field(default_factory=Compile)
    nccl: Nccl = field(default_factory=Nccl)
    attention: Attention = field(default_factory=Attention)
    precision: Precision = field(default_factory=Precision)
    optim: Optim = field(default_factory=Optim)
    hardware: Hardware = field(default_factory=Hardware)
    launch: Launch = field(default_factory=Launch)
    round: Round = field(default_factory=Round)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    micro_batch: int = 4  # rows a data-parallel rank handles per forward
    grad_accum: Optional[int] = None  # micro-batches a step; null: 1, or what global_batch asks for
    global_batch: Optional[int] = None  # rows a step over all ranks
    seq_len: int = 256  # tokens a row
    steps: int = 20
    seed: int = 0
    device: str = "auto"  # auto | cuda | cpu
    nproc: Optional[int] = None  # ranks; null: all visible GPUs, 2 on a CPU
    env: dict[str, str] = field(default_factory=dict)  # environment of the ranks
    profile: bool = False  # keep a trace of two late steps per rank
    replay: bool = False  # run the same steps again, here and in a fresh process, and compare them bit for bit
    deterministic: Optional[bool] = None  # torch's deterministic kernels; null: with replay only
    repeat: int = 0  # which of `repeats` (resolved)
    fault: Optional[str] = None  # KIND@rank:step: something that breaks on purpose (train.faults)

    # how the sweep is run: not part of a point's identity
    name: Optional[str] = None  # folder under out; naming a finished or broken sweep resumes it; null: a timestamp
    out: str = "outputs"
    plan: bool = False  # list the points and stop
    repeats: int = 1
    budget: Budget = field(default_factory=Budget)
    timeout: Optional[float] = None  # seconds a point may take
    retries: int = 3  # attempts at a point that crashed or timed out, over all commands
    prune: bool = True  # points larger than one that ran out of memory become infeasible
    max_failures: int = 3  # identical crashes in a row that stop the sweep
    code: Optional[str] = None  # new: continue a sweep whose code has changed since
    fabric: Optional[bool] = None  # measure links and collectives, once a host and sweep; null: on GPUs only
    cancel: bool = False  # launch=slurm: cancel what the sweep `name` still has in the queue, and stop


#: keys that do not change what a rank computes, so they are no part of a point's identity
NOT_IDENTITY = (
    "launch", "name", "out", "plan", "repeats", "budget", "timeout", "retries", "prune", "max_failures", "code",
    "cancel", "fabric",
)  # fmt: skip


def load(path: Path) -> Train:
    """Read a frozen config.yaml. Raises ConfigError on a key or type that the schema doesn't have."""
    with open(path, encoding="utf-8") as f:
        return from_dict(Train, yaml.load(f, YAML_LOADER))


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def from_dict(cls: Any, data: Any, prefix: str = "") -> Any:
    """Build dataclass `cls` from nested plain data. Raises ConfigError on unknown keys."""
    if not isinstance(data, dict):
        raise ConfigError(prefix.rstrip(".") or "config", data, "must be a mapping")
    hints = _hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ConfigError(prefix + unknown[0], data[unknown[0]], f"is not a key; valid: {', '.join(sorted(hints))}")
    values = {}
    for key, value in data.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = from_dict(hint, value, f"{prefix}{key}.")
        elif float in (hint, *get_args(hint)) and isinstance(value, int) and get_origin(hint) is not dict:
            value = float(value)
        values[key] = value
    return cls(**values)


def to_dict(cfg: Train) -> dict[str, Any]:
    """The nested plain data that `load` reads."""
    return dataclasses.asdict(cfg)
