"""Every kernel of train.kernels beside what Inductor or torch does in its place, on dense_1b's shapes, on one GPU.

    python -m benchmarks.gpu_kernels --out docs/results/kernels.json          # about a minute; the table comes last
    python -m benchmarks.gpu_kernels --only loss,swiglu --tune                # other blocks and warps besides

Times are of a whole step: a kernel's median times the layers that run it. `bytes` is what it must move, `predicted` that over
3.9 TB/s, which elementwise kernels reach on an H200.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks.beside import ROOT, words
from train import config
from train.kernels import loss, norm, rope, swiglu
from train.memory.optimizer import Optimizers
from train.model import rope as plain_rope
from train.model.loss import lm_loss
from train.model.transformer import Transformer, gated, normed
from train.parallel import replicated

BANDWIDTH = 3.9e12  # bytes/s
GPU = torch.device("cuda")
Timed = Callable[[], Any]


@dataclass
class Pair:
    """A kernel and what it replaces, on the same inputs."""

    name: str
    nbytes: float  # that ours has to move in a call
    calls: int  # a step
    plain: Timed
    ours: Timed
    compare: Callable[[], float]  # largest difference, relative to the largest value

    def row(self, repeats: int) -> dict[str, Any]:
        difference = self.compare()
        plain, ours = (self.calls * milliseconds(f, repeats) for f in (self.plain, self.ours))
        return {
            "kernel": self.name, "gbytes": self.calls * self.nbytes / 1e9,
            "predicted_ms": 1e3 * self.calls * self.nbytes / BANDWIDTH, "plain_ms": plain, "ours_ms": ours,
            "tb_per_s": self.calls * self.nbytes / ours / 1e9, "difference": difference,
        }  # fmt: skip


def milliseconds(call: Timed, repeats: int) -> float:
    """Median over calls, on the GPU's clock."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def difference(got: Any, want: Any) -> float:
    """Largest, over tensors, of the largest difference relative to the largest value."""
    pairs = zip(got, want, strict=True) if isinstance(got, (tuple, list)) else [(got, want)]
    return max(float(((a - b.to(a.dtype)).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16).requires_grad_(grad)


def adamw(m: config.Model, tokens: int) -> Iterator[Pair]:
    """Replicated's update as it runs, on a model's parameters; norms and weights in one list."""
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Transformer(m, "auto").named_parameters()}
    updates = {}
    for kernels in ("inductor", "fused"):
        torch.manual_seed(0)
        cfg = config.Train(compile=config.Compile("layer", kernels), optim=config.Optim("adamw"))
        named = [(n, nn.Parameter(0.02 * torch.randn(s, device=GPU, dtype=torch.bfloat16))) for n, s in shapes.items()]
        made = Optimizers(cfg, GPU)
        updates[kernels] = [replicated._Update(part, made) for part in replicated._chunks(named, made.fused)]
    grads = {n: 0.01 * torch.randn(s, device=GPU, dtype=torch.bfloat16) for n, s in shapes.items()}
    scale = torch.tensor(0.5, device=GPU)

    def run(kernels: str) -> None:
        at = iter(grads.values())
        for update in updates[kernels]:
            for p in update.parameters:
                p.grad = next(at)
            update.run(scale, 3e-4)

    def compare() -> float:
        for kernels in updates:
            run(kernels)
        a, b = ([t for u in updates[k] for t in u.owner.tensors] for k in ("fused", "inductor"))
        return difference(a, b)

    elements = sum(s.numel() for s in shapes.values())
    yield Pair("adamw", 28 * elements, 1, lambda: run("inductor"), lambda: run("fused"), compare)


def cross_entropy(m: config.Model, tokens: int) -> Iterator[Pair]:
    """Forward and backward down to the logits' gradient, of logits that are there."""
    logits = randn(tokens, m.vocab)
    targets = torch.randint(m.vocab, (tokens,), device=GPU)
    forward = torch.compile(lambda x, y: F.cross_entropy(x.float(), y), fullgraph=True)

    def plain() -> Tensor:
        return torch.autograd.grad(forward(logits, targets), logits)[0]

    mine = logits.detach().clone()
    yield Pair(
        "loss", 2 * logits.nbytes, 1, plain, lambda: loss.loss_and_slope_(mine, targets, 1 / tokens),
        lambda: difference(loss.loss_and_slope_(logits.detach().clone(), targets, 1 / tokens)[1], plain()),
    )  # fmt: skip


def head(m: config.Model, tokens: int) -> Iterator[Pair]:
    """The whole head with its matmuls; bytes of the logits alone, so predicted and TB/s mean little here."""
    hidden, weight = randn(1, tokens, m.dim), (0.02 * randn(m.vocab, m.dim)).detach().requires_grad_()
    targets = torch.randint(m.vocab, (1, tokens), device=GPU)
    compiled = torch.compile(lm_loss, fullgraph=True)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(hidden, weight, targets), (hidden, weight))

    yield Pair(
        "head", 4 * 2 * tokens * m.vocab, 1, lambda: gradients(compiled), lambda: gradients(loss.fused_loss),
        lambda: difference(gradients(loss.fused_loss), gradients(compiled)),
    )  # fmt: skip


def both_ways(
    name: str,
    function: Callable[..., Any],
    ours: Callable[..., Any],
    inputs: list[Tensor],
    more: tuple[Tensor, ...],
    m: config.Model,
) -> Iterator[Pair]:
    """Forward, and backward, of a function of a layer."""
    torch._functorch.config.donated_buffer = False  # which would refuse to run a backward again
    compiled = torch.compile(function, fullgraph=True)
    outs = [f(*inputs, *more) for f in (compiled, ours)]
    outs = [o if isinstance(o, tuple) else (o,) for o in outs]
    grads = [torch.randn_like(o) for o in outs[0]]
    moved = sum(t.nbytes for t in inputs)
    yield Pair(
        name, moved + sum(o.nbytes for o in outs[0]), m.layers,
        lambda: compiled(*inputs, *more), lambda: ours(*inputs, *more), lambda: difference(outs[1], outs[0]),
    )  # fmt: skip

    def backward(out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grads, retain_graph=True)

    saved = moved if name == "swiglu" else 0  # a rotation's backward needs its angles only
    yield Pair(
        f"{name} backward", moved + saved + sum(g.nbytes for g in grads), m.layers,
        lambda: backward(outs[0]), lambda: backward(outs[1]), lambda: difference(backward(outs[1]), backward(outs[0])),
    )  # fmt: skip


def of_swiglu(m: config.Model, tokens: int) -> Iterator[Pair]:
    gate, up = randn(tokens, m.ffn), randn(tokens, m.ffn)
    yield from both_ways("swiglu", gated, swiglu.gated, [gate, up], (), m)
    grad, g, u = randn(tokens, m.ffn, grad=False), gate.detach(), up.detach()
    again = torch.compile(lambda d, g, u: (*_slopes(d, g, u), gated(g, u)), fullgraph=True)
    yield Pair(
        "swiglu_down backward", 6 * grad.nbytes, m.layers, lambda: again(grad, g, u),
        lambda: swiglu.backward_again(grad, g, u), lambda: difference(swiglu.backward_again(grad, g, u), again(grad, g, u)),
    )  # fmt: skip


def _slopes(d: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    d, g, u = d.float(), g.float(), u.float()
    sigmoid = g.sigmoid()
    return (d * u * sigmoid * (1 + g * (1 - sigmoid))).bfloat16(), (d * g * sigmoid).bfloat16()


def of_rope(m: config.Model, tokens: int, length: int = 2048) -> Iterator[Pair]:
    q, k = (randn(tokens // length, length, n, m.head_dim) for n in (m.heads, m.kv_heads))
    tables = plain_rope.tables(m, length, torch.bfloat16, GPU)
    yield from both_ways("rope", plain_rope.turn, rope.turn, [q, k], tables, m)


def slopes(function: Callable[..., Any], x: Tensor, weights: list[Tensor]) -> tuple[Timed, list[Tensor]]:
    """What runs the backward of a compiled function of 2 x, from random gradients to x and `weights`, again and again; those
    gradients. 2 x as a sum, since in a layer too x is one: gradients of an input itself torch would add up in eager mode."""
    torch._functorch.config.donated_buffer = False  # which would refuse to run a backward again
    torch.manual_seed(0)
    torch._dynamo.reset()  # else this is the same function compiled again, too often
    outs = torch.compile(lambda x, y: function(x + y), fullgraph=True)(x, x.detach())
    grads = [torch.randn_like(o) for o in outs]
    return lambda: torch.autograd.grad(outs, [x, *weights], grads, retain_graph=True), grads


def of_norm(m: config.Model, tokens: int) -> Iterator[Pair]:
    """Backward, with the residual's gradient, of the norms before the FFN and before attention: from 2 and 3 gradients. Each
    of the compiled function's results is the norm's times a power of two, or they would be one result with one gradient."""
    for readers in (2, 3):
        x, module = randn(tokens, m.dim), nn.RMSNorm(m.dim, m.norm_eps, device=GPU, dtype=torch.bfloat16)
        plain, (residual, *grads) = slopes(functools.partial(read, norm=module, readers=readers), x, [module.weight])
        arguments = (
            residual,
            [g * 2**i for i, g in enumerate(grads)],
            2 * x.detach(),
            module.weight.detach(),
            m.norm_eps,
        )
        ours = functools.partial(norm.backward, *arguments)
        yield Pair(
            f"norm backward, {readers} gradients", (3 + readers) * x.nbytes, m.layers, plain, ours,
            functools.partial(beside, ours, plain),
        )  # fmt: skip


def read(x: Tensor, norm: nn.RMSNorm, readers: int) -> tuple[Tensor, ...]:
    x, branch = normed(x, norm)
    assert isinstance(branch, Tensor)
    return x, *(branch * 2**i for i in range(readers))


def beside(ours: Timed, plain: Timed) -> float:
    return difference(ours(), plain())


CASES: dict[str, Callable[[config.Model, int], Iterator[Pair]]] = {
    "adamw": adamw, "loss": cross_entropy, "head": head, "swiglu": of_swiglu, "rope": of_rope,
    "norm": of_norm,
}  # fmt: skip
#: (block, warps) that --tune tries; rope has warps alone, norm elements a thread and warps an SM
TUNE = {
    "adamw": [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16)],
    "loss": [(4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 16), (16384, 32), (32768, 32)],
    "swiglu": [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16)],
    "rope": [(0, 1), (0, 2), (0, 4), (0, 8)],
    "norm": [(8, 16), (8, 24), (8, 32), (16, 8), (16, 12), (16, 16), (32, 8)],
}


def tuned(name: str, m: config.Model, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A case's times for every pair of TUNE, ours only."""
    from train.kernels import jit  # noqa: F401  # its modules hold the constants
    from train.kernels.jit import adamw as a
    from train.kernels.jit import loss as b
    from train.kernels.jit import norm as e
    from train.kernels.jit import rope as c
    from train.kernels.jit import swiglu as d

    module: Any = {"adamw": a, "loss": b, "rope": c, "swiglu": d, "norm": e}[name]
    was = getattr(module, "BLOCK", 0), module.WARPS
    found = []
    for block, warps in [*TUNE[name], was]:
        module.BLOCK, module.WARPS = block, warps
        found += [
            {"kernel": p.name, "block": block, "warps": warps, "ours_ms": p.calls * milliseconds(p.ours, repeats)}
            for p in CASES[name](m, tokens)
        ]
        torch.cuda.empty_cache()
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["kernel", "GB a step", "predicted ms", "plain ms", "ours ms", "saved ms", "ours TB/s", "largest difference"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in rows:
        lines.append(
            f"| {r['kernel']} | {r['gbytes']:.1f} | {r['predicted_ms']:.2f} | {r['plain_ms']:.2f} | {r['ours_ms']:.2f}"
            f" | {r['plain_ms'] - r['ours_ms']:.2f} | {r['tb_per_s']:.2f} | {r['difference']:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(CASES), help="(default: %(default)s)")
    p.add_argument(
        "--tokens", type=int, default=16 * 2048, help="of a micro-batch, rows of 2048 (default: %(default)s)"
    )
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--tune", action="store_true", help="time other blocks and warps too")
    p.add_argument("--out", type=Path, help="JSON")
    args = p.parse_args()
    only = words(p, "--only", args.only, CASES)
    if not torch.cuda.is_available():
        p.error("needs a CUDA GPU")
    file = ROOT / "conf" / "model" / "dense_1b.yaml"
    m = config.from_dict(config.Model, yaml.safe_load(file.read_text(encoding="utf-8")))
    rows, tries = [], []
    for name in only:
        rows += [pair.row(args.repeats) for pair in CASES[name](m, args.tokens)]
        torch.cuda.empty_cache()
        if args.tune and name in TUNE:
            tries += tuned(name, m, args.tokens, args.repeats)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens,
              "kernels": rows, "tuning": tries}  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for each in tries:
        print(f"{each['kernel']}: block {each['block']}, {each['warps']} warps: {each['ours_ms']:.2f} ms")
    print(f"{result['device']}, torch {torch.__version__}, {args.tokens} tokens\n\n{table(rows)}")


if __name__ == "__main__":
    main()
