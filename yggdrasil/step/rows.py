"""The step over a batch: every row drafts a chain of its own, all rows share each forward.

The stages are those of a single request: draft, prune, verify, accept, commit. A chain is consecutive
tokens of its row. So draft tokens are packed like a prompt, and committing the accepted ones moves no KV:
only a length grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from operator import itemgetter

import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.models.packing import Chunk, pack_chains_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.state import Row
from yggdrasil.step.accept import Accepted, walk_sampling
from yggdrasil.step.platt import PlattScale
from yggdrasil.step.sampling import next_tokens

__all__ = [
    "Chain",
    "accept_rows",
    "catch_up_rows_",
    "commit_row_",
    "draft_rows",
    "prune_rows",
    "run_chunks",
    "verify_rows",
]

MOST_WIDEST_FORWARDS = 3  # up to 3 replays of the draft's widest graph cost less than its prompt chunk


@dataclass
class Chain:
    """The draft tokens of one row.

    Attributes:
        tokens: Draft tokens, each the successor of the one before.
        log_probs: Path log-probability of each, edges scaled; never rising.
        num_run: How many tokens, from the root on, have KV in the draft's storage.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_run: int = 0


def run_chunks(
    model: TokenGraphs, chunks: Sequence[Chunk], limit: int
) -> Iterator[tuple[Sequence[Chunk], tuple[Tensor, Tensor]]]:
    """Run chunks in forwards of at most `limit` tokens; a chunk that does not fit is split.

    Yields:
        The chunks of a forward, and its outputs. Aliasing: on CUDA overwritten by the next replay.
    """
    batch: list[Chunk] = []
    room = limit
    for chunk in chunks:
        start = 0
        while start < len(chunk.tokens):
            part = chunk.part(start, room)
            batch.append(part)
            start += len(part.tokens)
            room -= len(part.tokens)
            if room == 0:
                yield batch, _forward(model, batch)
                batch = []
                room = limit
    if batch:
        yield batch, _forward(model, batch)


def _forward(model: TokenGraphs, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    meta_NM = model.meta(sum(len(chunk.tokens) for chunk in chunks))
    pack_chains_(meta_NM, chunks)
    return model.forward(meta_NM)


def _limit(model: TokenGraphs, num_tokens: int) -> int:
    """Size of the draft's graph for this many tokens: its widest one or the prompt chunk's."""
    return model.widest if num_tokens <= MOST_WIDEST_FORWARDS * model.widest else model.prefill_chunk


def catch_up_rows_(model: TokenGraphs, rows: Sequence[Row]) -> None:
    """Complete the draft's KV up to every row's root: after a prompt, or after steps without speculation.

    A lag of one token is left to the head draft.

    Source: Nightjar section 4.2, "Prefill Cost Modeling".
    """
    lagging = [row for row in rows if row.lag > 1]
    chunks = [
        Chunk(row.row, row.state.tokens[row.draft_len : row.state.root_pos], row.draft_len, 0)
        for row in lagging
    ]
    for _ in run_chunks(model, chunks, _limit(model, sum(len(chunk.tokens) for chunk in chunks))):
        pass
    for row in lagging:
        row.draft_len = row.state.root_pos


def draft_rows(
    model: TokenGraphs, rows: Sequence[Row], gammas: Sequence[int], platts: Sequence[PlattScale]
) -> list[Chain]:
    """A chain under every row's root.

    Args:
        model: The draft, with at most one lagging token a row; KV after the roots is provisional.
        gammas: Draft tokens for each row; 0 runs no model.
        platts: Scale of the draft's probabilities for each row.

    Returns:
        A chain of `gammas[i]` tokens for every row.

    Cost: max(gammas) forwards of a token a row, each with a sync: its token is the next forward's input.
    Source: Nightjar section 4.1: gamma draft tokens a row.
    """
    chains = [Chain(num_run=gamma) for gamma in gammas]
    live = [(row, chain) for row, chain in zip(rows, chains, strict=True) if chain.num_run]
    chunks = [Chunk(row.row, row.state.tokens[row.draft_len :], row.draft_len, 1) for row, _ in live]
    depth = 0
    while live:
        for (_, chain), (token, log_prob) in zip(live, _best_next(model, chunks), strict=True):
            chain.tokens.append(token)
            chain.log_probs.append(log_prob)
        depth += 1
        live = [(row, chain) for row, chain in live if chain.num_run > depth]
        chunks = [Chunk(row.row, chain.tokens[-1:], row.state.root_pos + depth) for row, chain in live]
    _scale_paths_(chains, platts)
    return chains


def _scale_paths_(chains: Sequence[Chain], platts: Sequence[PlattScale]) -> None:
    """Turn log-probabilities of edges into scaled ones of paths; rows with the same scale in one call."""
    for platt, group in groupby(zip(platts, chains, strict=True), key=itemgetter(0)):
        same_scale = [chain for _, chain in group]
        edges = [edge for chain in same_scale for edge in chain.log_probs]
        scaled_edges = iter(platt.logs(torch.tensor(edges, dtype=torch.float64)).tolist())
        for chain in same_scale:
            chain.log_probs = list(accumulate(islice(scaled_edges, len(chain.log_probs))))


def _best_next(model: TokenGraphs, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
    """The most likely next token after every chunk, and its log-probability."""
    best = {}
    limit = _limit(model, sum(len(chunk.tokens) for chunk in chunks))
    for batch, (tokens_NC, log_probs_NC) in run_chunks(model, chunks, limit):
        tokens = tokens_NC[:, 0].tolist()  # sync: the next forward's input
        log_probs = log_probs_NC[:, 0].tolist()  # sync: it has come with the tokens
        last = -1
        for chunk in batch:
            last += len(chunk.tokens)
            # a later part of a split chunk replaces the entry of an earlier one
            best[chunk.row] = (tokens[last], log_probs[last])
    return [best[chunk.row] for chunk in chunks]


def prune_rows(chains: Sequence[Chain], most: int) -> None:
    """Keep the `most` most likely draft tokens of the whole batch.

    A chain keeps a prefix, because path log-probabilities never rise.

    Source: TETRIS, as Nightjar section 6.1 describes it.
    """
    if sum(len(chain.tokens) for chain in chains) <= most:
        return
    if most == 0:
        kept = [0] * len(chains)
    else:
        log_probs = sorted((log_prob for chain in chains for log_prob in chain.log_probs), reverse=True)
        least = log_probs[most - 1]
        kept = [sum(log_prob > least for log_prob in chain.log_probs) for chain in chains]
        equal = sorted(
            (depth, index)
            for index, chain in enumerate(chains)
            for depth, log_prob in enumerate(chain.log_probs)
            if log_prob == least
        )
        # among equals, those nearest to their roots
        for _, index in equal[: most - sum(kept)]:
            kept[index] += 1
    for chain, count in zip(chains, kept, strict=True):
        del chain.tokens[count:], chain.log_probs[count:]


def verify_rows(
    model: TokenGraphs, rows: Sequence[Row], chains: Sequence[Chain], prompts: Sequence[Chunk]
) -> tuple[Tensor, list[int]]:
    """One forward of the target over every row's root and chain, and over parts of other rows' prompts.

    Args:
        model: The target; KV after the roots is provisional.
        rows: The rows that emit. Tokens before a row's root that the target lacks (the end of a prompt) run
            in the same forward.
        prompts: Tokens of rows whose root this forward does not reach; their logits are not used.

    Returns:
        (N, V) logits, defined for roots and chains, and the index among the N of each row's root; its chain
        follows it.

    Raises:
        ShapeNotCompiled: more tokens than the menu's largest graph.

    Cost: one graph. Aliasing: on CUDA overwritten by the next replay.
    """
    chunks = [
        Chunk(
            row.row,
            [*row.state.tokens[row.target_len :], *chain.tokens],
            row.target_len,
            1 + len(chain.tokens),
        )
        for row, chain in zip(rows, chains, strict=True)
    ]
    ends = accumulate(len(chunk.tokens) for chunk in chunks)
    roots = [end - len(chain.tokens) - 1 for end, chain in zip(ends, chains, strict=True)]
    return _forward(model, [*chunks, *prompts])[0], roots


def accept_rows(
    rows: Sequence[Row], chains: Sequence[Chain], logits_NV: Tensor, roots: Sequence[int]
) -> list[Accepted | YggError]:
    """Apply the acceptance law to each row; a row whose logits are not finite gets an error instead.

    Args:
        logits_NV: Result of `verify_rows`.
        roots: Result of `verify_rows`.

    Cost: one sync if all rows are greedy, else one a row. A CPU samples only along the accepted paths.
    """
    if all(row.state.sampling.temperature == 0 for row in rows):
        last = roots[-1] + 1 + len(chains[-1].tokens)
        try:
            tokens = next_tokens(logits_NV[:last], (), rows[0].state.sampling)
        except YggError:
            pass  # some row is broken: the loop over rows below finds which
        else:
            return [_follow(chain, tokens[root:]) for chain, root in zip(chains, roots, strict=True)]
    return [
        _accept(row, chain, logits_NV[root : root + 1 + len(chain.tokens)])
        for row, chain, root in zip(rows, chains, roots, strict=True)
    ]


def _accept(row: Row, chain: Chain, logits_KV: Tensor) -> Accepted | YggError:
    root_pos = row.state.root_pos
    sampling = row.state.sampling
    try:
        if logits_KV.is_cpu and sampling.temperature > 0:
            child_of = {(node, token): node + 1 for node, token in enumerate(chain.tokens)}
            return walk_sampling(child_of, logits_KV, root_pos, sampling)
        positions = range(root_pos + 1, root_pos + 2 + len(chain.tokens))
        return _follow(chain, next_tokens(logits_KV, positions, sampling))
    except YggError as error:
        return error


def _follow(chain: Chain, target_tokens: Sequence[int]) -> Accepted:
    rejected = (place for place, token in enumerate(chain.tokens) if token != target_tokens[place])
    kept = next(rejected, len(chain.tokens))
    return Accepted(list(range(kept + 1)), list(target_tokens[: kept + 1]))


def commit_row_(row: Row, chain: Chain, accepted: Accepted) -> None:
    """Add the accepted tokens to the text; their KV is already in place, so only lengths grow."""
    root_pos = row.state.root_pos
    row.target_len = root_pos + len(accepted.path)
    if chain.num_run:
        row.draft_len = root_pos + min(len(accepted.path), chain.num_run)
    row.state.tokens.extend(accepted.tokens)
