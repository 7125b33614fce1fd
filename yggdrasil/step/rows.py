"""The step over a batch: every row drafts a chain of its own, all rows share each forward.

The stages are those of a single request and so are the words: draft, prune, verify, accept, commit. A chain
is consecutive tokens of its row, so guesses are packed like a prompt and keeping the accepted ones moves no
KV: a length grows, or does not."""

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
    "run_pieces",
    "verify_rows",
]

WIDE_PIECES = 3  # so many of the draft's widest graph cost less than its prompt chunk


@dataclass
class Chain:
    """What the draft guesses for one row.

    Attributes:
        tokens: Draft tokens, one after another.
        log_probs: Path log-probability of each, its edges scaled: never rising.
        num_run: Tokens from the root on with KV in the draft's storage.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_run: int = 0


def run_pieces(
    model: TokenGraphs, chunks: Sequence[Chunk], limit: int
) -> Iterator[tuple[Sequence[Chunk], tuple[Tensor, Tensor]]]:
    """Run chunks in forwards of at most `limit` tokens, splitting what does not fit.

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
    """The graph for many tokens of a draft: no graph lies between its widest and the prompt chunk."""
    return model.widest if num_tokens <= WIDE_PIECES * model.widest else model.prefill_chunk


def catch_up_rows_(model: TokenGraphs, rows: Sequence[Row]) -> None:
    """Bring the draft's KV up to every row's root: after a prompt, or after steps without speculation.

    A lag of one token is left: the head draft takes it along.

    Source: Nightjar section 4.2, "Prefill Cost Modeling".
    """
    lagging = [row for row in rows if row.lag > 1]
    chunks = [
        Chunk(row.row, row.state.tokens[row.draft_len : row.state.root_pos], row.draft_len, 0)
        for row in lagging
    ]
    for _ in run_pieces(model, chunks, _limit(model, sum(len(chunk.tokens) for chunk in chunks))):
        pass
    for row in lagging:
        row.draft_len = row.state.root_pos


def draft_rows(
    model: TokenGraphs, rows: Sequence[Row], gammas: Sequence[int], platts: Sequence[PlattScale]
) -> list[Chain]:
    """A chain under every row's root.

    Args:
        model: The draft, caught up; what it writes after the roots is provisional.
        rows: The batch.
        gammas: Draft tokens wanted of each; 0 touches no model.
        platts: What the draft's probabilities are worth in each.

    Returns:
        A chain of `gammas[i]` tokens for every row.

    Cost: max(gammas) forwards of a token a row, each with a sync: the guess is the next forward's input.
    Source: Nightjar section 4.1: gamma draft tokens a row.
    """
    chains = [Chain(num_run=gamma) for gamma in gammas]
    live = [(row, chain) for row, chain in zip(rows, chains, strict=True) if chain.num_run]
    chunks = [Chunk(row.row, row.state.tokens[row.draft_len :], row.draft_len, 1) for row, _ in live]
    depth = 0
    while live:
        for (_, chain), (token, log_prob) in zip(live, _guesses(model, chunks), strict=True):
            chain.tokens.append(token)
            chain.log_probs.append(log_prob)
        depth += 1
        live = [(row, chain) for row, chain in live if chain.num_run > depth]
        chunks = [Chunk(row.row, chain.tokens[-1:], row.state.root_pos + depth) for row, chain in live]
    _scale_paths_(chains, platts)
    return chains


def _scale_paths_(chains: Sequence[Chain], platts: Sequence[PlattScale]) -> None:
    """From what the draft says of each token to path log-probabilities, edges scaled; neighbours of one
    scale in one call.
    """
    for platt, group in groupby(zip(platts, chains, strict=True), key=itemgetter(0)):
        of_scale = [chain for _, chain in group]
        edges = iter(
            platt.logs(
                torch.tensor([edge for chain in of_scale for edge in chain.log_probs], dtype=torch.float64)
            ).tolist()
        )
        for chain in of_scale:
            chain.log_probs = list(accumulate(islice(edges, len(chain.log_probs))))


def _guesses(model: TokenGraphs, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
    """The likeliest next token after every chunk and its log-probability."""
    guesses = {}
    for batch, (tokens_NC, log_probs_NC) in run_pieces(
        model, chunks, _limit(model, sum(len(chunk.tokens) for chunk in chunks))
    ):
        # sync: the next forward's input; the second copy waits for nothing more
        tokens = tokens_NC[:, 0].tolist()
        log_probs = log_probs_NC[:, 0].tolist()
        last = -1
        for chunk in batch:
            last += len(chunk.tokens)
            # of a chunk that was split, the last part's stays
            guesses[chunk.row] = tokens[last], log_probs[last]
    return [guesses[chunk.row] for chunk in chunks]


def prune_rows(chains: Sequence[Chain], most: int) -> None:
    """Keep the `most` likeliest draft tokens of the whole batch; a chain keeps a prefix, for path
    log-probabilities never rise.

    Source: TETRIS, as Nightjar section 6.1 describes it.
    """
    if sum(len(chain.tokens) for chain in chains) <= most:
        return
    if most == 0:
        kept = [0] * len(chains)
    else:
        least = sorted((log_prob for chain in chains for log_prob in chain.log_probs), reverse=True)[
            most - 1
        ]
        kept = [sum(log_prob > least for log_prob in chain.log_probs) for chain in chains]
        equal = sorted(
            (depth, index)
            for index, chain in enumerate(chains)
            for depth, log_prob in enumerate(chain.log_probs)
            if log_prob == least
        )
        for _, index in equal[: most - sum(kept)]:  # those nearest to their roots
            kept[index] += 1
    for chain, count in zip(chains, kept, strict=True):
        del chain.tokens[count:], chain.log_probs[count:]


def verify_rows(
    model: TokenGraphs, rows: Sequence[Row], chains: Sequence[Chain], prompts: Sequence[Chunk]
) -> tuple[Tensor, list[int]]:
    """One forward of the target over every row's root and chain, and over parts of prompts beside them.

    Args:
        model: The target; what it writes after the roots is provisional.
        rows: Those that emit. What of a row's text before its root the target lacks, the end of a prompt,
            runs in the same forward.
        chains: One a row.
        prompts: Tokens of rows whose root this forward does not reach; nobody reads their logits.

    Returns:
        (N, V) logits, defined for roots and chains, and where among the N each row's root stands; its chain
        follows.

    Raises:
        ShapeNotCompiled: more tokens than the menu's greatest graph.

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
    """The acceptance law for every row by itself; a row whose logits are not finite gets its error, the
    others their tokens.

    Args:
        rows: As they were verified.
        chains: As they were verified.
        logits_NV: Of the forward.
        roots: Where each row's root stands in it.

    Cost: one sync for a batch that decodes greedily, else one a row; on a CPU, sampling, what the walk down
    each chain needs."""
    if all(row.state.sampling.temperature == 0 for row in rows):
        try:
            said = next_tokens(
                logits_NV[: roots[-1] + 1 + len(chains[-1].tokens)], (), rows[0].state.sampling
            )
        except YggError:
            pass  # some row is broken: one by one tells which
        else:
            return [_follow(chain, said[root:]) for chain, root in zip(chains, roots, strict=True)]
    return [
        _accept(row, chain, logits_NV[root : root + 1 + len(chain.tokens)])
        for row, chain, root in zip(rows, chains, roots, strict=True)
    ]


def _accept(row: Row, chain: Chain, logits_KV: Tensor) -> Accepted | YggError:
    root_pos = row.state.root_pos
    sampling = row.state.sampling
    try:
        if logits_KV.is_cpu and sampling.temperature > 0:
            return walk_sampling(
                {(node, token): node + 1 for node, token in enumerate(chain.tokens)},
                logits_KV,
                root_pos,
                sampling,
            )
        return _follow(
            chain, next_tokens(logits_KV, range(root_pos + 1, root_pos + 2 + len(chain.tokens)), sampling)
        )
    except YggError as error:
        return error


def _follow(chain: Chain, said: Sequence[int]) -> Accepted:
    kept = next(
        (place for place, token in enumerate(chain.tokens) if token != said[place]), len(chain.tokens)
    )
    return Accepted(list(range(kept + 1)), list(said[: kept + 1]))


def commit_row_(row: Row, chain: Chain, accepted: Accepted) -> None:
    """Make the accepted tokens history: lengths grow over KV that lies where it belongs."""
    root_pos = row.state.root_pos
    row.target_len = root_pos + len(accepted.path)
    if chain.num_run:
        row.draft_len = root_pos + min(len(accepted.path), chain.num_run)
    row.state.tokens.extend(accepted.tokens)
