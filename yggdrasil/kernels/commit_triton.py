"""KV commit on CUDA: the accepted path of a single row, moved down to where committed keys end
(specification: `move_slots_reference_` in kv.py).

```
slot     target                                 sources  9, 10, 14   target 8
          8    9   10   11   12   13   14
          ^----'    |                   |       a program owns one layer, key or value, and head: it takes up to 16 moves into
               ^----'                   |       registers, then writes them. What it overwrites it has read, or no move reads:
                    ^-------------------'       sources ascend and sources[i] >= target + i.
```
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

MOVES: Final = 16  # of one tile; a longer path takes several, in order
NUM_WARPS: Final = 4


@triton.jit
def _address(slot, page_stride, plane, PAGE: tl.constexpr, F: tl.constexpr):
    """Where a slot of a plane (layer, key or value, head) begins; page and slot count alike, the page table
    is the identity.
    """
    return (slot // PAGE).to(tl.int64) * page_stride + (plane * PAGE + slot % PAGE) * F


@triton.jit(do_not_specialize=["target", "num_moves"])
def move_slots_kernel(
    storage, sources, target, num_moves, page_stride, MOVES: tl.constexpr, PAGE: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """All moves of plane `program_id(0)`. A source below zero moves nothing: it is the padding of a path."""
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
        tl.debug_barrier()  # a thread writes what another one reads
        tl.store(
            storage + _address(target + move, page_stride, plane, PAGE, F)[:, None] + f[None, :],
            moved,
            mask=mask,
        )


def launch_(storage_PL2GSF: Tensor, source_M: Tensor, target: int) -> None:
    """Slots `source_M[i]` of the identity page table become slots `target + i`, in every layer, key and
    value, and head.

    Args:
        storage_PL2GSF: (pages, layers, 2, G, 16, F), contiguous.
        source_M: int32 or int64 on the storage's device; ascending, `source_M[i] >= target + i`, then any
            number of -1, which move nothing.
        target: First slot to be written.

    Raises:
        ValueError: the storage has another shape or is not contiguous. Sources are believed: looking at
            them would be a sync.

    Cost: one kernel, no sync; compiled once, whatever the target and the number of moves.
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
    """Let `ygg::move_slots_` run on CUDA; once, after the library is loaded."""

    @torch.library.impl("ygg::move_slots_", "CUDA")
    def _(storage: Tensor, source: Sequence[int], target: int) -> None:
        launch_(storage, upload(source, storage.device, dtype=torch.int32), target)
