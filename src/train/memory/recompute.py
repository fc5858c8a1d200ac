"""memory.recompute: which activations backward computes again instead of keeping.

Checkpointing sits inside the layer and compilation outside (`Transformer.compile_layers`): the compiled backward then
holds the recomputation and leaves out what it doesn't need: eager or compiled, w_down's matmul is not run again.

A layer that exchanges something with other ranks is compiled in pieces and checkpointed around them. Torch's policies for
single operators don't reach into the pieces, so full recompute keeps the choice of experts between two of them (`Choices`). If
experts exchange nothing, the last piece keeps what w_down made, and w_down runs again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from train import config
from train.model.moe import MoE, collect
from train.model.transformer import Block, Transformer

MODES = ("none", "full", "selective", "budget")
#: What `selective` keeps unless memory.targets says otherwise. Of these matmuls the square ones (wq, wo) are run again all
#: the same: every matmul of a layer holds as much for its work, and without them dense_1b keeps 18,432 instead of 32,768
#: elements a token and layer (22,528 with them) for 6 % more matmul work.
KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "mfu_sweep::loop_mm",  # what stands in for it
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn",  # variable-length attention
)
MATMULS = ("aten::mm", "aten::_scaled_mm")  # of bf16 and of fp8 operands
#: Kept whatever memory.targets says: a collective that one rank runs again and another doesn't is a deadlock.
ALWAYS = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "train_cp")
#: Kept by full recompute too: of two experts whose scores are all but equal, a second run could choose the other one
ROUTING = "aten::topk"


def apply(model: Transformer, cfg: config.Memory) -> None:
    """Set every layer up for cfg.recompute. After what makes layers exchange with other ranks, before `compile_layers`.

    Raises ConfigError for an unknown mode, for memory.targets that torch doesn't have, and for keys of another mode.
    """
    if cfg.recompute not in MODES:
        raise config.ConfigError("memory.recompute", cfg.recompute, f"valid: {', '.join(MODES)}")
    # read by the partitioner when a layer is compiled; 1 leaves the choice between keeping and recomputing to it
    torch._functorch.config.activation_memory_budget = 1.0 if cfg.budget is None else cfg.budget
    # no random numbers in a layer, so nothing of the generators' state to keep
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    policy = Keep(cfg.targets) if cfg.recompute == "selective" else keep_routing if model.cfg.experts else None
    by_operator = policy and functools.partial(create_selective_checkpoint_contexts, policy)
    for index, block in model.layers.named_children():  # its index in the whole model, whatever a rank has of it
        assert isinstance(block, Block)
        on = cfg.recompute in ("full", "selective") and int(index) % cfg.every == 0
        block.recompute = None
        if on:
            contexts: Callable[[], Any] | None = by_operator
            if cfg.recompute == "full" and isinstance(block.ffn, MoE) and not block.one_graph:
                contexts = Choices(block.ffn).contexts
            block.recompute = functools.partial(again, context_fn=contexts) if contexts else again


def keep_routing(_: object, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """The policy of full recompute with experts: who was chosen, and how often on all ranks (aux_loss asks), is kept."""
    numbers = op.namespace in ALWAYS and isinstance(args[0], Tensor) and not args[0].is_floating_point()
    return CheckpointPolicy.MUST_SAVE if op._schema.name == ROUTING or numbers else CheckpointPolicy.PREFER_RECOMPUTE


class Choices:
    """The experts that a layer chose when it ran first, for when backward runs it again."""

    def __init__(self, moe: MoE) -> None:
        self._kept: list[Tensor] | None = None  # of the micro-batch that runs; empty: for the first time
        moe.keep = self
        if moe.exchange is not None:
            # a graph with it would keep what it reads, and to get there again w_down and the way home would run once more
            moe.collect = torch.compiler.disable(collect)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the first and the second run of one micro-batch: torch.utils.checkpoint's context_fn. Each is for one run."""
        kept: list[Tensor] = []
        return self._run(kept), self._run(kept)

    @contextmanager
    def _run(self, kept: list[Tensor]) -> Iterator[None]:
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    @torch.compiler.disable
    def __call__(self, chosen: Tensor) -> Tensor:
        """Out of compiled graphs, which end here and go on after it."""
        if self._kept is None:
            return chosen
        if not self._kept:
            self._kept.append(chosen)
        return self._kept[0]


class Keep:
    """The policy of selective recompute: an operator's result is kept if it is a target, else computed again."""

    def __init__(self, targets: Sequence[str] | None) -> None:
        """`targets`: operators ("aten::mm") or namespaces ("torch_attn"); None: `KEPT`. Raises ConfigError for unknown ones."""
        if targets is not None:
            check(targets)
        self.square_again = targets is None
        self.names = frozenset(KEPT if targets is None else targets) | {*ALWAYS, ROUTING}

    def __call__(self, _: object, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        name = op._schema.name
        # random numbers: a second run would draw others. (Attention has the tag too, for a dropout that is never used)
        if torch.Tag.nondeterministic_seeded in op.tags and name not in KEPT:
            return CheckpointPolicy.MUST_SAVE
        if name not in self.names and op.namespace not in self.names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if self.square_again and name in MATMULS and args[1].shape[0] == args[1].shape[1]:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def check(targets: Sequence[str]) -> None:
    """Raises ConfigError for a target that is neither an operator nor a namespace of the installed torch.

    The namespace aten is refused too: it keeps everything, and torch changes some of its results in place.
    """
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    spaces = {name.partition("::")[0] for name in names}
    if "aten" in targets:
        raise config.ConfigError("memory.targets", "aten", "keeps everything; that is memory.recompute=none")
    for target in targets:
        if target not in names and target not in spaces:
            raise config.ConfigError(
                "memory.targets", target, "must be an operator such as aten::mm or a namespace such as torch_attn"
            )
