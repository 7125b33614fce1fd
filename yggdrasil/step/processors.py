"""Logits processors on a tree: every node has the text of its own path, and so its own penalties and bans.

`process` is the specification of kernels/processors.cpp. The target's logits are processed where acceptance
looks; the draft's candidates are processed where they are proposed, which only raises acceptance.

Shapes: S = tokens of the longest text, L = tokens of a text, M = candidates of a wide read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yggdrasil.config import ProcessorConfig
from yggdrasil.staging import send, upload
from yggdrasil.state import DecodeState
from yggdrasil.step.coupling import FORBIDDEN
from yggdrasil.tree import TokenTree

__all__ = ["Prefixes", "allowed_after", "paths_of", "prefixes_of", "process", "process_candidates"]


class Prefixes(NamedTuple):
    """The text up to each of K nodes.

    Args:
        tokens_KS: (K, S) int64: prompt, output and path, the node included, then -1.
        len_K: (K,) their lengths.
        prompt_len: Tokens of the prompt.
        allowed_KV: Whether the request's grammar allows a token after each node; None without a grammar.
    """

    tokens_KS: Tensor
    len_K: Tensor
    prompt_len: int
    allowed_KV: Tensor | None = None


def prefixes_of(
    tree: TokenTree, nodes: slice, state: DecodeState, allowed_KV: Tensor | None = None
) -> Prefixes:
    """The texts of some nodes of a row's tree, whose root is the row's last token.

    Args:
        allowed_KV: Result of `allowed_after` for these nodes, if the request has a grammar.

    Cost: no sync.
    """
    device = tree.token_N.device
    text_L = upload(state.tokens[:-1], device)
    path_KA = _path_tokens(tree, nodes)
    tokens_KS = torch.cat((text_L.expand(len(path_KA), -1), path_KA), dim=1)
    len_K = len(text_L) + 1 + tree.depth_N[nodes].long()
    return Prefixes(tokens_KS, len_K, state.prompt_len, allowed_KV)


def paths_of(tree: TokenTree, nodes: slice) -> list[tuple[int, ...]]:
    """The tokens after the root on the way to each of some nodes, for a matcher, which runs on the host.

    Cost: one sync.
    """
    paths = _path_tokens(tree, nodes).tolist()  # sync: the matcher runs on the host
    return [tuple(token for token in path[1:] if token >= 0) for path in paths]


def _path_tokens(tree: TokenTree, nodes: slice) -> Tensor:
    """(K, A) int64 tokens on the way from the root to each of some nodes, both included, then -1."""
    path_KA = tree.path_NA[nodes].long()
    return tree.token_N[path_KA.clamp(min=0)].long().masked_fill(path_KA < 0, -1)


def allowed_after(paths: Sequence[tuple[int, ...]], state: DecodeState, device: str) -> Tensor:
    """(K, V) whether the request's grammar allows a token after each path.

    Args:
        paths: Result of `paths_of`.

    Cost: a mask for each path on the host, and one upload. No sync.
    """
    assert state.grammar is not None
    state.grammar.follow_(state.emitted)
    masks = [state.grammar.allowed_V(path) for path in paths]
    return send(torch.from_numpy(np.stack(masks)), device)


def process(logits_KV: Tensor, prefixes: Prefixes, processors: ProcessorConfig) -> Tensor:
    """Bias, penalties, bans and grammar for the token after every node.

    Args:
        logits_KV: (K, V) float32.

    Returns:
        (K, V) float32; -inf for banned tokens and those that the grammar does not allow. If no other token
        is left, those that it allows have 0. A row's bits do not depend on the other rows.

    Cost: a few tables of (K, V), no sync.
    Source: Keskar et al. 2019 (repetition); OpenAI's API (bias, presence, frequency).
    """
    logits_KV = _processed(logits_KV, prefixes, processors)
    allowed_KV = prefixes.allowed_KV
    if allowed_KV is None:
        return logits_KV
    is_stuck_K1 = logits_KV.amax(dim=-1, keepdim=True) == -torch.inf
    return logits_KV.masked_fill(is_stuck_K1 & allowed_KV, 0.0)


def _processed(logits_KV: Tensor, prefixes: Prefixes, processors: ProcessorConfig) -> Tensor:
    """The same without the last rule."""
    vocab = logits_KV.shape[1]
    if processors.logit_bias:
        tokens, values = zip(*processors.logit_bias, strict=True)
        device = logits_KV.device
        bias_V = logits_KV.new_zeros(vocab)
        logits_KV = logits_KV + bias_V.scatter(
            0, upload(tokens, device), upload(values, device, dtype=bias_V.dtype)
        )
    penalty = processors.repetition_penalty
    if penalty != 1:
        penalised_KV = torch.where(logits_KV < 0, logits_KV * penalty, logits_KV / penalty)
        logits_KV = torch.where(_counts(prefixes.tokens_KS, vocab) > 0, penalised_KV, logits_KV)
    if processors.presence_penalty or processors.frequency_penalty:
        emitted_KV = _counts(prefixes.tokens_KS[:, prefixes.prompt_len :], vocab)
        by_count_KV = processors.frequency_penalty * emitted_KV
        logits_KV = logits_KV - (by_count_KV + processors.presence_penalty * (emitted_KV > 0))
    is_banned_KV = _banned(prefixes, processors, vocab)
    if prefixes.allowed_KV is not None:
        is_banned_KV |= ~prefixes.allowed_KV
    return logits_KV.masked_fill(is_banned_KV, -torch.inf)


def process_candidates(
    tokens_WM: Tensor,
    log_probs_WM: Tensor,
    prefixes: Prefixes,
    processors: ProcessorConfig,
    *,
    top_logit: Tensor | float,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The draft's candidates after W nodes as the processors rank them.

    Candidates that the grammar does not allow give their places to the first tokens that it allows. None of
    these is likelier than the last candidate, whose log-probability they get.

    Args:
        tokens_WM: Candidates, likeliest first.
        top_logit: The target's largest logit after the last verified token. Log-probabilities plus this are
            about as large as the target's logits, which the repetition penalty scales.

    Returns:
        (W, M) tokens and scores, best first; FORBIDDEN for those that may not come next.
    """
    if prefixes.allowed_KV is not None:
        tokens_WM, log_probs_WM = _replaced(tokens_WM, log_probs_WM, prefixes.allowed_KV)
    missing_WV = log_probs_WM.new_full((len(tokens_WM), vocab), -torch.inf)
    scores_WV = missing_WV.scatter(1, tokens_WM, log_probs_WM + top_logit)
    processed_WM = _processed(scores_WV, prefixes, processors).gather(1, tokens_WM).clamp(min=FORBIDDEN)
    best = processed_WM.sort(dim=-1, descending=True, stable=True)
    return tokens_WM.gather(1, best.indices), best.values


def _replaced(tokens_WM: Tensor, log_probs_WM: Tensor, allowed_WV: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates with tokens that are allowed, as far as there are any. Cost: no sync."""
    is_wrong_WM = ~allowed_WV.gather(1, tokens_WM)
    vocab = allowed_WV.shape[1]
    is_other_WV = allowed_WV.scatter(1, tokens_WM, False)
    # the first other tokens: the largest of vocab - token
    left_WV = is_other_WV * torch.arange(vocab, 0, -1, device=allowed_WV.device)
    left_WM = left_WV.topk(min(tokens_WM.shape[1], vocab), dim=1).values
    # the first wrong candidate gets the first of them, the second one the second
    left_WM = left_WM.gather(1, (is_wrong_WM.cumsum(dim=1) - 1).clamp(min=0))
    is_replaced_WM = is_wrong_WM & (left_WM > 0)
    tokens_WM = torch.where(is_replaced_WM, vocab - left_WM, tokens_WM)
    return tokens_WM, torch.where(is_replaced_WM, log_probs_WM[:, -1:], log_probs_WM)


def _counts(tokens_KS: Tensor, vocab: int) -> Tensor:
    """(K, V) float32: how often each text contains each token."""
    places_KS = tokens_KS.masked_fill(tokens_KS < 0, vocab)
    counts = tokens_KS.new_zeros(len(tokens_KS), vocab + 1, dtype=torch.float32)
    return counts.scatter_add_(1, places_KS, torch.ones_like(places_KS, dtype=counts.dtype))[:, :vocab]


def _banned(prefixes: Prefixes, processors: ProcessorConfig, vocab: int) -> Tensor:
    """(K, V) whether a token may not come next."""
    tokens_KS, len_K, prompt_len, _ = prefixes
    is_banned = tokens_KS.new_zeros(len(tokens_KS), vocab + 1, dtype=torch.bool)
    size = processors.no_repeat_ngram_size
    if 0 < size <= tokens_KS.shape[1]:
        ngrams = tokens_KS.unfold(1, size, 1)
        is_repeated = (ngrams[..., :-1] == _last(prefixes, size - 1)[:, None]).all(dim=-1)
        next_tokens = ngrams[..., -1]
        is_free = ~is_repeated | (next_tokens < 0)
        is_banned.scatter_(1, next_tokens.masked_fill(is_free, vocab), True)
    for *before, token in processors.banned:
        follows_K = (_last(prefixes, len(before)) == upload(before, tokens_KS.device)).all(dim=-1)
        is_banned[:, token] |= follows_K
    if processors.min_tokens:
        is_early_K = len_K - prompt_len < processors.min_tokens
        for token in processors.ends:
            is_banned[:, token] |= is_early_K
    return is_banned[:, :vocab]


def _last(prefixes: Prefixes, count: int) -> Tensor:
    """(K, count) the last tokens of every text; -2, which no text contains, before its start."""
    places = prefixes.len_K[:, None] - upload(range(count, 0, -1), prefixes.len_K.device)
    found = prefixes.tokens_KS.gather(1, places.clamp(min=0))
    return found.masked_fill(places < 0, -2)
