"""`ygg::candidates`: the most likely next tokens of every row and their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from yggdrasil.layout import READ, READ_WIDE

__all__ = ["MOST_CANDIDATES", "reference", "register", "traced"]

MOST_CANDIDATES = 64
"""Next tokens of a row with READ_WIDE; bench/LOG.md has what more of them would gain."""


def reference(logits_NV: Tensor, meta_NM: Tensor, count: int, few: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, best first: the specification of `ygg::candidates`.

    Of equal logits the smaller token comes first.

    Args:
        logits_NV: (N, V), float32 or bfloat16.
        meta_NM: Metadata of the N tokens. A row that is not read gets token 0 with log-probability -inf.
        count: C, from 1 to V.
        few: At most C. A row without READ_WIDE gets this many; the rest is as in a row that is not read.

    Returns:
        Log-probabilities (N, C), float32, and tokens (N, C), int64.

    Source: Yggdrasil section 4.2, "generation probabilities as surrogates for acceptance likelihood".
    """
    log_probs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    order_NC = torch.sort(logits_NV.float(), dim=-1, descending=True, stable=True).indices[:, :count]
    read_N1 = meta_NM[:, READ, None]
    is_left_out_NC = (read_N1 == 0) | ((read_N1 < READ_WIDE) & (torch.arange(count) >= few))
    log_probs_NC = log_probs_NV.gather(1, order_NC)
    return log_probs_NC.masked_fill(is_left_out_NC, -torch.inf), order_NC.masked_fill(is_left_out_NC, 0)


def traced(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same for all rows, in operators that Inductor lowers itself, for CUDA.

    Equal logits come in the device's order.
    """
    best = logits_NV.float().topk(count, dim=-1)
    return best.values - logits_NV.float().logsumexp(dim=-1, keepdim=True), best.indices


def register() -> None:
    """Give the compiler the operator's output shapes; call once, after the library is loaded."""

    def fake(logits: Tensor, meta: Tensor, count: int, few: int) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], count)
        return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)

    torch.library.register_fake("ygg::candidates", fake)
