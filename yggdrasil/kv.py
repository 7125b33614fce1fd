"""Keys and values of one model: the storage that its graphs write, and the cache of a single request.

```
index   0 ........ len-1 | len  len+1  len+2 ...
        committed        | provisional: tree nodes, root first; kept only by a commit
```

A batch has the same storage and graphs, with a page table of many rows; see serve/pages.py.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.errors import CapacityError
from yggdrasil.layout import PAGE_LEN
from yggdrasil.page_order import by_slot, in_pages
from yggdrasil.staging import upload

__all__ = ["KVCache", "KVShape", "KVStorage", "move_slots_reference_"]


def move_slots_reference_(storage_PL2GSF: Tensor, source: Sequence[int], target: int) -> None:
    """Move slots `source[i]` (ascending) to `target + i` in every layer: specifies `ygg::move_slots_`."""
    moves_2N = torch.tensor([source, range(target, target + len(source))], device=storage_PL2GSF.device)
    slots_PL2GSF = by_slot(storage_PL2GSF)
    from_page, to_page = moves_2N // PAGE_LEN
    from_place, to_place = moves_2N % PAGE_LEN
    slots_PL2GSF[to_page, :, :, :, to_place] = slots_PL2GSF[from_page, :, :, :, from_place]
    storage_PL2GSF.copy_(in_pages(slots_PL2GSF))


def _num_in_place(path: Sequence[int]) -> int:
    """How many tokens of a path, from its first on, are already where a commit puts them."""
    return next((place for place, offset in enumerate(path) if offset != place), len(path))


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Size of a model's KV: of one token, and the number of tokens.

    Args:
        num_kv_heads: Key/value heads, G.
        head_dim: Features of a head, F.
        capacity: Indices per row, committed and provisional; a multiple of 16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    capacity: int

    @property
    def num_pages(self) -> int:
        return self.capacity // PAGE_LEN

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVStorage:
    """Keys and values of all layers in one tensor, and the page table that maps rows to pages.

    Args:
        shape: Size of a token's keys and values; its capacity is the length of the longest row.
        num_pages: Total number of pages of 16 slots.
        pages_BP: (B, P) int32, the page of every 16 indices of a row. Aliasing: its owner changes it.
        dtype: Type of keys and values.

    Attributes:
        storage_PL2GSF: (pages, layers, key or value, G, 16, F), on a CPU in the order of page_order.py.
            A page is one range of bytes, so a range of pages can be lent as memory.
    """

    def __init__(
        self, shape: KVShape, *, num_pages: int, pages_BP: Tensor, dtype: torch.dtype, device: str
    ) -> None:
        self.shape = shape
        self.pages_BP = pages_BP
        self.storage_PL2GSF = torch.zeros(
            num_pages,
            shape.num_layers,
            2,
            shape.num_kv_heads,
            PAGE_LEN,
            shape.head_dim,
            dtype=dtype,
            device=device,
        )

    def bytes_from(self, page: int) -> Tensor:
        """The memory of the pages from `page` on, uint8. Aliasing: the storage's own."""
        return self.storage_PL2GSF[page:].view(-1).view(torch.uint8)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, (P, G, 16, F) each, in the storage's order; views of it."""
        return self.storage_PL2GSF[:, layer, 0], self.storage_PL2GSF[:, layer, 1]

    def keep_(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move a row's indices `start + path[i]` to `start + i`, wherever its pages are.

        Args:
            row: Row of the page table.
            path: Ascending offsets from `start`.

        Cost: nothing for a chain from the root, else one gather and one scatter over all layers; on a CPU
            of whole pages. No sync.
        """
        moved = _num_in_place(path)
        if moved == len(path):
            return
        source = [start + offset for offset in path[moved:]]
        target = range(start + moved, start + len(path))
        index_2N = upload([source, target], self.pages_BP.device)
        from_place, to_place = index_2N % PAGE_LEN
        storage = self.storage_PL2GSF
        pages_P = self.pages_BP[row].long()
        if storage.is_cuda:
            from_page, to_page = pages_P[index_2N // PAGE_LEN]
            storage[to_page, :, :, :, to_place] = storage[from_page, :, :, :, from_place]
            return
        first = target[0] // PAGE_LEN
        pages_P = pages_P[first : source[-1] // PAGE_LEN + 1]
        slots_PL2GSF = by_slot(storage[pages_P])
        from_page, to_page = index_2N // PAGE_LEN - first
        slots_PL2GSF[to_page, :, :, :, to_place] = slots_PL2GSF[from_page, :, :, :, from_place]
        storage[pages_P] = in_pages(slots_PL2GSF)


class KVCache(KVStorage):
    """The storage of a single row, as a transaction: forwards write provisional KV, `commit_` keeps a path.

    Attributes:
        len: Committed indices.
    """

    def __init__(self, shape: KVShape, *, dtype: torch.dtype, device: str) -> None:
        pages_BP = torch.arange(shape.num_pages, dtype=torch.int32, device=device)[None]
        super().__init__(shape, num_pages=shape.num_pages, pages_BP=pages_BP, dtype=dtype, device=device)
        self.len = 0

    @property
    def num_free(self) -> int:
        return self.shape.capacity - self.len

    def reserve(self, num_tokens: int) -> None:
        """Raises CapacityError unless `num_tokens` provisional indices fit after the committed ones."""
        if num_tokens > self.num_free:
            raise CapacityError(
                "context is full",
                num_tokens,
                self.num_free,
                "shorten the prompt or compile with a larger --max-context",
            )

    def keep_(self, row: int, start: int, path: Sequence[int]) -> None:
        """`KVStorage.keep_` of the only row, whose pages are in order.

        Cost: nothing for a chain from the root, else one operator over all layers. No sync.
        """
        moved = _num_in_place(path)
        if moved < len(path):
            sources = [start + offset for offset in path[moved:]]
            torch.ops.ygg.move_slots_(self.storage_PL2GSF, sources, start + moved)

    def commit_(self, path: Sequence[int]) -> None:
        """Keep the provisional tokens at `len + path[i]` as indices `len + i`; drop the rest.

        Args:
            path: Ascending offsets from `len`; empty commits nothing.

        Cost: that of `keep_`.
        """
        self.keep_(0, self.len, path)
        self.len += len(path)

    def kept_(self, length: int) -> None:
        """Set the committed length, after `keep_` or a C++ step has moved the kept tokens below it."""
        assert self.len <= length <= self.shape.capacity
        self.len = length

    def rollback_(self, length: int) -> None:
        """Drop every index from `length` on."""
        assert 0 <= length <= self.len
        self.len = length
