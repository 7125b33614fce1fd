"""Verify: one forward of the target over the trees of all rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from yggdrasil.models.packing import Chunk, pack_chains_, pack_nodes_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.state import Row
from yggdrasil.step.growth import root_of
from yggdrasil.step.prune import Pruned

__all__ = ["undrafted", "verify_rows"]


def undrafted(model: TokenGraphs, rows: Sequence[Row]) -> list[Pruned]:
    """What rows without a draft verify: their root alone."""
    return [Pruned(root_of(model, row), [0], [0], 1.0) for row in rows]


def verify_rows(
    model: TokenGraphs, rows: Sequence[Row], pruned: Sequence[Pruned], prompts: Sequence[Chunk]
) -> tuple[Tensor, Tensor, list[int]]:
    """One forward of the target over every row's tree, and over parts of other rows' prompts.

    Args:
        model: The target; KV from the roots on is provisional.
        rows: The rows that emit. Tokens before a row's root that the target lacks (the end of a prompt) run
            in the same forward.
        pruned: The tree of each.
        prompts: Tokens of rows whose root this forward does not reach; their logits are not used.

    Returns:
        (N, V) logits, defined for the trees' nodes, (N, E) last hidden states, and the index among the N of
        each row's root; the other nodes of its tree follow it.

    Raises:
        ShapeNotCompiled: more tokens than the menu's largest graph.

    Cost: one graph. Aliasing: on CUDA overwritten by the next replay.
    """
    texts = [
        Chunk(row.row, row.state.tokens[row.target_len : row.state.root_pos], row.target_len, 0)
        for row in rows
    ]
    num_text = sum(len(chunk.tokens) for chunk in (*texts, *prompts))
    meta_NM = model.meta(num_text + sum(len(each.tree) for each in pruned))
    roots = []
    end = 0
    for row, text, each in zip(rows, texts, pruned, strict=True):
        root = end + len(text.tokens)
        if text.tokens:
            pack_chains_(meta_NM[end:root], [text])
        end = root + len(each.tree)
        pack_nodes_(meta_NM[root:end], each.tree, 0, len(each.tree), row.state.root_pos, row=row.row)
        roots.append(root)
    pack_chains_(meta_NM[end:], prompts)
    logits_NV, hidden_NE = model.forward(meta_NM)
    return logits_NV, hidden_NE, roots
