"""Floating-point operations of training one token. A multiply-add counts as two. No torch.

Conventions (each counts matmuls only, and the backward of a matmul as two of its size):
  mfu         6 N + 12 L H d T: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), attention over the whole
              T x T square. N are the matmul parameters: the embedding lookup is none, the LM head is one.
  mfu_causal  the same with half the attention: what a causal kernel has to compute.
  hfu         mfu plus what recompute really runs again, attention over the whole square too. Full recompute runs a
              layer's forward again save its last matmul (w_down), whose output backward doesn't need; selective what
              it doesn't keep. What a fused attention kernel recomputes inside its own backward is counted in none of
              them. Left out for memory.recompute=budget, where torch's partitioner decides.
"""

from train.config import ConfigError, Memory, Model


def matmul_params(model: Model) -> int:
    """Weights that every token is multiplied by: the layers' matrices and the LM head (tied or not)."""
    return model.layers * _layer_matmul_params(model) + model.vocab * model.dim


def param_count(model: Model, active: bool = False) -> int:
    """All parameters, a tied head counted once; `active`: of the experts those that a token goes to."""
    norms = model.layers * (2 * model.dim + 2 * model.head_dim * model.qk_norm) + model.dim
    idle = 0 if active else model.layers * (model.experts - model.experts_per_token) * _expert_params(model)
    return matmul_params(model) + idle + norms + (0 if model.tied else model.vocab * model.dim)


def flops_per_token(
    model: Model,
    seq_len: int,
    recompute: str = "none",
    memory: Memory | None = None,
    attention: str = "flash",
    whole: bool = False,
    matmul: str = "aten::mm",
) -> dict[str, float]:
    """{mfu, mfu_causal, hfu}: FLOPs a token costs, forward and backward, under each convention above.

    `memory`: its every and targets count too; `attention`: the path that runs (selective recompute keeps the kernels'
    results, not math's), or ring; `whole`: full recompute runs all of a layer again (compiled around an exchange, as with
    cp; eager with fp8); `matmul`: the operator of the layers' linear maps, which `memory.targets` may name.
    Raises ConfigError for an unknown memory.recompute.
    """
    if recompute not in ("none", "full", "selective", "budget"):
        raise ConfigError("memory.recompute", recompute, "valid: none, full, selective, budget")
    attention_forward = 4 * model.layers * model.heads * model.head_dim * seq_len  # q k^T and p v
    mfu = 6 * matmul_params(model) + 3 * attention_forward
    found = {"mfu": float(mfu), "mfu_causal": mfu - 1.5 * attention_forward}
    every, targets = (1, None) if memory is None else (memory.every, memory.targets)
    if recompute == "none":
        again = 0.0
    elif recompute == "full":
        skipped = 0 if whole else _down_params(model)
        again = 2 * (_layer_matmul_params(model) - skipped) + attention_forward / model.layers
    elif recompute == "selective":
        again = _selective(model, targets, matmul) + (
            0 if _keeps(attention, targets) else attention_forward / model.layers
        )
    else:
        return found
    return found | {"hfu": mfu + -(-model.layers // every) * again}


def _selective(model: Model, targets: list[str] | None, matmul: str) -> float:
    """Matmul FLOPs of a layer and token that selective recompute runs again (w_down's result is never needed)."""
    grouped = model.experts_per_token * _expert_params(model) - _down_params(model) if model.experts else 0
    plain = _layer_matmul_params(model) - _down_params(model) - grouped
    if targets is not None:
        return 2.0 * ((0 if matmul in targets else plain) + (0 if "aten::_grouped_mm" in targets else grouped))
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    square = 2 * (q == model.dim) + 2 * (kv == model.dim) + 2 * (model.ffn == model.dim)  # wq, wo; wk, wv; gate, up
    return 2.0 * square * model.dim**2


def _keeps(attention: str, targets: list[str] | None) -> bool:
    """Whether the results of an attention path are kept; those of cp's ring, which passes keys on, always."""
    if attention == "ring":
        return True
    if attention == "math" or targets is None:
        return attention != "math"
    return any("attention" in t and (attention in t or t == "torch_attn") for t in targets)


def _layer_matmul_params(model: Model) -> int:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    experts = model.experts_per_token * _expert_params(model) + model.dim * model.experts  # and the router
    return model.dim * (q + 2 * kv) + q * model.dim + 3 * model.dim * model.ffn + experts


def _expert_params(model: Model) -> int:
    return 3 * model.dim * model.expert_ffn


def _down_params(model: Model) -> int:
    """Weights of the layer's last matmul that a token meets."""
    return model.dim * (model.ffn + model.experts_per_token * model.expert_ffn)
