"""Grow the trees of many rows together: each forward runs the newest nodes of several trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.layout import READ_BEST
from yggdrasil.models.packing import empty_meta, pack_nodes_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.step.coupling import read_of
from yggdrasil.step.growth import Frontier
from yggdrasil.step.platt import PlattScale
from yggdrasil.tree import TokenTree

__all__ = ["Seed", "coupled_on_host", "grow_forest", "grow_fused_", "grow_reference_"]


def grow_reference_(
    frontier: Frontier,
    tree: TokenTree,
    tokens_WC: Tensor,
    log_probs_WC: Tensor,
    width: int,
    meta_NM: Tensor,
    root_pos: int,
    *,
    row: int = 0,
    read: int = READ_BEST,
) -> None:
    """One growth step, operator by operator: the specification of `ygg::grow_`; on CUDA this runs.

    Args:
        frontier: The children of the nodes that just ran are added; the attached ones are removed.
        tree: `width` nodes are attached.
        tokens_WC: Candidates of the nodes that just ran.
        meta_NM: Filled for a forward over the new nodes.

    Raises:
        RuntimeError: fewer candidates than `width`, or a path longer than the tree allows; then the tree's
            length is unchanged.

    Cost: about two dozen small operators; no sync.
    """
    frontier.add(tokens_WC, log_probs_WC, tree.log_prob_N[frontier.len :])
    first = len(tree)
    tree.grow(*frontier.take(width))
    pack_nodes_(meta_NM, tree, first, len(tree), root_pos, row=row, read=read)


def grow_fused_(
    frontier: Frontier,
    tree: TokenTree,
    tokens_WC: Tensor,
    log_probs_WC: Tensor,
    width: int,
    meta_NM: Tensor,
    root_pos: int,
    *,
    row: int = 0,
    read: int = READ_BEST,
) -> None:
    """`grow_reference_` in one host call, for a CPU: a dozen operators cost more than a forward."""
    known = frontier.len
    num_new = len(tree) - frontier.len
    with tree.growing(width) as (first, token, parent, depth, log_prob, path):
        torch.ops.ygg.grow_(
            frontier.log_prob_NC,
            frontier.token_NC,
            log_probs_WC,
            tokens_WC,
            known,
            num_new,
            token,
            parent,
            depth,
            log_prob,
            path,
            first,
            width,
            meta_NM,
            root_pos,
            row,
            read,
            frontier.platt.slope,
            frontier.platt.offset,
        )
    frontier.len += num_new


@dataclass(frozen=True)
class Seed:
    """A tree to be grown to its full depth.

    Args:
        row: Row of the page table that holds the draft's KV of the text up to the root.
        root: The last token of the text.
        tokens_1C: The candidates after the root; for sampled text coupled.
        platt: Scale of the draft's probabilities.
        sampling: Of the text.
    """

    row: int
    root: int
    root_pos: int
    width: int
    depth: int
    tokens_1C: Tensor
    log_probs_1C: Tensor
    platt: PlattScale
    sampling: SamplingConfig


class _Growing:
    """A tree that is being grown, and the seeds that its row grows after it."""

    def __init__(self, model: TokenGraphs, seed: Seed, later: Iterator[Seed]) -> None:
        num_nodes = 1 + seed.width * seed.depth
        # in a chain only the best child, as in `draft_rows`
        num_candidates = 1 if seed.width == 1 else model.num_candidates
        self.seed = seed
        self.later = later
        self.tree = TokenTree.root(seed.root, num_nodes, max_depth=model.max_depth, device=model.device)
        # candidates of the nodes that ran last
        self.candidates = (seed.tokens_1C, seed.log_probs_1C)
        self._frontier = Frontier(num_nodes, num_candidates, model.device, seed.platt)
        self._read = read_of(seed.sampling)
        self._grow_ = grow_fused_ if model.device == "cpu" else grow_reference_

    @property
    def wants_forward(self) -> bool:
        """Whether the next step's nodes will run: those of the last step are leaves and do not."""
        return len(self.tree) + self.seed.width < 1 + self.seed.width * self.seed.depth

    def grow_(self, meta_WM: Tensor) -> None:
        """Attach W nodes and write the metadata of their forward."""
        seed = self.seed
        self._grow_(
            self._frontier,
            self.tree,
            *self.candidates,
            seed.width,
            meta_WM,
            seed.root_pos,
            row=seed.row,
            read=self._read,
        )

    def record_forward_(self, tokens_WM: Tensor, log_probs_WM: Tensor) -> None:
        """The last W nodes have run. No sync for greedy text."""
        if self.seed.sampling.temperature == 0:
            self.candidates = tokens_WM, log_probs_WM
            return
        depths = self.tree.depth_N[-len(tokens_WM) :].tolist()  # sync: noise is drawn on the host
        positions = [self.seed.root_pos + 1 + depth for depth in depths]
        count = self._frontier.token_NC.shape[1]
        self.candidates = coupled_on_host(tokens_WM, log_probs_WM, positions, self.seed.sampling, count)


def coupled_on_host(
    tokens_NM: Tensor, log_probs_NM: Tensor, positions: Sequence[int], sampling: SamplingConfig, count: int
) -> tuple[Tensor, Tensor]:
    """`coupled` of step/coupling.py for positions far apart; at temperature 0 the candidates as they are.

    Args:
        positions: N positions, of each row's candidates.

    Cost: draws noise for these tokens alone. A sync on a device.
    """
    if sampling.temperature == 0:
        return tokens_NM, log_probs_NM
    log_probs_NC, tokens_NC = torch.ops.ygg.coupled(
        log_probs_NM.cpu().contiguous(),
        tokens_NM.cpu().contiguous(),
        positions,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        count,
    )
    return tokens_NC.to(tokens_NM.device), log_probs_NC.to(tokens_NM.device)


def grow_forest(model: TokenGraphs, rows: Iterable[Iterable[Seed]]) -> Iterator[tuple[Seed, TokenTree]]:
    """Grow the trees of many rows; each tree equals the one that `draft_rows` gives for its row alone.

    Args:
        model: The draft, over pages of its rows. A tree's KV after its root is provisional and overwrites
            the text there.
        rows: The seeds of every row. A row grows one tree at a time, so its roots must come in descending
            order of position.

    Yields:
        Each seed with its tree, as soon as it is finished.

    Cost: D - 1 forwards of W nodes a tree, packed into forwards of up to `model.prefill_chunk` tokens. No
    sync for greedy text; for sampled text each tree waits once a forward.
    """
    waiting = deque[_Growing]()
    for seeds in rows:
        yield from _next_of_row(model, iter(seeds), waiting)
    while waiting:
        batch = _next_batch(waiting, model.prefill_chunk)
        _forward_(model, batch)
        for growing in batch:
            if growing.wants_forward:
                waiting.append(growing)
            else:
                yield _finished(model, growing)
                yield from _next_of_row(model, growing.later, waiting)


def _next_of_row(
    model: TokenGraphs, seeds: Iterator[Seed], waiting: deque[_Growing]
) -> Iterator[tuple[Seed, TokenTree]]:
    """Queue a row's next tree that needs a forward; trees of depth one are finished at once."""
    for seed in seeds:
        growing = _Growing(model, seed, seeds)
        if growing.wants_forward:
            waiting.append(growing)
            return
        yield _finished(model, growing)


def _next_batch(waiting: deque[_Growing], limit: int) -> list[_Growing]:
    """Take trees from the left until one forward of `limit` tokens is full."""
    batch = [waiting.popleft()]
    room = limit - batch[0].seed.width
    while waiting and waiting[0].seed.width <= room:
        batch.append(waiting.popleft())
        room -= batch[-1].seed.width
    return batch


def _forward_(model: TokenGraphs, batch: Sequence[_Growing]) -> None:
    """Grow every tree by one step and run all new nodes."""
    widths = [growing.seed.width for growing in batch]
    num_tokens = sum(widths)
    meta_NM = model.meta(num_tokens)
    meta_NM[num_tokens:] = empty_meta(len(meta_NM) - num_tokens, model.max_depth, device=model.device)
    for growing, meta_WM in zip(batch, torch.split(meta_NM[:num_tokens], widths), strict=True):
        growing.grow_(meta_WM)
    # on CUDA the next replay overwrites the outputs
    parts = [torch.split(output[:num_tokens].clone(), widths) for output in model.forward(meta_NM)]
    for growing, *candidates in zip(batch, *parts, strict=True):
        growing.record_forward_(*candidates)


def _finished(model: TokenGraphs, growing: _Growing) -> tuple[Seed, TokenTree]:
    growing.grow_(empty_meta(growing.seed.width, model.max_depth, device=model.device))
    return growing.seed, growing.tree
