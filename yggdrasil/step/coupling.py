"""Coupled drafting: the draft's candidates for sampled text, ranked with the noise of the target.

The target emits argmax(processed logits + noise), and the noise depends only on seed and position. So the
draft adds the same noise to its own scores. Sampling is then greedy decoding of two perturbed models, and
everything that holds for greedy trees holds for the perturbed scores. The text does not depend on it: a
token is accepted if and only if the target emits it.

Shapes: here M = candidates of a wide read, best first, and C = those that are kept.

Source: the coupling of Gumbel-max samplers without communication (Daliri et al. 2024); on trees it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.layout import READ_BEST, READ_WIDE
from yggdrasil.step.sampling import gumbel_noise

__all__ = ["FORBIDDEN", "LOWEST_PATH", "MIN_SCORE", "coupled", "is_ranked_again", "noise_of", "read_of"]

MIN_SCORE = -1e4  # a candidate that a filter drops stays ahead of those that the tree has, at -inf
FORBIDDEN = -1e30  # of a candidate that may not come next; after it come those that the tree has
LOWEST_PATH = -1e20  # below it is every path with a forbidden token, whatever the scale of its edges
LOWEST_TEMPERATURE = torch.finfo(torch.float32).tiny


def is_ranked_again(sampling: SamplingConfig) -> bool:
    """Whether noise or processors rank the draft's candidates of such a request."""
    return sampling.temperature > 0 or sampling.processors is not None


def read_of(sampling: SamplingConfig) -> int:
    """How a draft's forward reads nodes of such a request."""
    return READ_WIDE if is_ranked_again(sampling) else READ_BEST


def noise_of(sampling: SamplingConfig, positions: Sequence[int], vocab: int, device: str) -> Tensor:
    """(len(positions), V) noise of a sampled request. Cost: draws each position once; no sync."""
    return torch.stack([gumbel_noise(sampling.seed, position, vocab, device) for position in positions])


def coupled(
    tokens_NM: Tensor, log_probs_NM: Tensor, noise_NM: Tensor, sampling: SamplingConfig, count: int
) -> tuple[Tensor, Tensor]:
    """The best candidates after temperature, filters and noise: the specification of `ygg::coupled`.

    Args:
        tokens_NM: Candidates, likeliest first.
        log_probs_NM: Their log-probabilities; FORBIDDEN for those that may not come next.
        noise_NM: float32 noise of each candidate at its own position, that of its parent plus one; 0 at
            temperature 0.
        sampling: Its filters see only these candidates; at temperature 0 there are none.
        count: C, at most M.

    Returns:
        (N, C) tokens, best first, and the logarithms of their shares: a softmax of the M perturbed
        log-probabilities log q + temperature * noise. At temperature 0 that would be q itself, so one
        scale of edges (step/platt.py) fits neighbouring temperatures. FORBIDDEN stays what it is.

    Cost: two dozen small operators, no sync.
    """
    log_probs = log_probs_NM.double()
    perturbed = log_probs + sampling.temperature * noise_NM.double()
    if sampling.temperature > 0:
        perturbed = perturbed.masked_fill(_dropped(log_probs, sampling), -math.inf)
    best = perturbed.sort(dim=-1, descending=True, stable=True)
    best_NC = best.indices[:, :count]
    log_share = perturbed.log_softmax(dim=-1).gather(1, best_NC)
    is_forbidden = log_probs.gather(1, best_NC) <= FORBIDDEN
    log_share = log_share.clamp(min=MIN_SCORE).masked_fill(is_forbidden, FORBIDDEN)
    return tokens_NM.gather(1, best_NC), log_share.float()


def _dropped(log_probs_NM: Tensor, sampling: SamplingConfig) -> Tensor:
    """(N, M) whether a filter drops a candidate."""
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
    share = ((log_probs_NM - log_probs_NM[:, :1]) / temperature).exp()
    if sampling.top_k > 0:
        share[:, sampling.top_k :] = 0.0
    sums = share.cumsum(dim=-1)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    is_dropped = share < sampling.min_p
    if sampling.top_k > 0:
        is_dropped[:, sampling.top_k :] = True
    if sampling.top_p < 1:
        is_dropped |= before >= sampling.top_p * sums[:, -1:]
    return is_dropped
