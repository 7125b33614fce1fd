"""The sums of the sampling filters, in the form of each device: `ygg::beyond_top_p` and `ygg::shares`.

A row's bits must not depend on the other rows. On a CPU sums run row by row. On a device the order of a sum
depends on the number of rows and where they begin, so no floating-point numbers are summed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["beyond_top_p", "beyond_top_p_in_integers", "shares"]

# The most likely token has 2**40 shares. Shares of 2**22 tokens fit an int64; each loses at most one.
SHARE_BITS = 40


def beyond_top_p(ordered_KV: Tensor, top_p: float) -> Tensor:
    """Whether the tokens before this one already have a probability mass of `top_p`.

    Args:
        ordered_KV: (K, V) float32 logits, falling.
        top_p: Above 0 and below 1.

    Returns:
        (K, V) bool.

    Cost: up to ten small operators, no sync.
    """
    beyond: Tensor = torch.ops.ygg.beyond_top_p(ordered_KV, top_p)
    return beyond


def shares(logits_KV: Tensor) -> Tensor:
    """(K, V) numbers in proportion to the probabilities of each row. Cost: no sync."""
    share_KV: Tensor = torch.ops.ygg.shares(logits_KV)
    return share_KV


def _beyond_top_p_in_floats(ordered_KV: Tensor, top_p: float) -> Tensor:
    probability_KV = ordered_KV.softmax(dim=-1)
    return probability_KV.cumsum(dim=-1) - probability_KV >= top_p


def beyond_top_p_in_integers(ordered_KV: Tensor, top_p: float) -> Tensor:
    """`beyond_top_p` on a device: sums of integers, because their order is irrelevant.

    Returns:
        All False in a row whose largest logit is not finite: it must be reported as broken, not filtered.
    """
    largest_K1 = ordered_KV[:, :1]
    share_KV = ((ordered_KV - largest_K1).exp() * 2.0**SHARE_BITS).long()
    sum_KV = share_KV.cumsum(dim=-1)
    return ((sum_KV - share_KV).double() >= top_p * sum_KV[:, -1:].double()) & largest_K1.isfinite()


def _unscaled_shares(logits_KV: Tensor) -> Tensor:
    return (logits_KV - logits_KV.amax(dim=-1, keepdim=True)).exp()


torch.library.define("ygg::beyond_top_p", "(Tensor ordered, float top_p) -> Tensor")
torch.library.define("ygg::shares", "(Tensor logits) -> Tensor")
torch.library.impl("ygg::beyond_top_p", "CPU", _beyond_top_p_in_floats)
torch.library.impl("ygg::beyond_top_p", "CUDA", beyond_top_p_in_integers)
torch.library.impl("ygg::shares", "CPU", lambda logits_KV: logits_KV.softmax(dim=-1))
torch.library.impl("ygg::shares", "CUDA", _unscaled_shares)
