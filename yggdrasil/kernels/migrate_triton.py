"""Triton body of `move_pages_` (specification: migrate.py, `move_pages_reference_`).

```
program_id(1)    0      1      2  ...      tiles of TILE words, the last one masked
move 0       [ tile | tile | tile | ]      program_id(0) is the move; every program copies one tile
move 1       [ tile | tile | tile | ]
```

Pages are copied as words of any dtype, 16 bytes per thread and access.

Shapes: P = pages, X = the elements or words of a page. Here M = moves.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch_", "move_pages_kernel"]

# in words; with words of 8 bytes and 128 threads, each thread has eight accesses of 16 bytes in flight
TILE: Final = 2048
NUM_WARPS: Final = 4
WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def move_pages_kernel(words, sources, targets, page_words, TILE: tl.constexpr):
    """Copy tile `program_id(1)` of move `program_id(0)`."""
    move = tl.program_id(0)
    source = tl.load(sources + move).to(tl.int64)
    target = tl.load(targets + move).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = word < page_words
    tl.store(
        words + target * page_words + word,
        tl.load(words + source * page_words + word, mask=mask),
        mask=mask,
    )


def launch_(storage_PX: Tensor, source_M: Tensor, target_M: Tensor) -> None:
    """Move pages; the arguments are those of `move_pages_reference_`, on the storage's device.

    Raises:
        ValueError: the storage is not contiguous.

    Cost: one kernel, no sync; no memory of its own.
    """
    if not storage_PX.is_contiguous():
        layout = f"{tuple(storage_PX.shape)} with strides {storage_PX.stride()}"
        raise ValueError(f"move_pages_: storage of {layout} is not contiguous")
    word_PX = _as_words(storage_PX)
    page_words = word_PX.shape[1]
    move_pages_kernel[(len(source_M), triton.cdiv(page_words, TILE))](
        word_PX, source_M, target_M, page_words, TILE=TILE, num_warps=NUM_WARPS
    )


def _as_words(storage_PX: Tensor) -> Tensor:
    """(pages, words) over the same bytes, in the widest words that divide a page and the start."""
    page_bytes = storage_PX[0].nbytes
    start = storage_PX.data_ptr()
    word = next(word for word in WORDS if page_bytes % word.itemsize == 0 and start % word.itemsize == 0)
    return storage_PX.view(len(storage_PX), -1).view(torch.uint8).view(word)
