"""The LM head and its cross-entropy, one function so that Inductor can fuse it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def lm_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens: hidden [B, T, dim], weight [vocab, dim], targets [B, T] → 0-dim.

    The softmax is in fp32 (fp64 for fp64 weights). The one upcast of the logits is fused away when compiled; in eager
    mode it is the largest activation of a step: 4 bytes x tokens x vocab.
    """
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
