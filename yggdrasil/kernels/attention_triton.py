"""Triton bodies of `ygg::attend` for CUDA, exact to the bit.

One pair of kernels serves plain decoding, trees, batches and prompt chunks. A token sees a flat sequence of
places, 0 .. len-1: indices 0 .. prefix-1 of its row, then its path. Its last places, at least as many as a
path can have, are its *tail*. Everything before is its *body*: whole blocks that hold only prefix, so there
place and index are equal and neighbours share keys.

```
place        0          block                                          body_len          len
             |-----------|-----------|- ... -|-----------|-----------|-|------------------|
             |   body: blocks of places, for several tokens            |  tail of one token
             |--------- split 0 ---------|--------- split 1 -----------|
lanes        0 .. GROUP-1 | GROUP .. 2 GROUP-1 | ...
tokens       n            | n+1                | ...
```

`body_kernel` runs one program per split: an online softmax over its blocks. The lanes are the tokens of one
row times the query heads of one KV head. A lane whose body ends before a block keeps its sums.
`tail_kernel` runs one program per token and KV head: it computes the tail as one block, gathered in the
order of the path, then adds split 0 + split 1 + ... + tail in that order.

Exactness: `body_len` is a function of `len` alone. Blocks, splits, the tail, their order and their
instructions are functions of a token's own places, and a lane takes part in a block with all of its places
or not at all. So a token's bits depend neither on its slots or pages, nor on its neighbours, nor on the
number of tokens, nor on whether a place came from the prefix or from the path. They do depend on the
`Config` and on the metadata's path width, which are the same in all graphs of a model; so no entry of the
menu depends on the number of tokens.

Departure: others often hold a tree's mask as bits over slots; here metadata lists a token's ancestors
(layout.py). A sum in position order needs the order of the path, which bits over slots would give only
after compaction. One matrix product sums the scores of one block, and the hardware orders its terms; that
order belongs to the place in the block. The tests marked `gpu` check that the rows of a product do not
depend on each other on a device.

Shapes: R = rows of a program (its lanes), J = places of a block, F = features of a head, S = splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import e, log2
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from yggdrasil.layout import INDEX, PAGE_LEN, PATH, PREFIX, ROW

__all__ = [
    "CANDIDATES",
    "CONFIGS",
    "Config",
    "body_kernel",
    "config_for",
    "launch",
    "register",
    "store_kernel",
    "tail_kernel",
    "tune",
]

LOG2_E: Final = log2(e)
TAIL_LANES: Final = 16  # the smallest number of rows of a matrix product
TAIL_WARPS: Final = 4
STORE_WARPS: Final = 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a body is divided and compiled: an entry of the menu.

    Args:
        lanes: Query rows of a program; a power of two from 16 on. Up to 32, every device multiplies them
            with the same instruction.
        block: Places multiplied at once; a power of two from 16 on.
        split: Places of a program; a multiple of `block`.
        num_warps: Warps of a program of the body.
        num_stages: Stages of its pipeline. Page numbers come first and take every other stage, so 3, 5 and
            7 keep one, two and three blocks in flight.

    Raises:
        ValueError: the kernels do not allow a size.
    """

    lanes: int
    block: int
    split: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, size in (("lanes", self.lanes), ("block", self.block)):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} of the attention kernel is {size}; allowed are 16, 32, 64, ...")
        if self.split % self.block or self.split <= 0:
            allowed = f"multiples of block, {self.block}"
            raise ValueError(f"split of the attention kernel is {self.split}; allowed are {allowed}")

    def num_splits(self, capacity: int, path_width: int) -> int:
        """Splits of the longest body in rows of `capacity` indices; at least one."""
        return max(1, int(triton.cdiv(max(0, capacity - path_width), self.split)))


CONFIGS: Final[Mapping[tuple[torch.dtype, int], Config]] = {
    (torch.bfloat16, 64): Config(lanes=16, block=32, split=128, num_warps=4, num_stages=5),
    (torch.bfloat16, 128): Config(lanes=16, block=32, split=128, num_warps=4, num_stages=5),
    (torch.bfloat16, 256): Config(lanes=16, block=32, split=128, num_warps=4, num_stages=3),
    (torch.float32, 64): Config(lanes=16, block=16, split=128, num_warps=4, num_stages=5),
    (torch.float32, 128): Config(lanes=16, block=16, split=128, num_warps=4, num_stages=3),
    (torch.float32, 256): Config(lanes=16, block=16, split=128, num_warps=4, num_stages=3),
}
"""The menu, by dtype and head dimension (rounded up to a power of two, at least 64).

A graph has its entry from the compilation on; nothing is searched at start. The entries were chosen from
the compiler's reports for sm_80 and sm_90 (registers, shared memory, no spills) and not measured, for lack
of a device. `bench/claim_kernels.py --tune` times the candidates on one.
"""

CANDIDATES: Final = (
    Config(lanes=16, block=16, split=128, num_warps=2, num_stages=5),
    Config(lanes=16, block=32, split=128, num_warps=2, num_stages=5),
    Config(lanes=16, block=32, split=128, num_warps=4, num_stages=3),
    Config(lanes=16, block=32, split=128, num_warps=4, num_stages=5),
    Config(lanes=16, block=32, split=128, num_warps=4, num_stages=7),
    Config(lanes=16, block=32, split=256, num_warps=4, num_stages=5),
    Config(lanes=16, block=64, split=128, num_warps=4, num_stages=3),
    Config(lanes=16, block=64, split=256, num_warps=4, num_stages=5),
    Config(lanes=32, block=32, split=128, num_warps=4, num_stages=5),
    Config(lanes=32, block=32, split=256, num_warps=4, num_stages=5),
    Config(lanes=32, block=64, split=256, num_warps=4, num_stages=3),
)
"""The entries that `tune` times."""


def config_for(dtype: torch.dtype, dim: int) -> Config:
    """The menu's entry for a dtype and head dimension.

    Raises:
        ValueError: there is none.
    """
    config = CONFIGS.get((dtype, max(64, triton.next_power_of_2(dim))))
    if config is None:
        raise ValueError(
            f"attention on CUDA: no kernel for head dimension {dim} in {dtype}; allowed are up to 256 in "
            "torch.bfloat16 or torch.float32"
        )
    return config


@triton.jit
def _body_len(length, PATH_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Places before the tail: whole blocks without any place that could belong to a path."""
    return tl.maximum(length - PATH_WIDTH, 0) // BLOCK * BLOCK


@triton.jit
def _address(page, index, page_stride, g, PAGE: tl.constexpr, F: tl.constexpr):
    """The offset of the key or value of an index in its cache, in 64 bits.

    All layers together have more elements than 32 bits can count. The caller loads the page: torch would
    take the page table for written if it went into a function whose result is the address of a store.
    """
    return page.to(tl.int64) * page_stride + (g * PAGE + index % PAGE) * F


@triton.jit
def _product(left, right, sums, INTERPRETED: tl.constexpr):
    """sums + left right, in fp32 and without TF32.

    Triton's interpreter cannot multiply bf16; fp32 holds the products of bf16 exactly.
    """
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc=sums, input_precision="ieee")
    else:
        return tl.dot(left, right, acc=sums, input_precision="ieee")


@triton.jit
def store_kernel(
    key, value, key_cache, value_cache, meta, pages,
    key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    page_stride, meta_width, pages_per_row,
    ROW_COLUMN: tl.constexpr, INDEX_COLUMN: tl.constexpr,
    PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Store key and value of token `program_id(0)`, head `program_id(1)`, but not those of padding."""
    n = tl.program_id(0)
    g = tl.program_id(1)
    fields = meta + n * meta_width
    index = tl.load(fields + INDEX_COLUMN)
    f = tl.arange(0, BLOCK_F)
    mask = f < tl.where(index >= 0, F, 0)
    page = tl.load(
        pages + tl.load(fields + ROW_COLUMN) * pages_per_row + index // PAGE, mask=index >= 0, other=0
    )
    at = _address(page, index, page_stride, g, PAGE, F) + f
    tl.store(
        key_cache + at,
        tl.load(key + g * key_head_stride + n * key_token_stride + f, mask=mask, other=0.0),
        mask=mask,
    )
    tl.store(
        value_cache + at,
        tl.load(value + g * value_head_stride + n * value_token_stride + f, mask=mask, other=0.0),
        mask=mask,
    )


@triton.jit
def body_kernel(
    query, key_cache, value_cache, meta, pages, sums, peaks, totals, scale,
    query_head_stride, query_token_stride, page_stride, num_tokens, num_heads, meta_width, pages_per_row,
    ROW_COLUMN: tl.constexpr, PREFIX_COLUMN: tl.constexpr, PATH_COLUMN: tl.constexpr,
    PATH_WIDTH: tl.constexpr, BLOCK_PATH: tl.constexpr,
    PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
    GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
    LANES: tl.constexpr, LANE_HEADS: tl.constexpr, TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Split `program_id(2)` of the bodies of neighbouring tokens of one row, for KV head `program_id(1)`.

    Tokens are divided into windows of TOKENS. `program_id(0)` is a token and, if its heads exceed the
    lanes, one of its HEAD_BLOCKS. The first token of a row in a window leads all tokens of that row in it;
    the programs of the others do nothing. The metadata shows which token leads, even for a single row: a
    graph is traced over a page table of one row and runs over tables of many.
    """
    g = tl.program_id(1)
    split = tl.program_id(2)
    lane = tl.arange(0, LANES)
    f = tl.arange(0, BLOCK_F)
    leader = tl.program_id(0) // HEAD_BLOCKS
    token_R = leader // TOKENS * TOKENS + lane // LANE_HEADS
    head_R = tl.program_id(0) % HEAD_BLOCKS * LANES + lane % LANE_HEADS
    row = tl.load(meta + leader * meta_width + ROW_COLUMN)
    in_window_R = (lane < TOKENS * LANE_HEADS) & (token_R < num_tokens) & (head_R < GROUP)
    is_led_R = in_window_R & (
        tl.load(meta + token_R * meta_width + ROW_COLUMN, mask=in_window_R, other=-1) == row
    )
    leads = tl.max((is_led_R & (token_R < leader)).to(tl.int32), axis=0) == 0

    steps = tl.arange(0, BLOCK_PATH)
    path_RA = tl.load(
        meta + token_R[:, None] * meta_width + PATH_COLUMN + steps[None, :],
        mask=is_led_R[:, None] & (steps < PATH_WIDTH)[None, :],
        other=-1,
    )
    prefix_R = tl.load(meta + token_R * meta_width + PREFIX_COLUMN, mask=is_led_R, other=0)
    end_R = _body_len(prefix_R + tl.sum((path_RA >= 0).to(tl.int32), axis=1), PATH_WIDTH, BLOCK)
    begin = split * SPLIT
    end = tl.minimum(tl.max(end_R, axis=0), begin + SPLIT)
    if leads & (begin < end):
        at_R = (g * GROUP + head_R) * query_head_stride + token_R * query_token_stride
        query_RF = tl.load(
            query + at_R[:, None] + f[None, :], mask=is_led_R[:, None] & (f < F)[None, :], other=0.0
        )
        highest_R = tl.full((LANES,), float("-inf"), tl.float32)
        total_R = tl.zeros((LANES,), tl.float32)
        sum_RF = tl.zeros((LANES, BLOCK_F), tl.float32)
        for start in range(begin, end, BLOCK):
            place_J = start + tl.arange(0, BLOCK)
            page_J = tl.load(pages + row * pages_per_row + place_J // PAGE)
            at_J = _address(page_J, place_J, page_stride, g, PAGE, F)
            key_JF = tl.load(key_cache + at_J[:, None] + f[None, :], mask=(f < F)[None, :], other=0.0)
            value_JF = tl.load(value_cache + at_J[:, None] + f[None, :], mask=(f < F)[None, :], other=0.0)
            score_RJ = (
                _product(query_RF, tl.trans(key_JF), tl.zeros((LANES, BLOCK), tl.float32), INTERPRETED)
                * scale
            )
            new_highest_R = tl.maximum(highest_R, tl.max(score_RJ, axis=1))
            shrink_R = tl.exp2(highest_R - new_highest_R)
            weight_RJ = tl.exp2(score_RJ - new_highest_R[:, None]).to(value_JF.dtype)
            new_total_R = tl.fma(total_R, shrink_R, tl.sum(weight_RJ.to(tl.float32), axis=1))
            new_sum_RF = _product(weight_RJ, value_JF, sum_RF * shrink_R[:, None], INTERPRETED)
            # whole blocks: a lane is all in or all out; when out, not even a neighbour's NaN reaches it
            is_body_R = start < end_R
            highest_R = tl.where(is_body_R, new_highest_R, highest_R)
            total_R = tl.where(is_body_R, new_total_R, total_R)
            sum_RF = tl.where(is_body_R[:, None], new_sum_RF, sum_RF)
        to_R = (split.to(tl.int64) * num_tokens + token_R) * num_heads + g * GROUP + head_R
        has_body_R = begin < end_R
        tl.store(peaks + to_R, highest_R, mask=has_body_R)
        tl.store(totals + to_R, total_R, mask=has_body_R)
        tl.store(sums + to_R[:, None] * F + f[None, :], sum_RF, mask=has_body_R[:, None] & (f < F)[None, :])


@triton.jit
def _add_splits(
    sums, peaks, totals, num_splits, split_stride, from_R, head_R, highest_R, f,
    GROUP: tl.constexpr, F: tl.constexpr, LANES: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """The totals and sums of a body's splits, one after another, scaled to the peak `highest_R`."""
    total_R = tl.zeros((LANES,), tl.float32)
    sum_RF = tl.zeros((LANES, BLOCK_F), tl.float32)
    for first in range(0, num_splits, 4):  # four at a time, so that their loads overlap
        for ahead in tl.static_range(4):
            is_live_R = head_R < tl.where(first + ahead < num_splits, GROUP, 0)
            split_R = (first + ahead) * split_stride + from_R
            share_R = tl.exp2(tl.load(peaks + split_R, mask=is_live_R, other=float("-inf")) - highest_R)
            total_R = tl.fma(tl.load(totals + split_R, mask=is_live_R, other=0.0), share_R, total_R)
            part_RF = tl.load(
                sums + split_R[:, None] * F + f[None, :],
                mask=is_live_R[:, None] & (f < F)[None, :],
                other=0.0,
            )
            sum_RF = tl.fma(part_RF, share_R[:, None], sum_RF)
    return total_R, sum_RF


@triton.jit
def tail_kernel(
    query, key_cache, value_cache, meta, pages, sums, peaks, totals, out, scale,
    query_head_stride, query_token_stride, page_stride, num_tokens, num_heads, meta_width, pages_per_row,
    ROW_COLUMN: tl.constexpr, PREFIX_COLUMN: tl.constexpr, PATH_COLUMN: tl.constexpr,
    PATH_WIDTH: tl.constexpr, BLOCK_PATH: tl.constexpr,
    PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
    GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Tail of token `program_id(0)` for KV head `program_id(1)`, after the splits of its body in order.

    Padding yields zeros.
    """
    n = tl.program_id(0)
    g = tl.program_id(1)
    f = tl.arange(0, BLOCK_F)
    head_R = tl.program_id(2) * LANES + tl.arange(0, LANES)
    fields = meta + n * meta_width
    row = tl.load(fields + ROW_COLUMN)
    prefix = tl.load(fields + PREFIX_COLUMN)
    steps = tl.arange(0, BLOCK_PATH)
    path_A = tl.load(fields + PATH_COLUMN + steps, mask=steps < PATH_WIDTH, other=-1)
    length = prefix + tl.sum((path_A >= 0).to(tl.int32), axis=0)
    begin = _body_len(length, PATH_WIDTH, BLOCK)
    is_head_R = head_R < GROUP
    mask_RF = is_head_R[:, None] & (f < F)[None, :]
    from_R = n.to(tl.int64) * num_heads + g * GROUP + head_R
    to_RF = out + from_R[:, None] * F + f[None, :]
    if length == 0:
        tl.store(to_RF, tl.zeros((LANES, BLOCK_F), out.dtype.element_ty), mask=mask_RF)
    else:
        place_J = begin + tl.arange(0, TAIL)
        is_seen_J = place_J < length
        step_J = tl.load(
            fields + PATH_COLUMN + place_J - prefix, mask=is_seen_J & (place_J >= prefix), other=0
        )
        index_J = tl.where(place_J < prefix, place_J, prefix + step_J)
        page_J = tl.load(pages + row * pages_per_row + index_J // PAGE, mask=is_seen_J, other=0)
        at_J = _address(page_J, index_J, page_stride, g, PAGE, F)
        mask_JF = is_seen_J[:, None] & (f < F)[None, :]
        key_JF = tl.load(key_cache + at_J[:, None] + f[None, :], mask=mask_JF, other=0.0)
        value_JF = tl.load(value_cache + at_J[:, None] + f[None, :], mask=mask_JF, other=0.0)
        at_R = (g * GROUP + head_R) * query_head_stride + n * query_token_stride
        query_RF = tl.load(query + at_R[:, None] + f[None, :], mask=mask_RF, other=0.0)
        score_RJ = (
            _product(query_RF, tl.trans(key_JF), tl.zeros((LANES, TAIL), tl.float32), INTERPRETED) * scale
        )
        score_RJ = tl.where(is_seen_J[None, :], score_RJ, float("-inf"))
        tail_peak_R = tl.max(score_RJ, axis=1)
        weight_RJ = tl.exp2(score_RJ - tail_peak_R[:, None]).to(value_JF.dtype)
        tail_RF = _product(weight_RJ, value_JF, tl.zeros((LANES, BLOCK_F), tl.float32), INTERPRETED)

        num_splits = tl.cdiv(begin, SPLIT)
        split = tl.arange(0, BLOCK_SPLITS)
        peak_RS = tl.load(
            peaks + split[None, :] * num_tokens * num_heads + from_R[:, None],
            mask=is_head_R[:, None] & (split < num_splits)[None, :],
            other=float("-inf"),
        )
        highest_R = tl.maximum(tail_peak_R, tl.max(peak_RS, axis=1))
        total_R, sum_RF = _add_splits(
            sums, peaks, totals, num_splits, num_tokens * num_heads, from_R, head_R, highest_R, f,
            GROUP, F, LANES, BLOCK_F,
        )  # fmt: skip
        share_R = tl.exp2(tail_peak_R - highest_R)
        total_R = tl.fma(tl.sum(weight_RJ.to(tl.float32), axis=1), share_R, total_R)
        sum_RF = tl.fma(tail_RF, share_R[:, None], sum_RF)
        tl.store(to_RF, (sum_RF / total_R[:, None]).to(out.dtype.element_ty), mask=mask_RF)


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
    config: Config | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """Store, then attend; arguments and result are those of `attention.reference`.

    Args:
        config: Replaces the menu's entry. Calls whose bits must be equal need the same one.
        wrap: Lets the compiler see the kernels. Shapes and strides, also those of the caches, then stay
            those of the traced tensors.

    Raises:
        ValueError: the kernels cannot read the shapes or strides, or the menu has no entry for the dtype
            and head dimension.

    Cost: three kernels, no sync; the live context is read on the device. Workspace: 4 (F + 2) bytes per
    token, query head and split of the page table's width; only live splits are written.
    """
    _check(query, key, value, key_cache, value_cache)
    _, num_heads, num_tokens, dim = query.shape
    num_kv_heads = key.shape[1]
    path_width = meta.shape[1] - PATH
    group = num_heads // num_kv_heads
    config = config or config_for(query.dtype, dim)
    num_splits = config.num_splits(pages.shape[1] * PAGE_LEN, path_width)
    tokens = max(1, config.lanes // group)
    head_blocks = triton.cdiv(group, config.lanes)
    sums = query.new_empty((num_splits, num_tokens, num_heads, dim), dtype=torch.float32)
    peaks = query.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    totals = query.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    out = query.new_empty((1, num_tokens, num_heads, dim))

    page_stride = key_cache.stride(0)
    meta_width = meta.shape[1]
    pages_per_row = pages.shape[1]
    layout = {
        "ROW_COLUMN": ROW,
        "PAGE": PAGE_LEN,
        "F": dim,
        "BLOCK_F": max(16, triton.next_power_of_2(dim)),
    }
    sequence = {
        "PREFIX_COLUMN": PREFIX,
        "PATH_COLUMN": PATH,
        "PATH_WIDTH": path_width,
        "BLOCK_PATH": triton.next_power_of_2(path_width),
    }
    cut = {
        "GROUP": group,
        "BLOCK": config.block,
        "SPLIT": config.split,
        "INTERPRETED": not isinstance(body_kernel, triton.JITFunction),
    }
    tail = triton.next_power_of_2(max(16, path_width + config.block - 1))
    wrap(store_kernel)[(num_tokens, num_kv_heads)](
        key, value, key_cache, value_cache, meta, pages,
        key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        page_stride, meta_width, pages_per_row, INDEX_COLUMN=INDEX, num_warps=STORE_WARPS, **layout,
    )  # fmt: skip
    wrap(body_kernel)[(num_tokens * head_blocks, num_kv_heads, num_splits)](
        query, key_cache, value_cache, meta, pages, sums, peaks, totals, scale * LOG2_E,
        query.stride(1), query.stride(2), page_stride, num_tokens, num_heads, meta_width, pages_per_row,
        LANES=config.lanes, LANE_HEADS=min(group, config.lanes), TOKENS=tokens, HEAD_BLOCKS=head_blocks,
        num_warps=config.num_warps, num_stages=config.num_stages, **layout, **sequence, **cut,
    )  # fmt: skip
    wrap(tail_kernel)[(num_tokens, num_kv_heads, triton.cdiv(group, TAIL_LANES))](
        query, key_cache, value_cache, meta, pages, sums, peaks, totals, out, scale * LOG2_E,
        query.stride(1), query.stride(2), page_stride, num_tokens, num_heads, meta_width, pages_per_row,
        LANES=TAIL_LANES, BLOCK_SPLITS=triton.next_power_of_2(num_splits), TAIL=tail,
        num_warps=TAIL_WARPS, **layout, **sequence, **cut,
    )  # fmt: skip
    return out


def _check(query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError for shapes and strides that the kernels would read wrong."""
    num_kv_heads = key.shape[1]
    dim = query.shape[3]
    if (
        query.shape[0] != 1
        or query.shape[1] % num_kv_heads
        or query.stride(3) != 1
        or key.stride(3) != 1
        or value.stride(3) != 1
    ):
        raise ValueError(
            "attend: query, key and value are (1, heads, N, F), F contiguous, query heads a multiple of KV "
            f"heads; got {_layout(query, key, value)}"
        )
    inner = (PAGE_LEN * dim, dim, 1)
    if any(
        cache.shape[1:] != (num_kv_heads, PAGE_LEN, dim) or cache.stride()[1:] != inner
        for cache in (key_cache, value_cache)
    ):
        raise ValueError(
            f"attend: caches are (pages, {num_kv_heads}, {PAGE_LEN}, {dim}), a page contiguous; got "
            f"{_layout(key_cache, value_cache)}"
        )
    if key_cache.stride(0) != value_cache.stride(0):
        layout = _layout(key_cache, value_cache)
        raise ValueError(f"attend: pages of keys and of values have the same stride; got {layout}")


def _layout(*tensors: Tensor) -> str:
    return ", ".join(f"{tuple(tensor.shape)} with strides {tensor.stride()}" for tensor in tensors)


def register() -> None:
    """Define `ygg::attend_cuda`, which shows the kernels to the compiler.

    Call once, before a graph is built for CUDA.
    """

    @torch.library.triton_op("ygg::attend_cuda", mutates_args={"key_cache", "value_cache"})
    def _(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        meta: Tensor,
        pages: Tensor,
        scale: float,
    ) -> Tensor:
        return launch(
            query, key, value, key_cache, value_cache, meta, pages, scale, wrap=torch.library.wrap_triton
        )


def tune(
    cases: Sequence[Sequence[Any]], candidates: Sequence[Config] = CANDIDATES
) -> list[tuple[Config, float]]:
    """Time entries of the menu on the device of the tensors, to choose `CONFIGS`.

    Args:
        cases: Arguments of `launch`, for all widths and contexts that one entry serves: an entry must not
            depend on the width.

    Returns:
        Each candidate that the device can run with its milliseconds over all cases, with cold caches,
        fastest first.

    Cost: compiles and runs every candidate for every case, seconds each. CUDA only.
    """
    found = []
    for config in candidates:
        try:
            times_ms = [triton.testing.do_bench(partial(launch, *case, config=config)) for case in cases]
            found.append((config, sum(times_ms)))
        except triton.runtime.errors.OutOfResources:
            continue  # more shared memory than this device has
    return sorted(found, key=lambda each: each[1])
