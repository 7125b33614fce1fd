"""Paged KV: the owners of every page of 16 slots, the free pages, and the text that requests can share.

```
row 0   [ 4 | 7 | 2 ]     pages of its first 48 indices; page 4 is shared: both prompts begin alike
row 1   [ 4 | 9 ]
free    3, 8, 5 ...       those without text, then oldest first; a free page keeps its text, which can be
                          shared, until it is taken
```

A page id names the same slots in the storages of target and draft. Pages that are lent to the pool belong
to the target alone, because the draft is away then.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from yggdrasil.errors import CapacityError
from yggdrasil.layout import PAGE_LEN
from yggdrasil.staging import upload

__all__ = ["PagePool", "pages_for"]


def pages_for(num_indices: int) -> int:
    """Pages for this number of indices of a row."""
    return -(-num_indices // PAGE_LEN)


class PagePool:
    """The page table of a batch and its free queue.

    Args:
        num_pages: Total pages, until the pool expands.
        num_rows: Largest number of rows at once.
        max_indices: Indices of the longest row.

    Attributes:
        table_BP: (rows, pages of a row) int32, read by the graphs of both models.
    """

    def __init__(self, num_pages: int, *, num_rows: int, max_indices: int, device: str = "cpu") -> None:
        self.num_pages = num_pages
        self.table_BP = torch.zeros(num_rows, pages_for(max_indices), dtype=torch.int32, device=device)
        # a queue; sharing can take a page from its middle
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._owners = [0] * num_pages
        self._pages: list[list[int]] = [[] for _ in range(num_rows)]
        # by row, of the text up to the end of each full page
        self._digests: list[list[bytes]] = [[] for _ in range(num_rows)]
        self._page_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._has_draft = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_missing(self, row: int, num_indices: int) -> int:
        """Pages that a row lacks to hold this number of indices."""
        return max(0, pages_for(num_indices) - len(self._pages[row]))

    def extend_(self, row: int, num_indices: int) -> None:
        """Give a row the pages that it lacks.

        Raises:
            CapacityError: fewer are free, or the row would exceed `max_indices`; nothing was taken.
        """
        missing = self.num_missing(row, num_indices)
        room = min(len(self._free), self.table_BP.shape[1] - len(self._pages[row]))
        if missing > room:
            fix = "shorten the text or serve with a larger --kv-memory"
            raise CapacityError("KV pages", missing, room, fix)
        for _ in range(missing):
            page = next(iter(self._free))
            self._forget(page)
            self._own(row, page)

    def trim_(self, row: int, num_indices: int) -> None:
        """Take back the pages of a row beyond this number of indices; they hold no committed text."""
        pages = self._pages[row]
        while len(pages) > pages_for(num_indices):
            page = pages.pop()
            self._disown(page)

    def share_(self, row: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Give an empty row the pages that already hold the beginning of its text.

        Args:
            row: A row without pages.
            tokens: Its text; the last token is always computed, because its logits are needed.

        Returns:
            The number of tokens that the target's KV and the draft's KV already hold.
        """
        num_draft = 0
        digest = b""
        for page_tokens in _full_pages(tokens, 0, (len(tokens) - 1) // PAGE_LEN):
            digest = _digest(digest, page_tokens)
            page = self._page_of.get(digest)
            if page is None:
                break
            if self._has_draft[page] and num_draft == len(self._pages[row]):
                num_draft += 1
            self._own(row, page)
            self._digests[row].append(digest)
        return len(self._pages[row]) * PAGE_LEN, num_draft * PAGE_LEN

    def publish_(self, row: int, tokens: Sequence[int], target_len: int, draft_len: int) -> None:
        """Register the full pages of a row's committed text, so that other rows can share them."""
        digests = self._digests[row]
        for page_tokens in _full_pages(tokens, len(digests), target_len // PAGE_LEN):
            digests.append(_digest(digests[-1] if digests else b"", page_tokens))
            page = self._pages[row][len(digests) - 1]
            if digests[-1] not in self._page_of:
                self._page_of[digests[-1]] = page
                self._digest_of[page] = digests[-1]
        for place in range(draft_len // PAGE_LEN - 1, -1, -1):
            page = self._pages[row][place]
            if self._has_draft[page]:
                break
            self._has_draft[page] = True

    def release_(self, row: int) -> None:
        """Take a row's pages back; those without another owner become free.

        The end of the text comes first in the queue, because other requests share beginnings.
        """
        for page in reversed(self._pages[row]):
            self._disown(page)
        self._pages[row] = []
        self._digests[row] = []

    def expand_(self, num_pages: int) -> None:
        """Append pages up to `num_pages` to the free queue. Source: Nightjar section 5.2."""
        new = range(self.num_pages, num_pages)
        self._owners += [0] * len(new)
        self._digest_of += [None] * len(new)
        self._has_draft += [False] * len(new)
        self._free = OrderedDict.fromkeys(sorted([*self._free, *new], key=self._has_text))
        self.num_pages = num_pages

    def contract_(self, num_pages: int) -> dict[int, int]:
        """Remove the pages from `num_pages` on; those that rows own get new ids in all tables and counts.

        Returns:
            Old id to new, beginnings of texts first. The caller has to move their data before anything
            reads a page.

        Raises:
            CapacityError: rows own more pages than remain; nothing has changed.

        Source: Nightjar section 5.3, steps 1 to 3 and 5. The tables are the only record of predecessor
        links: a page has the same place in every row that shares it, so the order of places is the
        topological order."""
        moves = self._migration(num_pages)
        for old, new in moves.items():
            self._rename(old, new)
        for row, pages in enumerate(self._pages):
            renamed = [moves.get(page, page) for page in pages]
            if renamed != pages:
                self._pages[row] = renamed
                uploaded = upload(renamed, self.table_BP.device, dtype=torch.int32)
                self.table_BP[row, : len(renamed)] = uploaded
        for page in range(num_pages, self.num_pages):
            self._forget(page)
            self._free.pop(page, None)
        del self._owners[num_pages:], self._digest_of[num_pages:], self._has_draft[num_pages:]
        self.num_pages = num_pages
        return moves

    def flush_(self) -> None:
        """Forget the text of free pages, so that the next prompt cannot share it."""
        for page in self._free:
            self._forget(page)

    def check(self) -> None:
        """Assert that every page is either free or used, and that the table lists the owned pages."""
        owners = [0] * self.num_pages
        for row, pages in enumerate(self._pages):
            assert len(set(pages)) == len(pages), f"row {row} owns a page twice: {pages}"
            listed = self.table_BP[row, : len(pages)].tolist()
            assert listed == pages, f"row {row}: the table does not list its pages"
            for page in pages:
                owners[page] += 1
        assert owners == self._owners, "wrong reference counts"
        used = [page for page, count in enumerate(owners) if count]
        counts = f"{len(used)} used and {len(self._free)} free of {self.num_pages} pages"
        assert len(used) + len(self._free) == self.num_pages, counts
        assert not self._free.keys() & set(used), "pages that are free and used"
        queue = [self._has_text(page) for page in self._free]
        assert queue == sorted(queue), "a text is lost before all other pages are taken"
        for digest, page in self._page_of.items():
            assert self._digest_of[page] == digest, f"page {page} no longer holds its registered text"

    def _migration(self, num_pages: int) -> dict[int, int]:
        depth = max(map(len, self._pages), default=0)
        evicted = dict.fromkeys(
            pages[place]
            for place in range(depth)
            for pages in self._pages
            if place < len(pages) and pages[place] >= num_pages
        )
        free = [page for page in self._free if page < num_pages]
        if len(evicted) > len(free):
            raise CapacityError(
                "KV pages to contract into", len(evicted), len(free), "contract when requests have finished"
            )
        return dict(zip(evicted, free, strict=False))

    def _rename(self, old: int, new: int) -> None:
        self._forget(new)
        self._free.pop(new)
        self._owners[new] = self._owners[old]
        self._owners[old] = 0
        digest = self._digest_of[old]
        if digest is not None:
            self._page_of[digest] = new
            self._digest_of[new] = digest
            self._digest_of[old] = None

    def _own(self, row: int, page: int) -> None:
        self._free.pop(page, None)
        self._owners[page] += 1
        place = len(self._pages[row])
        # assigning a number to a single element would copy from the host and sync
        self.table_BP[row, place : place + 1].fill_(page)
        self._pages[row].append(page)

    def _disown(self, page: int) -> None:
        """One owner less; a page without owners is free, and the next to be taken if it has no text."""
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free[page] = None
            self._free.move_to_end(page, last=self._has_text(page))

    def _has_text(self, page: int) -> bool:
        """Whether the page has a full page of a committed text."""
        return self._digest_of[page] is not None

    def _forget(self, page: int) -> None:
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
        self._digest_of[page] = None
        self._has_draft[page] = False


def _full_pages(tokens: Sequence[int], first: int, last: int) -> list[Sequence[int]]:
    return [tokens[page * PAGE_LEN : (page + 1) * PAGE_LEN] for page in range(first, last)]


def _digest(before: bytes, page_tokens: Sequence[int]) -> bytes:
    """Digest of the text up to and including a page; the probability of a collision is negligible."""
    return blake2b(before + np.asarray(page_tokens, dtype=np.int32).tobytes(), digest_size=16).digest()
