"""Floating-point operations of training one token. A multiply-add counts as two. No torch.

Conventions (each counts matmuls only, and the backward of a matmul as two of its size):
  mfu         6 N + 12 L H d T: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), attention over the whole
              T x T square. N are the matmul parameters: the embedding lookup is none, the LM head is one.
  mfu_causal  the same with half the attention: what a causal kernel has to compute.
  hfu         mfu plus what recompute really runs again, attention over the whole square too. Full recompute runs a
              layer's forward again save its last matmul (w_down), whose output backward doesn't need. What a fused
              attention kernel recomputes inside its own backward is counted in none of them.
"""

from train.config import ConfigError, Model


def matmul_params(model: Model) -> int:
    """Weights that every token is multiplied by: the layers' matrices and the LM head (tied or not)."""
    return model.layers * _layer_matmul_params(model) + model.vocab * model.dim


def param_count(model: Model) -> int:
    """All parameters, a tied head counted once."""
    norms = model.layers * (2 * model.dim + 2 * model.head_dim * model.qk_norm) + model.dim
    return matmul_params(model) + norms + (0 if model.tied else model.vocab * model.dim)


def flops_per_token(model: Model, seq_len: int, recompute: str = "none") -> dict[str, float]:
    """{mfu, mfu_causal, hfu}: FLOPs a token costs, forward and backward, under each convention above.

    Raises ConfigError for an unknown memory.recompute.
    """
    if recompute not in ("none", "full"):
        raise ConfigError("memory.recompute", recompute, "valid: none, full")
    attention_forward = 4 * model.layers * model.heads * model.head_dim * seq_len  # q k^T and p v
    mfu = 6 * matmul_params(model) + 3 * attention_forward
    again = 2 * model.layers * (_layer_matmul_params(model) - model.dim * model.ffn) + attention_forward
    return {
        "mfu": float(mfu),
        "mfu_causal": mfu - 1.5 * attention_forward,
        "hfu": float(mfu + (again if recompute == "full" else 0)),
    }


def _layer_matmul_params(model: Model) -> int:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.dim * (q + 2 * kv) + q * model.dim + 3 * model.dim * model.ffn
