"""The model against a reference written from the formulas, in fp64; init; GQA; tied head; precision."""

import math

import pytest
import torch

from tests.model.tiny import build, tokens
from train import config
from train.measure import flops
from train.memory import recompute


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def reference_block(cfg: config.Model, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One layer, head by head, with rotations as complex numbers. x [T, dim]."""
    length, half = x.shape[0], cfg.head_dim // 2
    angle = torch.tensor(
        [[t * cfg.rope_theta ** (-i / half) for i in range(half)] for t in range(length)], dtype=x.dtype
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(h: torch.Tensor) -> torch.Tensor:
        z = torch.complex(h[:, :half], h[:, half:]) * turn
        return torch.cat((z.real, z.imag), dim=1)

    n = rms(x, w["attention_norm.weight"], cfg.norm_eps)
    heads = []
    for h in range(cfg.heads):
        g, d = h // (cfg.heads // cfg.kv_heads), cfg.head_dim
        q = n @ w["attention.wq.weight"][h * d : (h + 1) * d].T
        k = n @ w["attention.wk.weight"][g * d : (g + 1) * d].T
        v = n @ w["attention.wv.weight"][g * d : (g + 1) * d].T
        if cfg.qk_norm:
            q = rms(q, w["attention.q_norm.weight"], cfg.norm_eps)
            k = rms(k, w["attention.k_norm.weight"], cfg.norm_eps)
        score = rotated(q) @ rotated(k).T / math.sqrt(d)
        score = score.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        heads.append(score.exp() / score.exp().sum(-1, keepdim=True) @ v)
    x = x + torch.cat(heads, dim=1) @ w["attention.wo.weight"].T
    n = rms(x, w["ffn_norm.weight"], cfg.norm_eps)
    gate = n @ w["ffn.w_gate.weight"].T
    return x + (gate / (1 + (-gate).exp()) * (n @ w["ffn.w_up.weight"].T)) @ w["ffn.w_down.weight"].T


def reference_loss(cfg: config.Model, w: dict[str, torch.Tensor], inp: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, targets in zip(inp, out, strict=True):
        x = w["embed.weight"][row]
        for i in range(cfg.layers):
            prefix = f"layers.{i}."
            x = reference_block(cfg, {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}, x)
        logits = rms(x, w["norm.weight"], cfg.norm_eps) @ w["embed.weight" if cfg.tied else "head.weight"].T
        total = total + (logits.exp().sum(-1).log() - logits[torch.arange(len(row)), targets]).sum()
    return total / inp.numel()


@pytest.mark.parametrize("path", ["math", "flash"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"qk_norm": True, "norm_eps": 1e-6}, {"tied": True}, {"head_dim": 10}],
    ids=["gqa", "mha", "mqa", "qk_norm", "tied", "wide_heads"],
)
def test_loss_and_gradients_equal_the_reference(changes: dict, path: str) -> None:
    model = build(path=path, **changes)
    with torch.no_grad():  # away from the small initial values and from norms of one
        for i, p in enumerate(model.parameters()):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
    inp, out = tokens()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_loss(model.cfg, weights, inp, out)
    expected.backward()
    loss = model(inp, out)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        assert (p.grad - weights[name].grad).norm() <= 1e-11 * weights[name].grad.norm(), name


def test_tied_head_has_no_matrix_of_its_own() -> None:
    assert build(tied=True).head is None
    assert "head.weight" in build().state_dict()


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": True}])
def test_parameters_are_those_that_flops_counts(changes: dict) -> None:
    model = build(**changes)
    assert sum(p.numel() for p in model.parameters()) == flops.param_count(model.cfg)
    assert not list(model.buffers())


def test_init_depends_on_seed_and_name_only() -> None:
    first, again, deeper, other = build(), build(), build(vocab=51), build(seed=1)
    for name, p in first.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(p, deeper.get_parameter(name))  # a change elsewhere leaves it alone
        if p.ndim > 1:
            assert not torch.equal(p, other.get_parameter(name))
    matrices = [p.flatten()[:100] for p in first.parameters() if p.ndim > 1]
    assert len({tuple(m.tolist()) for m in matrices}) == len(matrices)


def test_init_is_the_same_in_every_dtype_and_not_moved_by_the_global_generator() -> None:
    wide = build(torch.float64)
    torch.manual_seed(99)
    narrow = build(torch.bfloat16)
    for name, p in wide.named_parameters():
        assert torch.equal(p.bfloat16(), narrow.get_parameter(name))


def test_init_scale() -> None:
    model = build(dim=96, ffn=128, vocab=300, layers=8)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p))
            continue
        std = 0.02 / 4 if name.endswith(("wo.weight", "w_down.weight")) else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_dtype_and_value(dtype: torch.dtype, loss_dtype: torch.dtype) -> None:
    loss = build(dtype)(*tokens())
    assert loss.dtype == loss_dtype and loss.shape == ()
    assert loss.item() == pytest.approx(math.log(50), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["math", "flash"])
def test_full_recompute_is_bitwise_equal(dtype: torch.dtype, path: str) -> None:
    results = []
    for mode in ("none", "full"):
        model = build(dtype, path)
        recompute.apply(model, config.Memory("m", mode))
        loss = model(*tokens())
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (loss, grads), (loss_again, grads_again) = results
    assert torch.equal(loss, loss_again)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name


def test_full_recompute_keeps_fewer_activations() -> None:
    def kept(mode: str) -> int:
        model = build(torch.float32)
        recompute.apply(model, config.Memory("m", mode))
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(*tokens(length=64))
        assert loss.requires_grad
        return sum(sizes.values())

    assert kept("full") < kept("none") / 2


def test_unknown_recompute_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="memory.recompute=some: valid: none, full"):
        recompute.apply(build(), config.Memory("m", "some"))
