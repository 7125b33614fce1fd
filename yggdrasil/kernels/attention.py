"""`ygg::attend`: store fresh keys and values, then attend to a prefix and a path in position order.

Shapes: H = query heads, G = KV heads, F = features of a head, P = pages (in `pages_BP` of a row), S = slots
of a page, L = keys that a token sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yggdrasil.layout import INDEX, PAGE_LEN, PATH, PREFIX, ROW

__all__ = ["reference", "register"]


def reference(
    query_1HNF: Tensor,
    key_1GNF: Tensor,
    value_1GNF: Tensor,
    key_cache_PGSF: Tensor,
    value_cache_PGSF: Tensor,
    meta_NM: Tensor,
    pages_BP: Tensor,
    scale: float,
) -> Tensor:
    """Attention of N tokens over a paged cache: the specification of `ygg::attend`, one token at a time.

    Args:
        query_1HNF: Queries, (1, H, N, F), bfloat16 or float32.
        key_1GNF: Keys of the same tokens, (1, G, N, F); H is a multiple of G.
        value_1GNF: Their values, (1, G, N, F).
        key_cache_PGSF: Keys by page, (P, G, 16, F). Each page is contiguous, so the keys of one head lie
            together. Written at each token's INDEX. Here slot after slot; the operator on a CPU has pages
            in the order of page_order.py.
        value_cache_PGSF: Values by page, (P, G, 16, F), with the same strides; written likewise.
        meta_NM: One row of metadata per token, int32; see layout.py.
        pages_BP: The page of each 16 indices of a row, int32.
        scale: Factor on the scores.

    Returns:
        (1, N, H, F) in the query's dtype; zeros for padding. The operator rounds softmax numerators to the
        cache's dtype before it multiplies them with values, as flash attention does; here they stay fp32.

    Cost: N host loops and syncs; for tests.
    Aliasing: mutates both caches, aliases nothing.
    Source: Yggdrasil section 4.2 (attention mask of the tree's causal dependency), as index lists instead
    of a mask.
    """
    group = query_1HNF.shape[1] // key_1GNF.shape[1]
    out_1NHF = torch.zeros_like(query_1HNF.transpose(1, 2))

    def seen(cache_PGSF: Tensor, row: int, indices: list[int]) -> Tensor:
        pages = pages_BP[row, [index // PAGE_LEN for index in indices]].long()
        return (
            cache_PGSF[pages, :, [index % PAGE_LEN for index in indices]]
            .transpose(0, 1)
            .float()
            .repeat_interleave(group, dim=0)
        )

    tokens = meta_NM.tolist()
    for n, fields in enumerate(tokens):
        if fields[INDEX] >= 0:
            page = pages_BP[fields[ROW], fields[INDEX] // PAGE_LEN]
            place = fields[INDEX] % PAGE_LEN
            key_cache_PGSF[page, :, place] = key_1GNF[0, :, n]
            value_cache_PGSF[page, :, place] = value_1GNF[0, :, n]
    for n, fields in enumerate(tokens):
        path = [fields[PREFIX] + step for step in fields[PATH:] if step >= 0]
        indices = [*range(fields[PREFIX]), *path]
        if indices:
            key_HLF = seen(key_cache_PGSF, fields[ROW], indices)
            value_HLF = seen(value_cache_PGSF, fields[ROW], indices)
            weight_HL = torch.softmax(
                (key_HLF @ query_1HNF[0, :, n, :, None].float())[..., 0] * scale, dim=-1
            )
            out_1NHF[0, n] = (weight_HL[:, None] @ value_HLF)[:, 0].to(out_1NHF.dtype)
    return out_1NHF


def register() -> None:
    """Give the compiler the operator's output shape; call once, after the library is loaded."""

    def fake(query: Tensor, *_: object) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])

    torch.library.register_fake("ygg::attend", fake)
