"""Inputs of the kernels' tests, and each kernel beside its plain form on them: on a CPU under Triton's interpreter, or on a
GPU."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train import config
from train.kernels import adamw, loss, norm, ordered
from train.model import loss as plain_loss
from train.parallel.adamw import Piece, norms

ALL = "adamw+loss+swiglu+rope+norm"  # every kernel that goes with the others
STACKED = "adamw+loss+norm+stacked"
WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def adamw_case(
    sizes: Sequence[int],
    grad: torch.dtype,
    state: torch.dtype,
    weight: torch.dtype | None,
    device: str,
    offset: int = 0,
    steps: int = 3,
) -> tuple[list[Tensor], list[Tensor]]:
    """Steps by the kernel and by the plain form; what each leaves: masters, both moments and weights, each in one tensor."""
    from train.kernels.jit.adamw import Launch

    optim = config.Optim("adamw", weight_decay=0.1)
    masters = [randn(n + offset, seed=i, device=device)[offset:] for i, n in enumerate(sizes)]
    decays = [0.1 if i % 2 else 0.0 for i in range(len(sizes))]
    left = []
    for kernel in (True, False):
        p = [m.clone() if not offset else torch.cat((m[:offset], m))[offset:] for m in masters]
        moments = [(torch.zeros_like(x, dtype=state), torch.zeros_like(x, dtype=state)) for x in p]
        weights = [x.to(weight) for x in p] if weight else []
        step = torch.zeros((), device=device)
        scale = torch.tensor(0.37, device=device)
        launch = Launch(p, moments, weights, decays, optim) if kernel else None
        for t in range(steps):
            grads = [randn(n, seed=100 * t + i, dtype=grad, device=device) for i, n in enumerate(sizes)]
            if launch is not None:
                lr = 1e-2 / (t + 1)
                launch(grads, scale, step, torch.tensor(lr, device=device) if t == 1 else lr)  # from a device too
                continue
            step += 1
            for i, g in enumerate(grads):
                w = weights[i] if weight else None
                adamw.reference(p[i], g, *moments[i], w, scale, step, 1e-2 / (t + 1), decays[i], optim)
        # one tensor a kind: a moment of few elements may be small because its gradients cancel, but not more exact for it
        left.append([torch.cat(kind) for kind in (p, *zip(*moments, strict=True), weights) if kind])
    return left[0], left[1]


def norms_case(
    sizes: Sequence[int], dtype: torch.dtype, device: str, offset: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Norms of gradients by the optimizer's kernels and by torch, twice with other gradients, an update between them."""
    pieces = [Piece(f"p{i}", torch.zeros(n, device=device), True) for i, n in enumerate(sizes)]
    weights = [p.tensor.to(torch.bfloat16) for p in pieces]
    owner = adamw.FusedAdamW(pieces, weights, config.Optim("adamw"), None)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for t in range(2):
        grads = [randn(n + offset, seed=10 * t + i, dtype=dtype, device=device)[offset:] for i, n in enumerate(sizes)]
        found[0].append(owner.norms(grads, torch.device(device)))
        found[1].append(norms(grads, torch.device(device)))
        owner.step(grads, torch.tensor(1.0, device=device), 1e-3)
    return found


def loss_case(n: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """[cross-entropies, slope], by the kernel and by the plain form."""
    from train.kernels.jit.loss import cross_entropy

    logits = 4 * randn(n, vocab, dtype=dtype, device=device)
    targets = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(1)).to(device)
    targets[0], targets[-1] = 0, vocab - 1
    value, slope = plain_loss._loss_and_slope(logits, targets, 1 / n)
    inside = logits.clone()
    losses = cross_entropy(inside, targets, 1 / n)
    again, same = loss.loss_and_slope_(logits, targets, 1 / n)
    assert same is logits
    return [losses.sum() / n, inside, again, same], [value, slope, value, slope]


def norm_case(rows: int, dim: int, dtype: torch.dtype, device: str, readers: int) -> tuple[list[Tensor], list[Tensor]]:
    """[gradient in x, in weight] from a residual's and a norm's readers', by the kernel and by torch's autograd in fp64."""
    residual, x, *grads = (randn(2, rows, dim, seed=i, dtype=dtype, device=device) for i in range(2 + readers))
    weight = (1 + 0.1 * randn(dim, seed=9, device=device)).to(dtype)
    a, w = (t.double().requires_grad_() for t in (x, weight))
    want = torch.autograd.grad(
        (a * 1, F.rms_norm(a, (dim,), w, 1e-5)), (a, w), (residual.double(), torch.stack(grads).double().sum(0))
    )
    # not contiguous, as a branch's gradient may be
    grads[-1] = grads[-1].transpose(0, 1).contiguous().transpose(0, 1)
    return list(norm.backward(residual, grads, x, weight, 1e-5)), [t.to(dtype) for t in want]


def close(got: Sequence[Tensor], want: Sequence[Tensor], ulps: float = 4) -> None:
    """Equal to within `ulps` units in the last place of the largest element."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, i
        bound = ulps * torch.finfo(a.dtype).eps * float(b.abs().max())
        assert float((a.double() - b.double()).abs().max()) <= bound, (i, a, b)


def same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Equal to the last bit, the sign of a zero included."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (i, a, b)


def ordered_case(
    ranks: int, rank: int, n: int, dtype: torch.dtype, add: bool, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """The ordered sum by the kernel, own slice elsewhere, and one fp32 (fp64) addition a rank."""
    received = randn(ranks, n, dtype=dtype, device=device)
    received[:, 0] = -0.0  # what 0 + -0 would lose
    into = randn(n, seed=1, dtype=WIDE[dtype], device=device) if add else None
    total = received[0].to(WIDE[dtype], copy=True) if into is None else into + received[0].to(WIDE[dtype])
    for copy in received[1:]:
        total = total + copy.to(WIDE[dtype])
    own = (rank, received[rank].clone())
    whole = ordered.add_up(received, None if into is None else into.clone(), WIDE[dtype])
    received[rank] = torch.nan
    found = ordered.add_up(received, into, WIDE[dtype], own)
    assert into is None or found is into
    return [found, whole], [total, total]
