"""The target's own token after every node: its most likely one, or a sample.

A sample depends only on the logits, the seed and the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.kernels.filters import beyond_top_p, shares
from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.staging import send

__all__ = ["BROKEN", "TargetTokens", "choose_tokens", "draw_noise", "gumbel_noise", "process_logits"]

BROKEN = "the target's logits are not finite: the weights or the input are broken"
LOWEST_TEMPERATURE = 1e-30  # below it a quotient of float32 logits may overflow


class TargetTokens(NamedTuple):
    """The target's own token after every node.

    Args:
        token_K: (K,) int64.
        score_K: (K,) the largest score of each row, which chose the token. Not finite where the logits are
            broken; then the token has no meaning.
    """

    token_K: Tensor
    score_K: Tensor


@one_torch_thread()
def choose_tokens(
    logits_KV: Tensor, positions: Sequence[int], position_K: Tensor, sampling: SamplingConfig
) -> TargetTokens:
    """The target's own token after every node, on the device of the logits.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: All positions that the tokens may have. Unused at temperature 0.
        position_K: (K,) integers: the index in `positions` of the token after each node.

    Returns:
        Greedy decoding takes the argmax. Sampling takes argmax(processed logits + Gumbel noise), which is a
        sample of the softmax. The noise is keyed by (seed, position), so plain and speculative decoding
        draw the same token from the same logits.

    Cost: no sync.
    Source: the Gumbel-max form of categorical sampling.
    """
    scores_KV = logits_KV
    if sampling.temperature > 0:
        scores_KV = process_logits(logits_KV.float(), sampling)
        noise = [
            gumbel_noise(sampling.seed, position, scores_KV.shape[1], scores_KV.device.type)
            for position in positions
        ]
        scores_KV = scores_KV + torch.stack(noise)[position_K]
    score_K, token_K = scores_KV.max(dim=-1)
    return TargetTokens(token_K, score_K)


def process_logits(logits_KV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Temperature, then top-k, top-p and min-p: filtered tokens become -inf.

    Args:
        logits_KV: (K, V) float32.
        sampling: A temperature above 0.

    Returns:
        (K, V) float32 logits whose softmax is the sampled distribution. A row's bits do not depend on the
        other rows.
    """
    logits_KV = _divide_by_temperature(logits_KV, sampling.temperature)
    vocab = logits_KV.shape[-1]
    if 0 < sampling.top_k < vocab:
        lowest = logits_KV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_KV.sort(dim=-1, descending=True, stable=True)
        is_beyond_KV = beyond_top_p(ordered, sampling.top_p)
        logits_KV = logits_KV.scatter(-1, order, ordered.masked_fill(is_beyond_KV, -torch.inf))
    if sampling.min_p > 0:
        share_KV = shares(logits_KV)
        lowest_K1 = sampling.min_p * share_KV.amax(dim=-1, keepdim=True)
        logits_KV = logits_KV.masked_fill(share_KV < lowest_K1, -torch.inf)
    return logits_KV


def _divide_by_temperature(logits_KV: Tensor, temperature: float) -> Tensor:
    """The quotient. Near 0 the largest logit is subtracted first: the same distribution, and finite."""
    if temperature < LOWEST_TEMPERATURE:
        logits_KV = logits_KV - logits_KV.amax(dim=-1, keepdim=True)
        temperature = max(temperature, torch.finfo(torch.float32).tiny)  # a smaller one may count as 0
    return logits_KV / temperature


def draw_noise(seed: int, position: int, vocab: int) -> Tensor:
    """(V,) float32 standard Gumbel noise from Philox counters keyed by (seed, position), on the host."""
    generator = np.random.Generator(np.random.Philox(key=[seed, position]))
    uniform_V = generator.random(vocab, dtype=np.float64)
    noise_V = -np.log(-np.log(np.maximum(uniform_V, np.finfo(np.float64).tiny)))
    return torch.from_numpy(noise_V.astype(np.float32))


# Holds the positions of a tree whose noise a plan draws ahead of time, and on a device the positions of
# sixteen rows that were not accepted and are drawn again.
@lru_cache(maxsize=128)
def gumbel_noise(seed: int, position: int, vocab: int, device: str = "cpu") -> Tensor:
    """`draw_noise` on a device, cached.

    Cost: draws once; for "cuda" one copy to the device, no sync.
    Aliasing: cached and shared; do not write.
    """
    return send(draw_noise(seed, position, vocab), device)
