"""What the target says after every node: its likeliest token, or one sample that depends on the seed and
the position alone.
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
    "Said",
    "choose_tokens",
    "draw_noise",
    "greatest",
    "gumbel_noise",
    "next_token",
    "next_tokens",
    "process_logits",
    "told",
    "whole_shares_beyond",
]

BROKEN = "the target's logits are not finite: the weights or the input are broken"
COLDEST = 1e-30  # below it a quotient of float32 logits may overflow
# the likeliest token has 2**40 shares: those of 2**22 tokens fit an int64, and a token loses at most one
SHARE_BITS = 40


class Said(NamedTuple):
    """What the target says after every node.

    Args:
        token_K: (K,) int64.
        score_K: (K,) the greatest score of each row, which chose the token; not finite where the logits are
            broken, and then the token means nothing.
    """

    token_K: Tensor
    score_K: Tensor


def next_tokens(logits_KV: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> list[int]:
    """The target's own token after every node, on the host.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: Of the token to be chosen after each node: one after the node's own. Greedy decoding does
            not ask.
        sampling: Temperature, filters and seed.

    Raises:
        YggError: a row has no greatest logit (NaN).

    Cost: one sync.
    """
    rows = {position: row for row, position in enumerate(dict.fromkeys(positions))}
    row_K = upload([rows[position] for position in positions], logits_KV.device)
    return told(choose_tokens(logits_KV, list(rows), row_K, sampling))[0]


@one_torch_thread()
def next_token(logits_1V: Tensor, position: int, sampling: SamplingConfig) -> int:
    """The target's own token after one node, sampled on the host: bit for bit that of `next_tokens`.

    Args:
        logits_1V: (1, V) logits after the node, on a CPU.
        position: Of the token to be chosen.
        sampling: A temperature above 0, filters and seed.

    Raises:
        YggError: the row has no greatest logit (NaN).

    Cost: filters one row, and draws its noise. That is not kept: where every position is asked once, nobody
    asks again."""
    scores_1V = process_logits(logits_1V.float(), sampling) + draw_noise(
        sampling.seed, position, logits_1V.shape[1]
    )
    [[token]] = told(greatest(scores_1V))
    return token


@one_torch_thread()
def choose_tokens(
    logits_KV: Tensor, positions: Sequence[int], position_K: Tensor, sampling: SamplingConfig
) -> Said:
    """The target's own token after every node, where the logits are.

    Args:
        logits_KV: (K, V) logits after each node.
        positions: Every position that a token may stand at. Greedy decoding does not ask.
        position_K: (K,) integers: which of them the token after each node has.
        sampling: Temperature, filters and seed.

    Returns:
        Greedy takes the argmax; sampling takes argmax(processed logits + Gumbel noise), which is one sample
        of the softmax, with noise keyed by (seed, position): plain and speculative decoding draw the same
        token from the same logits.

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
    return greatest(scores_KV)


def greatest(scores_KV: Tensor) -> Said:
    """Every row's greatest score and its token, the first of equals, where the scores are. Cost: one
    operator, no sync.
    """
    score_K, token_K = torch.ops.ygg.largest(scores_KV) if scores_KV.is_cpu else scores_KV.max(dim=-1)
    return Said(token_K, score_K)


def told(said: Said, *more_K: Tensor) -> list[list[int]]:
    """The tokens on the host, and whatever else of the nodes is to travel with them.

    Args:
        said: From `choose_tokens`.
        more_K: (K,) booleans or integers each.

    Returns:
        A list for the tokens and one for each of `more_K`.

    Raises:
        YggError: a score is not finite: a broken model must not write text.

    Cost: on a device one transfer and one sync, for all of it together.
    """
    if said.token_K.is_cpu:
        is_sound = all(map(math.isfinite, said.score_K.tolist()))
        rows = [said.token_K.tolist(), *(row_K.tolist() for row_K in more_K)]
    else:
        token_K = said.token_K.masked_fill(~said.score_K.isfinite(), -1)
        # sync: what is said is the text, and where the next tree stands
        rows = torch.stack((token_K, *(row_K.long() for row_K in more_K))).tolist()
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
        (K, V) float32 logits whose softmax is the distribution that is sampled. Every row has the bits that
        it has by itself: on a CPU sums run row by row, on a device, where the order of a sum follows the
        number of rows and where they begin, none is taken of floating-point numbers.
    """
    logits_KV = _over_temperature(logits_KV, sampling.temperature)
    vocab = logits_KV.shape[-1]
    if 0 < sampling.top_k < vocab:
        least = logits_KV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_KV.sort(dim=-1, descending=True, stable=True)
        is_beyond_KV = (
            _beyond(ordered, sampling.top_p)
            if ordered.is_cpu
            else whole_shares_beyond(ordered, sampling.top_p)
        )
        logits_KV = logits_KV.scatter(-1, order, ordered.masked_fill(is_beyond_KV, -torch.inf))
    if sampling.min_p > 0:
        share_KV = (
            logits_KV.softmax(dim=-1)
            if logits_KV.is_cpu
            else (logits_KV - logits_KV.amax(dim=-1, keepdim=True)).exp()
        )
        logits_KV = logits_KV.masked_fill(
            share_KV < sampling.min_p * share_KV.amax(dim=-1, keepdim=True), -torch.inf
        )
    return logits_KV


def _over_temperature(logits_KV: Tensor, temperature: float) -> Tensor:
    """The quotient; near 0 of the distances to the largest logit: the same distribution, and finite."""
    if temperature < COLDEST:
        logits_KV = logits_KV - logits_KV.amax(dim=-1, keepdim=True)
        temperature = max(temperature, torch.finfo(torch.float32).tiny)  # one below it may count as 0
    return logits_KV / temperature


def _beyond(ordered_KV: Tensor, top_p: float) -> Tensor:
    """Whether the tokens before one, in falling order, have a probability mass of `top_p` already."""
    probability_KV = ordered_KV.softmax(dim=-1)
    return probability_KV.cumsum(dim=-1) - probability_KV >= top_p


def whole_shares_beyond(ordered_KV: Tensor, top_p: float) -> Tensor:
    """The same for a device: shares of the likeliest token's probability are summed as integers, whose sum
    has no order.

    Args:
        ordered_KV: (K, V) float32 logits, falling.
        top_p: Above 0 and below 1.

    Returns:
        (K, V) bool; none of a row whose greatest logit is not finite, which is to be found broken, not
        filtered.

    Cost: ten small operators, no sync.
    """
    greatest_K1 = ordered_KV[:, :1]
    share_KV = ((ordered_KV - greatest_K1).exp() * 2.0**SHARE_BITS).long()
    sum_KV = share_KV.cumsum(dim=-1)
    return ((sum_KV - share_KV).double() >= top_p * sum_KV[:, -1:].double()) & greatest_K1.isfinite()


def draw_noise(seed: int, position: int, vocab: int) -> Tensor:
    """(V,) float32 standard Gumbel noise, a function of its arguments: Philox counters keyed by (seed,
    position), drawn on the host.
    """
    uniform = np.random.Generator(np.random.Philox(key=[seed, position])).random(vocab, dtype=np.float64)
    return torch.from_numpy(
        -np.log(-np.log(np.maximum(uniform, np.finfo(np.float64).tiny))).astype(np.float32)
    )


# of a tree, where a plan draws ahead of time; on a device of the positions of sixteen rows that were not
# accepted and come again
@lru_cache(maxsize=128)
def gumbel_noise(seed: int, position: int, vocab: int, device: str = "cpu") -> Tensor:
    """`draw_noise`, kept for who asks again, on the device that asks.

    Cost: the drawing; for "cuda" one copy to the device once, no sync.
    Aliasing: cached and shared; do not write.
    """
    noise_V = draw_noise(seed, position, vocab)
    return noise_V if device == "cpu" else noise_V.pin_memory().to(device, non_blocking=True)
