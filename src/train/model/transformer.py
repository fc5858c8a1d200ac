"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Built under torch.device("meta"), then `.materialise(device, seed)`. Matrices are separate (no
fused QKV or gate/up), so that no backward writes through a concatenation and every parallel layout can split them.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import config, seeds
from train.model import rope
from train.model.attention import attend
from train.model.loss import VocabShard, compiled, lm_loss
from train.model.moe import MoE

Stream = Tensor | tuple[Tensor, Tensor]  # the residual stream [B, T, dim], or two tensors whose sum it is
Across = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # q, k, v [B, T, heads, d], path → [B, T, H, d]
Aliased = Tensor | tuple[Tensor, ...]  # a tensor, or for each reader an alias of it, whose gradients then stay apart


class Attention(nn.Module):
    """Causal grouped-query attention: x [B, T, dim] → [B, T, dim]; x may come as aliases, for wq, wk and wv one each."""

    def __init__(self, cfg: config.Model, path: str) -> None:
        super().__init__()
        self.head_dim, self.path = cfg.head_dim, path
        self.across: Across | None = None  # attention over ranks: see train.parallel.context
        self.qkv = qkv  # or train.kernels.stacked's
        self.stack: Tensor | None = None  # wq, wk and wv as one matrix: see there
        self.turn = rope.turn  # or train.kernels.rope's
        self.wq = nn.Linear(cfg.dim, cfg.heads * cfg.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wo = nn.Linear(cfg.heads * cfg.head_dim, cfg.dim, bias=False)
        self.q_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None

    def forward(self, x: Aliased, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self, x, cos, sin)
        if self.across is None:
            out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.path).transpose(1, 2)
        else:
            out = self.across(q, k, v, self.path)
        return self.wo(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202); x may come as aliases, for w_gate and w_up one each."""

    def __init__(self, cfg: config.Model) -> None:
        super().__init__()
        self.w_gate = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.w_up = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.w_down = nn.Linear(cfg.ffn, cfg.dim, bias=False)
        self.hidden = hidden  # or train.kernels.stacked's
        self.stack: Tensor | None = None  # w_gate and w_up as one matrix: see there
        self.gated = gated  # or train.kernels.swiglu's
        self.down: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # both in one: see train.kernels.swiglu

    def forward(self, x: Aliased) -> Tensor:
        if self.down is None:
            return self.w_down(self.hidden(self, x))
        gate, up = project(x, self.w_gate, self.w_up)
        return self.down(gate, up, self.w_down.weight)


def qkv(attention: Attention, x: Aliased, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What attention gets, [B, T, heads, d] each: q and k by their norms, if any, and turned."""
    maps = project(x, attention.wq, attention.wk, attention.wv)
    q, k, v = (each.unflatten(-1, (-1, attention.head_dim)) for each in maps)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return *attention.turn(q, k, cos, sin), v


def hidden(ffn: FeedForward, x: Aliased) -> Tensor:
    """What w_down gets."""
    return ffn.gated(*project(x, ffn.w_gate, ffn.w_up))


def project(x: Aliased, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Linear maps of one input."""
    inputs = (x,) * len(linears) if isinstance(x, Tensor) else x
    return tuple(linear(each) for linear, each in zip(linears, inputs, strict=True))


def normed(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Aliased]:
    """What goes on in the residual stream, and what a branch gets."""
    return x, norm(x)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


def whole(x: Stream) -> Tensor:
    """The residual stream as one tensor."""
    return x if isinstance(x, Tensor) else x[0] + x[1]


class Block(nn.Module):
    """One layer: the residual stream and the rotary tables [T, head_dim/2] → the stream."""

    def __init__(self, cfg: config.Model, path: str) -> None:
        super().__init__()
        self.carry = False  # leave the last sum to the next layer's graph, which has a norm to fuse it with
        self.recompute: Callable[..., Any] | None = None  # see train.memory.recompute
        self.in_pieces: Callable[..., Any] | None = None  # compiled, where it can't be one graph
        self.attention_normed = self.ffn_normed = normed  # or train.kernels.norm's
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attention = Attention(cfg, path)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.ffn = MoE(cfg) if cfg.experts else FeedForward(cfg)

    @property
    def one_graph(self) -> bool:
        """Whether it can be compiled whole: neither attention nor experts exchange anything with other ranks."""
        return self.attention.across is None and getattr(self.ffn, "exchange", None) is None

    def forward(self, x: Stream, cos: Tensor, sin: Tensor) -> Stream:
        layer = self._layer if self.in_pieces is None else self.in_pieces
        out = layer(x, cos, sin) if self.recompute is None else self.recompute(layer, x, cos, sin)
        if isinstance(self.ffn, MoE):
            out, counts = out
            self.ffn.count(counts)  # here: what is inside may run twice
        return out

    def _layer(self, stream: Stream, cos: Tensor, sin: Tensor) -> Any:
        """The layer's output; with experts a tuple of it and of the tokens that chose each expert."""
        x, branch = self.attention_normed(whole(stream), self.attention_norm)
        x = x + self.attention(branch, cos, sin)
        x, branch = self.ffn_normed(x, self.ffn_norm)
        out = self.ffn(branch)
        if self.carry:
            return x, out
        return (x + out[0], out[1]) if isinstance(self.ffn, MoE) else x + out


class Transformer(nn.Module):
    """tokens, targets [B, T] int64 → mean cross-entropy, 0-dim, fp32 (fp64 for fp64 weights)."""

    def __init__(self, cfg: config.Model, attention: str) -> None:
        """`attention`: a path that `attention.select` returned, or "auto" to leave the kernel to torch."""
        super().__init__()
        self.cfg = cfg
        self.embed: nn.Embedding | None = nn.Embedding(cfg.vocab, cfg.dim)  # None, as norm: on another pipeline stage
        self.layers = nn.ModuleList(Block(cfg, attention) for _ in range(cfg.layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = lm_loss
        self.mine: tuple[int, ...] = (0,)  # the equal pieces of a sequence that are here: see train.parallel.context
        self.cut: Cut | None = None  # where this is one rank's part of a model: see train.parallel.tensor
        self.shard: VocabShard | None = None  # of the head's vocabulary
        self.chunks: tuple[nn.Module, ...] = ()  # its stages of a pipeline: see train.parallel.pipeline
        self.saving: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext  # see train.memory.offload

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert self.embed is not None and self.norm is not None  # else it runs by its chunks
        x = self.run(self.layers, self.embed(tokens), tokens.shape[1])
        return self.loss(self.norm(x), self.embed.weight if self.head is None else self.head.weight, targets)

    def run(self, layers: nn.ModuleList, x: Tensor, length: int) -> Tensor:
        """x [B, T, dim] through some of the layers; `length`: positions of a row on this rank, T times the ranks that share
        them between the matrices."""
        firsts = tuple(i * length // len(self.mine) for i in self.mine)
        dtype, device = x.dtype, x.device
        for block in layers:
            cos, sin = rope.tables(self.cfg, length, dtype, device, firsts)
            with self.saving(x):
                x = block(x, cos, sin)  # a Stream
        return whole(x)

    def compile_layers(self) -> None:
        """One Inductor graph for a layer, shared by all of them (with carry, by all but the first), and one for the LM head
        and loss.

        With cp or ep a graph for each piece of a layer between what its attention or its experts exchange with other ranks,
        and recompute outside: torch traces a checkpoint as a whole or not at all.
        """
        for block in self.layers:
            assert isinstance(block, Block)
            if block.one_graph:
                block.compile(fullgraph=True)
            else:
                block.in_pieces = torch.compile(block._layer)
        self.loss = compiled(self.loss)

    @torch.no_grad()
    def materialise(self, device: torch.device, seed: int, part: nn.Module | None = None) -> None:
        """Give what is still on the meta device, in all of the model or one `part` of it, memory and its first value.

        Parameters follow from (seed, name) alone, buffers are zero.
        """
        inside = set((self if part is None else part).modules())
        for path, module in self.named_modules():
            if module not in inside:
                continue
            for key, p in list(module.named_parameters(path, recurse=False)):
                if p.is_meta:
                    value = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    self._fill(key, value, seed)
                    setattr(module, key.rpartition(".")[2], value)
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, key, torch.zeros_like(buffer, device=device))

    def _fill(self, name: str, parameter: Tensor, seed: int) -> None:
        shape = parameter.shape if self.cut is None else self.cut.whole_shape(name, parameter.shape)
        value = initial_value(self.cfg, name, shape, seed, parameter.device)
        parameter.copy_(value if self.cut is None else self.cut.part(name, value))


class Cut(Protocol):
    """How a rank's part of a parameter follows from the whole."""

    @property
    def tp(self) -> int:
        """Ranks that share the parameter, and between matrices a row's positions."""

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Of the parameter of which this rank's part has `shape`."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter."""


def initial_value(cfg: config.Model, name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """fp32 start of the whole parameter `name`, whatever shard of it a rank keeps and in which dtype.

    Norms are ones, matrices normal(0, 0.02), and those that write to the residual stream smaller by sqrt(2 x layers),
    so that its variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    std = 0.02 / math.sqrt(2 * cfg.layers) if name.endswith(("wo.weight", "w_down.weight", "experts.w_down")) else 0.02
    generator = torch.Generator(device).manual_seed(seeds.derive(seed, name))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
