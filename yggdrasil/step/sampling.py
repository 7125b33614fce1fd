"""The target's own token after every node: its most likely one, or a sample.

A sample depends only on the logits, the seed and the position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.staging import upload

__all__ = [
    "BROKEN",
    "TargetTokens",
    "beyond_top_p_in_integers",
    "choose_tokens",
    "draw_noise",
    "gumbel_noise",
    "largest_scores",
    "next_token",
    "next_tokens",
    "process_logits",
    "tokens_to_host",
]

BROKEN = "the target's logits are not finite: the weights or the input are broken"
LOWEST_TEMPERATURE = 1e-30  # below it a quotient of float32 logits may overflow
# The most likely token has 2**40 shares. Shares of 2**22 tokens fit an int64; each loses at most one.
SHARE_BITS = 40


class TargetTokens(NamedTuple):
    """The target's own token after every node.

    Args:
        token_K: (K,) int64.
        score_K: (K,) the largest score of each row, which chose the token. Not finite where the logits are
            broken; then the token has no meaning.
    """

    token_K: Tensor
    score_K: Tensor


def next_tokens(logits_KV: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> list[int]:
    """The target's own token after every node, on the host.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: Position of the token after each node: the node's own plus one. Unused at temperature 0.
        sampling: Temperature, filters and seed.

    Raises:
        YggError: a row has no largest logit (NaN).

    Cost: one sync.
    """
    rows = {position: row for row, position in enumerate(dict.fromkeys(positions))}
    row_K = upload([rows[position] for position in positions], logits_KV.device)
    return tokens_to_host(choose_tokens(logits_KV, list(rows), row_K, sampling))[0]


@one_torch_thread()
def next_token(logits_1V: Tensor, position: int, sampling: SamplingConfig) -> int:
    """The target's own token after one node, sampled on the host; the same bits as `next_tokens`.

    Args:
        logits_1V: (1, V) logits after the node, on a CPU.
        position: Position of the sampled token.
        sampling: A temperature above 0, filters and seed.

    Raises:
        YggError: the row has no largest logit (NaN).

    Cost: filters one row and draws its noise. The noise is not cached: each position is needed once.
    """
    noise_V = draw_noise(sampling.seed, position, logits_1V.shape[1])
    scores_1V = process_logits(logits_1V.float(), sampling) + noise_V
    [[token]] = tokens_to_host(largest_scores(scores_1V))
    return token


@one_torch_thread()
def choose_tokens(
    logits_KV: Tensor, positions: Sequence[int], position_K: Tensor, sampling: SamplingConfig
) -> TargetTokens:
    """The target's own token after every node, on the device of the logits.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: All positions that the tokens may have. Unused at temperature 0.
        position_K: (K,) integers: the index in `positions` of the token after each node.
        sampling: Temperature, filters and seed.

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
    return largest_scores(scores_KV)


def largest_scores(scores_KV: Tensor) -> TargetTokens:
    """Every row's largest score and its token, the first among equals, on the device of the scores.

    Cost: one operator, no sync.
    """
    score_K, token_K = torch.ops.ygg.largest(scores_KV) if scores_KV.is_cpu else scores_KV.max(dim=-1)
    return TargetTokens(token_K, score_K)


def tokens_to_host(chosen: TargetTokens, *more_K: Tensor) -> list[list[int]]:
    """Copy the tokens to the host, with further arrays over the nodes in the same transfer.

    Args:
        chosen: Result of `choose_tokens`.
        more_K: (K,) booleans or integers each.

    Returns:
        A list for the tokens and one for each of `more_K`.

    Raises:
        YggError: a score is not finite: a broken model must not write text.

    Cost: on a device one transfer and one sync.
    """
    if chosen.token_K.is_cpu:
        is_sound = all(map(math.isfinite, chosen.score_K.tolist()))
        rows = [chosen.token_K.tolist(), *(row_K.tolist() for row_K in more_K)]
    else:
        token_K = chosen.token_K.masked_fill(~chosen.score_K.isfinite(), -1)
        rows = torch.stack(
            (token_K, *(row_K.long() for row_K in more_K))
        ).tolist()  # sync: this is the text
        is_sound = min(rows[0]) >= 0
    if not is_sound:
        raise YggError(BROKEN)
    return rows


def process_logits(logits_KV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Temperature, then top-k, top-p and min-p: filtered tokens become -inf.

    Args:
        logits_KV: (K, V) float32.
        sampling: A temperature above 0.

    Returns:
        (K, V) float32 logits whose softmax is the sampled distribution. A row's bits do not depend on the
        other rows. On a CPU sums run row by row. On a device the order of a sum depends on the number of
        rows and where they begin, so no floating-point numbers are summed there.
    """
    logits_KV = _divide_by_temperature(logits_KV, sampling.temperature)
    vocab = logits_KV.shape[-1]
    if 0 < sampling.top_k < vocab:
        least = logits_KV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_KV.sort(dim=-1, descending=True, stable=True)
        beyond = _beyond_top_p if ordered.is_cpu else beyond_top_p_in_integers
        is_beyond_KV = beyond(ordered, sampling.top_p)
        logits_KV = logits_KV.scatter(-1, order, ordered.masked_fill(is_beyond_KV, -torch.inf))
    if sampling.min_p > 0:
        share_KV = (
            logits_KV.softmax(dim=-1)
            if logits_KV.is_cpu
            else (logits_KV - logits_KV.amax(dim=-1, keepdim=True)).exp()
        )
        least_K1 = sampling.min_p * share_KV.amax(dim=-1, keepdim=True)
        logits_KV = logits_KV.masked_fill(share_KV < least_K1, -torch.inf)
    return logits_KV


def _divide_by_temperature(logits_KV: Tensor, temperature: float) -> Tensor:
    """The quotient. Near 0 the largest logit is subtracted first: the same distribution, and finite."""
    if temperature < LOWEST_TEMPERATURE:
        logits_KV = logits_KV - logits_KV.amax(dim=-1, keepdim=True)
        temperature = max(temperature, torch.finfo(torch.float32).tiny)  # a smaller one may count as 0
    return logits_KV / temperature


def _beyond_top_p(ordered_KV: Tensor, top_p: float) -> Tensor:
    """Whether the tokens before this one, in falling order, already have a probability mass of `top_p`."""
    probability_KV = ordered_KV.softmax(dim=-1)
    return probability_KV.cumsum(dim=-1) - probability_KV >= top_p


def beyond_top_p_in_integers(ordered_KV: Tensor, top_p: float) -> Tensor:
    """The same on a device: sums probabilities as integers, because the order of such a sum is irrelevant.

    Args:
        ordered_KV: (K, V) float32 logits, falling.
        top_p: Above 0 and below 1.

    Returns:
        (K, V) bool. All False in a row whose largest logit is not finite: it must be reported as broken,
        not filtered.

    Cost: ten small operators, no sync.
    """
    largest_K1 = ordered_KV[:, :1]
    share_KV = ((ordered_KV - largest_K1).exp() * 2.0**SHARE_BITS).long()
    sum_KV = share_KV.cumsum(dim=-1)
    return ((sum_KV - share_KV).double() >= top_p * sum_KV[:, -1:].double()) & largest_K1.isfinite()


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
    noise_V = draw_noise(seed, position, vocab)
    return noise_V if device == "cpu" else noise_V.pin_memory().to(device, non_blocking=True)
