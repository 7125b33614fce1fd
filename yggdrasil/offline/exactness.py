"""Check that a token has the same bits in every graph, in a chain and in a tree.

If so, speculation writes what plain decoding writes, bit for bit.

Shapes: L = tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.models.proof import sibling_tree
from yggdrasil.models.protocol import TokenModel

__all__ = ["NUM_PLAIN", "inexact_widths"]

PREFIX_LEN = 40  # beyond two pages and one block of keys
PATH_LEN = 12
NUM_PLAIN = PREFIX_LEN + PATH_LEN  # tokens that are decoded without speculation, if the context has room


def inexact_widths(
    model: TokenModel, widths: tuple[int, ...], tick: Callable[[], None] = lambda: None
) -> tuple[int, ...]:
    """The graphs whose logits differ in any bit from those of plain decoding with the smallest graph.

    A text is decoded without speculation. Then its last tokens run through every graph as a chain, and as a
    path through a tree in which every node has a sibling.

    Args:
        model: A target; its cache is left empty.
        widths: Token counts of its graphs, ascending.
        tick: Called after every decoded token, at most `NUM_PLAIN` times, and after every width.

    Cost: about sixty forwards of the smallest graph, and two of each other graph.
    """
    model.cache.rollback_(0)
    prefix_len = min(PREFIX_LEN, model.cache.shape.capacity // 2)
    path_len = min(PATH_LEN, (model.cache.shape.capacity - prefix_len) // 2)  # every node has a sibling
    text = [(31 * place + 7) % 997 % _vocab(model, widths[0]) for place in range(prefix_len + path_len)]
    expected = []
    for token in text:
        expected.append(_chain(model, [token], widths[0])[0].clone())
        model.cache.commit_([0])
        tick()
    model.cache.rollback_(prefix_len)
    differing = []
    for width in widths:
        if not _agrees(model, text[prefix_len:], torch.stack(expected[prefix_len:]), width):
            differing.append(width)
        tick()
    model.cache.rollback_(0)
    return tuple(differing)


def _agrees(model: TokenModel, text: list[int], expected_LV: Tensor, width: int) -> bool:
    chain = text[:width]
    path_len = min(len(text), (width + 1) // 2, model.max_depth + 1)
    # a replay overwrites the previous outputs
    rows = _chain(model, chain, width)[: len(chain)].clone(), _path(model, text[:path_len], width)
    return all(torch.equal(each_LV, expected_LV[: len(each_LV)]) for each_LV in rows)


def _vocab(model: TokenModel, width: int) -> int:
    return _chain(model, [0], width).shape[1]


def _chain(model: TokenModel, tokens: list[int], width: int) -> Tensor:
    model.cache.reserve(len(tokens))
    meta_NM = model.meta(width)
    pack_chain_(meta_NM, tokens, model.cache.len)
    return model.forward(meta_NM)[0]


def _path(model: TokenModel, tokens: list[int], width: int) -> Tensor:
    """Logits of a path whose nodes have an earlier sibling, so that its KV is in every second slot."""
    tree, nodes = sibling_tree(tokens, max_depth=model.max_depth, device=model.device)
    model.cache.reserve(len(tree))
    meta_NM = model.meta(width)
    pack_nodes_(meta_NM, tree, 0, len(tree), model.cache.len)
    return model.forward(meta_NM)[0][nodes]
