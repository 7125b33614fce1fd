"""Triton body of `ygg::attend` for CUDA: one program a token and KV head, keys in position order in blocks of 16.

A block covers sixteen consecutive places of a token's sequence, prefix and path alike, so plain decoding and a tree add in
the same order. On CUDA the two kernels are one operator, `ygg::attend_cuda`, that the compiler sees through and packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from yggdrasil.layout import INDEX, PAGE_LEN, PATH, PREFIX, ROW

__all__ = ["attend_kernel", "launch", "register", "store_kernel"]


@triton.jit
def _slot(pages, row, index, pages_per_row, mask, PAGE: tl.constexpr):
    page = tl.load(pages + row * pages_per_row + index // PAGE, mask=mask, other=0)
    return (page * PAGE + index % PAGE).to(tl.int64)


@triton.jit
def store_kernel(
    key, value, key_cache, value_cache, meta, pages, fresh_head_stride, fresh_token_stride, num_slots, meta_width, pages_per_row,
    ROW_COLUMN: tl.constexpr, INDEX_COLUMN: tl.constexpr, PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Key and value of token `program_id(0)`, head `program_id(1)`, into the cache; padding (index -1) is not stored."""
    n, g = tl.program_id(0), tl.program_id(1)
    fields = meta + n * meta_width
    index = tl.load(fields + INDEX_COLUMN)
    row = tl.load(fields + ROW_COLUMN)
    slot = _slot(pages, row, tl.maximum(index, 0), pages_per_row, index >= 0, PAGE)
    f = tl.arange(0, BLOCK_F)
    mask = f < tl.where(index >= 0, F, 0)
    source = g * fresh_head_stride + n * fresh_token_stride + f
    place = (g * num_slots + slot) * F + f
    tl.store(key_cache + place, tl.load(key + source, mask=mask, other=0.0), mask=mask)
    tl.store(value_cache + place, tl.load(value + source, mask=mask, other=0.0), mask=mask)


@triton.jit
def attend_kernel(
    query, key_cache, value_cache, meta, pages, out, scale, query_head_stride, query_token_stride, num_heads, num_slots, meta_width, pages_per_row,
    ROW_COLUMN: tl.constexpr, PREFIX_COLUMN: tl.constexpr, PATH_COLUMN: tl.constexpr, PATH_WIDTH: tl.constexpr, BLOCK_PATH: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Attention of token `program_id(0)` for the query heads of KV head `program_id(1)`, by online softmax over blocks of 16 places."""
    n, g = tl.program_id(0), tl.program_id(1)
    fields = meta + n * meta_width
    row = tl.load(fields + ROW_COLUMN)
    prefix = tl.load(fields + PREFIX_COLUMN)
    steps = tl.arange(0, BLOCK_PATH)
    path = tl.load(fields + PATH_COLUMN + steps, mask=steps < PATH_WIDTH, other=-1)
    length = prefix + tl.sum((path >= 0).to(tl.int32), axis=0)
    head, f, lane = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_F), tl.arange(0, PAGE)
    real = (head[:, None] < GROUP) & (f[None, :] < F)
    query_HF = tl.load(query + (g * GROUP + head[:, None]) * query_head_stride + n * query_token_stride + f[None, :], mask=real, other=0.0).to(tl.float32)
    highest_H = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total_H = tl.zeros((BLOCK_GROUP,), tl.float32)
    sum_HF = tl.zeros((BLOCK_GROUP, BLOCK_F), tl.float32)
    for start in range(0, length, PAGE):
        place = start + lane
        seen = place < length
        step = tl.load(fields + PATH_COLUMN + place - prefix, mask=seen & (place >= prefix), other=0)
        index = tl.where(place < prefix, place, prefix + step)
        slot = _slot(pages, row, index, pages_per_row, seen, PAGE)
        source = (g * num_slots + slot[:, None]) * F + f[None, :]
        kept = seen[:, None] & (f[None, :] < F)
        key_LF = tl.load(key_cache + source, mask=kept, other=0.0).to(tl.float32)
        value_LF = tl.load(value_cache + source, mask=kept, other=0.0).to(tl.float32)
        score_HL = tl.sum(query_HF[:, None, :] * key_LF[None, :, :], axis=2) * scale
        score_HL = tl.where(seen[None, :], score_HL, float("-inf"))
        new_highest_H = tl.maximum(highest_H, tl.max(score_HL, axis=1))
        shrink_H = tl.exp(highest_H - new_highest_H)
        weight_HL = tl.exp(score_HL - new_highest_H[:, None])
        total_H = total_H * shrink_H + tl.sum(weight_HL, axis=1)
        sum_HF = sum_HF * shrink_H[:, None] + tl.sum(weight_HL[:, :, None] * value_LF[None, :, :], axis=1)
        highest_H = new_highest_H
    result = sum_HF / tl.where(total_H > 0, total_H, 1.0)[:, None]
    target = out + (n * num_heads + g * GROUP + head[:, None]) * F + f[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: Tensor,
    pages: Tensor,
    scale: float,
    *,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """Store, then attend; arguments and result are those of `attention.reference`. `wrap` lets the compiler see the kernels.

    Cost: two kernels, no sync. The live context is read on the device.
    """
    _, num_heads, num_tokens, dim = query.shape
    num_kv_heads, group = key.shape[1], num_heads // key.shape[1]
    key, value = key.contiguous(), value.contiguous()  # one stride for both
    out = query.new_empty(1, num_tokens, num_heads, dim)
    path_width = meta.shape[1] - PATH
    shared = {"ROW_COLUMN": ROW, "PAGE": PAGE_LEN, "F": dim, "BLOCK_F": triton.next_power_of_2(dim)}
    wrap(store_kernel)[(num_tokens, num_kv_heads)](
        key, value, key_cache, value_cache, meta, pages, key.stride(1), key.stride(2), key_cache.shape[1], meta.shape[1], pages.shape[1],
        INDEX_COLUMN=INDEX, **shared,
    )  # fmt: skip
    wrap(attend_kernel)[(num_tokens, num_kv_heads)](
        query, key_cache, value_cache, meta, pages, out, scale, query.stride(1), query.stride(2), num_heads, key_cache.shape[1], meta.shape[1], pages.shape[1],
        PREFIX_COLUMN=PREFIX, PATH_COLUMN=PATH, PATH_WIDTH=path_width, BLOCK_PATH=triton.next_power_of_2(path_width),
        GROUP=group, BLOCK_GROUP=triton.next_power_of_2(group), **shared,
    )  # fmt: skip
    return out


def register() -> None:
    """Define `ygg::attend_cuda`, through which the compiler sees the kernels; once, before a graph is built for CUDA."""

    @torch.library.triton_op("ygg::attend_cuda", mutates_args={"key_cache", "value_cache"})
    def _(query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: Tensor, pages: Tensor, scale: float) -> Tensor:
        return launch(query, key, value, key_cache, value_cache, meta, pages, scale, wrap=torch.library.wrap_triton)
