"""KV commit on CUDA: move the accepted path of a single row down to the end of the committed keys.

```
slot     target                                 sources  9, 10, 14   target 8
          8    9   10   11   12   13   14
          ^----'    |                   |
               ^----'                   |
                    ^-------------------'
```

A program owns one layer, key or value, and head. It reads up to 16 moves into registers, then writes them.
It overwrites only slots that it has read or that no move reads, because sources ascend and `sources[i] >=
target + i`. kv.py has the specification.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = features of a head. Here M = moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from yggdrasil.layout import PAGE_LEN
from yggdrasil.staging import upload

__all__ = ["launch_", "move_slots_kernel", "register"]

MOVES: Final = 16  # moves of one tile; a longer path takes several tiles, in order
NUM_WARPS: Final = 4


@triton.jit
def _address(slot, page_stride, plane, PAGE: tl.constexpr, F: tl.constexpr):
    """The offset of a slot in a plane (layer, key or value, head); the page table is the identity."""
    return (slot // PAGE).to(tl.int64) * page_stride + (plane * PAGE + slot % PAGE) * F


@triton.jit(do_not_specialize=["target", "num_moves"])
def move_slots_kernel(
    storage, sources, target, num_moves, page_stride,
    MOVES: tl.constexpr, PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """All moves of plane `program_id(0)`. A source below zero is padding and moves nothing."""
    plane = tl.program_id(0)
    f = tl.arange(0, BLOCK_F)
    for first in range(0, num_moves, MOVES):
        move = first + tl.arange(0, MOVES)
        source = tl.load(sources + move, mask=move < num_moves, other=-1)
        mask = (source >= 0)[:, None] & (f < F)[None, :]
        moved = tl.load(
            storage + _address(tl.maximum(source, 0), page_stride, plane, PAGE, F)[:, None] + f[None, :],
            mask=mask,
        )
        tl.debug_barrier()  # a thread writes slots that another one reads
        tl.store(
            storage + _address(target + move, page_stride, plane, PAGE, F)[:, None] + f[None, :],
            moved,
            mask=mask,
        )


def launch_(storage_PL2GSF: Tensor, source_M: Tensor, target: int) -> None:
    """Copy slots `source_M[i]` to slots `target + i`, in every layer, key and value, and head.

    Args:
        storage_PL2GSF: (pages, layers, 2, G, 16, F), contiguous.
        source_M: int32 or int64 on the storage's device; ascending, `source_M[i] >= target + i`, then any
            number of -1, which move nothing.
        target: The first slot that is written.

    Raises:
        ValueError: the storage has another shape or is not contiguous. Sources are not checked, because
            that would be a sync.

    Cost: one kernel, no sync; compiled once for all targets and numbers of moves.
    """
    if (
        storage_PL2GSF.dim() != 6
        or storage_PL2GSF.shape[4] != PAGE_LEN
        or not storage_PL2GSF.is_contiguous()
    ):
        layout = f"{tuple(storage_PL2GSF.shape)} with strides {storage_PL2GSF.stride()}"
        raise ValueError(
            f"move_slots_: storage is (pages, layers, 2, G, {PAGE_LEN}, F) and contiguous, got {layout}"
        )
    _, num_layers, _, num_kv_heads, _, dim = storage_PL2GSF.shape
    move_slots_kernel[(num_layers * 2 * num_kv_heads,)](
        storage_PL2GSF, source_M, target, len(source_M), storage_PL2GSF.stride(0),
        MOVES=MOVES, PAGE=PAGE_LEN, F=dim, BLOCK_F=triton.next_power_of_2(dim), num_warps=NUM_WARPS,
    )  # fmt: skip


def register() -> None:
    """Register `ygg::move_slots_` for CUDA; call once, after the library is loaded."""

    @torch.library.impl("ygg::move_slots_", "CUDA")
    def _(storage: Tensor, source: Sequence[int], target: int) -> None:
        launch_(storage, upload(source, storage.device, dtype=torch.int32), target)
