"""What the target says after every node: its likeliest token, or one sample that depends on the seed and the position alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError

__all__ = ["gumbel_noise", "next_tokens", "process_logits"]


def next_tokens(logits_KV: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """The target's own token after every node.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: Of the token to be chosen after each node: one after the node's own.
        sampling: Temperature, filters and seed.

    Returns:
        (K,) int64. Greedy takes the argmax; sampling takes argmax(processed logits + Gumbel noise), which is one sample of
        the softmax, with noise keyed by (seed, position): plain and speculative decoding draw the same token from the same logits.

    Raises:
        YggError: a row has no greatest logit (NaN).

    Cost: on CUDA one sync to refuse what is not finite.
    Source: the Gumbel-max form of categorical sampling.
    """
    scores_KV = logits_KV
    if sampling.temperature > 0:
        scores_KV = process_logits(logits_KV.float(), sampling)
        noise = {position: gumbel_noise(sampling.seed, position, scores_KV.shape[1]) for position in set(positions)}
        scores_KV = scores_KV + torch.stack([noise[position] for position in positions]).to(scores_KV.device)
    values_K, tokens_K = torch.ops.ygg.greatest(scores_KV) if scores_KV.is_cpu else scores_KV.max(dim=-1)
    if not all(map(math.isfinite, values_K.tolist())):  # sync: a broken model must not write text
        raise YggError("the target's logits are not finite: the weights or the input are broken")
    return tokens_K


def process_logits(logits_KV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Temperature, then top-k, top-p and min-p: filtered tokens become -inf.

    Args:
        logits_KV: (K, V) float32.
        sampling: A temperature above 0.

    Returns:
        (K, V) float32 logits whose softmax is the distribution that is sampled. Every row is processed by itself.
    """
    logits_KV = logits_KV / sampling.temperature
    vocab = logits_KV.shape[-1]
    if 0 < sampling.top_k < vocab:
        least = logits_KV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_KV.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits_KV = logits_KV.scatter(-1, order, ordered.masked_fill(before >= sampling.top_p, -torch.inf))
    if sampling.min_p > 0:
        probability = logits_KV.softmax(dim=-1)
        logits_KV = logits_KV.masked_fill(probability < sampling.min_p * probability.amax(dim=-1, keepdim=True), -torch.inf)
    return logits_KV


@lru_cache(maxsize=64)
def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """(V,) float32 standard Gumbel noise, a function of its arguments: Philox counters keyed by (seed, position).

    Aliasing: cached and shared; do not write.
    """
    uniform = np.random.Generator(np.random.Philox(key=[seed, position])).random(vocab, dtype=np.float64)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, np.finfo(np.float64).tiny))).astype(np.float32))
