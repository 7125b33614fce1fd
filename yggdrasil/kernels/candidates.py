"""`ygg::candidates`: the likeliest next tokens of every row and their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference", "register", "traced"]


def reference(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row, best first, equal logits by token: the specification of `ygg::candidates`.

    Args:
        logits_NV: (N, V), any floating dtype.
        count: C, 1..V.

    Returns:
        Log-probabilities (N, C), float32, and tokens (N, C), int64.

    Source: Yggdrasil section 4.2, "generation probabilities as surrogates for acceptance likelihood".
    """
    log_probs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    order_NC = torch.sort(logits_NV.float(), dim=-1, descending=True, stable=True).indices[:, :count]
    return log_probs_NV.gather(1, order_NC), order_NC


def traced(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same in operators that Inductor lowers itself, for CUDA; equal logits come in the device's order."""
    best = logits_NV.float().topk(count, dim=-1)
    return best.values - logits_NV.float().logsumexp(dim=-1, keepdim=True), best.indices


def register() -> None:
    """Tell the compiler the operator's output shapes; called once, after the library is loaded."""

    def fake(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], count)
        return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)

    torch.library.register_fake("ygg::candidates", fake)
