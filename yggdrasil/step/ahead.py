"""Stages that may run ahead of time, before it is known whether their results are needed; see step/plan.py.

Shapes: M = candidates of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.staging import upload
from yggdrasil.state import Row
from yggdrasil.step.growth import RowDraft, Span, run_nodes
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.tree import TokenTree

__all__ = ["Verified", "draft_heads", "draw_ahead", "run_tails"]


def draw_ahead(rows: Sequence[Row], drafts: Sequence[RowDraft], vocab: int, device: str) -> None:
    """Draw the noise of every position that a sampled row's tree reaches, or its next one of that depth.

    `gumbel_noise` keeps it. The draft has drawn most of this tree's, so the next draft finds its own.
    """
    for row, drafted in zip(rows, drafts, strict=True):
        state = row.state
        if state.sampling.temperature > 0 and drafted.num_run:
            for position in range(state.root_pos + 1, state.root_pos + 2 * drafted.shape.depth + 3):
                gumbel_noise(state.sampling.seed, position, vocab, device)


def run_tails(model: TokenGraphs, rows: Sequence[Row], drafts: Sequence[RowDraft]) -> list[RowDraft]:
    """Run the draft over the leaves of each tree's last growth step.

    Returns:
        The drafts, with KV of all nodes.

    Source: Yggdrasil section 5.1, "tail draft".
    """
    spans = [
        Span(row, drafted.tree, drafted.num_run, len(drafted.tree))
        for row, drafted in zip(rows, drafts, strict=True)
        if drafted.num_run
    ]
    for _ in run_nodes(model, spans):
        pass
    return [replace(drafted, num_run=drafted.num_run and len(drafted.tree)) for drafted in drafts]


class Verified(NamedTuple):
    """A row, its drafted tree, the verified nodes of it, and the target's token after each, (K,)."""

    row: Row
    tree: TokenTree
    nodes: Sequence[int]
    token_K: Tensor


def draft_heads(model: TokenGraphs, rows: Sequence[Verified]) -> list[tuple[Tensor, Tensor]]:
    """Run the draft over the target's token after every verified node; one of them is the next root.

    Args:
        rows: Each tree has room for a node under every verified one; all its nodes have run.

    Returns:
        For every row the candidates after those tokens and their log-probabilities, (K, M) each.

    Source: Yggdrasil section 5.1, "head draft" ahead of time.
    """
    spans = []
    for row, drafted, nodes, token_K in rows:
        # the same arrays but another length: nothing else may see these nodes
        tree = copy(drafted)
        parents_K = upload(nodes, token_K.device)
        tree.grow(parents_K, token_K, tree.log_prob_N[parents_K])
        spans.append(Span(row, tree, len(drafted), len(tree)))
    outputs: dict[int, list[tuple[Tensor, Tensor]]] = {id(span.tree): [] for span in spans}
    for span, tokens_KM, log_probs_KM in run_nodes(model, spans):
        # on CUDA the next replay overwrites the outputs
        outputs[id(span.tree)].append((tokens_KM.clone(), log_probs_KM.clone()))
    heads = []
    for span in spans:
        tokens, log_probs = zip(*outputs[id(span.tree)], strict=True)
        heads.append((torch.cat(tokens), torch.cat(log_probs)))
    return heads
