"""Paged KV: who owns which page of 16 slots, which are free, and which hold text that another request can
share.

```
row 0   [ 4 | 7 | 2 ]    pages of its first 48 indices; page 4 is shared: the same 16 tokens begin both
row 1   [ 4 | 9 ]
free    3, 8, 5 ...      oldest first; a later prompt may find the text of a free page until it is taken
```

A page id names the same slots in the target's storage and in the draft's. Pages that the pool is lent for a
while are the target's alone: the draft is away then.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from yggdrasil.errors import CapacityError
from yggdrasil.layout import PAGE_LEN
from yggdrasil.staging import upload

__all__ = ["PagePool", "pages_for"]


def pages_for(num_indices: int) -> int:
    """Pages that hold this many indices of a row."""
    return -(-num_indices // PAGE_LEN)


class PagePool:
    """The page table of a batch and its free queue.

    Args:
        num_pages: Pages in all, until the pool expands.
        num_rows: Most rows at once.
        max_indices: Longest row.

    Attributes:
        table_BP: (rows, pages a row) int32: what the graphs of both models read.
    """

    def __init__(self, num_pages: int, *, num_rows: int, max_indices: int, device: str = "cpu") -> None:
        self.num_pages = num_pages
        self.table_BP = torch.zeros(num_rows, pages_for(max_indices), dtype=torch.int32, device=device)
        self._free = dict.fromkeys(range(num_pages))  # a queue from whose middle a page can be shared again
        self._owners = [0] * num_pages
        self._pages: list[list[int]] = [[] for _ in range(num_rows)]
        # of the text up to the end of each full page
        self._digests: list[list[bytes]] = [[] for _ in range(num_rows)]
        self._page_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._has_draft = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_missing(self, row: int, num_indices: int) -> int:
        """Pages that a row lacks to hold this many indices."""
        return max(0, pages_for(num_indices) - len(self._pages[row]))

    def extend_(self, row: int, num_indices: int) -> None:
        """Give a row the pages that it lacks.

        Raises:
            CapacityError: fewer are free; nothing was taken.
        """
        missing = self.num_missing(row, num_indices)
        if missing > len(self._free):
            raise CapacityError("KV pages", missing, len(self._free), "serve with a larger --kv-memory")
        for _ in range(missing):
            page = next(iter(self._free))
            self._forget(page)
            self._own(row, page)

    def share_(self, row: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Let an empty row begin with pages that already hold the beginning of its text.

        Args:
            tokens: Its text; the last token's KV is always computed, for its logits are wanted.

        Returns:
            How many tokens the target's KV holds already, and how many the draft's.
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
        """Make the full pages of a row's committed text known, so that others can share them."""
        digests = self._digests[row]
        for page_tokens in _full_pages(tokens, len(digests), target_len // PAGE_LEN):
            digests.append(_digest(digests[-1] if digests else b"", page_tokens))
            page = self._pages[row][len(digests) - 1]
            if digests[-1] not in self._page_of:
                self._page_of[digests[-1]], self._digest_of[page] = page, digests[-1]
        for place in range(draft_len // PAGE_LEN - 1, -1, -1):
            page = self._pages[row][place]
            if self._has_draft[page]:
                break
            self._has_draft[page] = True

    def release_(self, row: int) -> None:
        """Take a row's pages back; those that nobody shares are free, the end of the text first in the
        queue: beginnings are what others share.
        """
        for page in reversed(self._pages[row]):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free[page] = None
        self._pages[row] = []
        self._digests[row] = []

    def expand_(self, num_pages: int) -> None:
        """Pages up to `num_pages` join the end of the free queue. Source: Nightjar section 5.2."""
        new = range(self.num_pages, num_pages)
        self._owners += [0] * len(new)
        self._digest_of += [None] * len(new)
        self._has_draft += [False] * len(new)
        self._free.update(dict.fromkeys(new))
        self.num_pages = num_pages

    def contract_(self, num_pages: int) -> dict[int, int]:
        """Give the pages from `num_pages` on back; those that rows own are renamed, in tables, counts and
        texts at once.

        Returns:
            Old id to new, beginnings of texts first: whose data the caller has to move before anything
            reads a page.

        Raises:
            CapacityError: rows own more pages than are left; nothing has changed.

        Source: Nightjar section 5.3, steps 1 to 3 and 5. Of predecessor links the tables are the only
        record here: a page stands at the same place in every row that shares it, so the order of places is
        the topological order."""
        moves = self._migration(num_pages)
        for old, new in moves.items():
            self._rename(old, new)
        for row, pages in enumerate(self._pages):
            renamed = [moves.get(page, page) for page in pages]
            if renamed != pages:
                self._pages[row] = renamed
                self.table_BP[row, : len(renamed)] = upload(
                    renamed, self.table_BP.device, dtype=torch.int32
                )
        for page in range(num_pages, self.num_pages):
            self._forget(page)
            self._free.pop(page, None)
        del self._owners[num_pages:], self._digest_of[num_pages:], self._has_draft[num_pages:]
        self.num_pages = num_pages
        return moves

    def flush_(self) -> None:
        """Forget the text of free pages: the next prompt is computed, whatever was served before."""
        for page in self._free:
            self._forget(page)

    def check(self) -> None:
        """Check that free and used pages are all pages, the table lists what is owned, no page is both
        free and owned.
        """
        owners = [0] * self.num_pages
        for row, pages in enumerate(self._pages):
            assert len(set(pages)) == len(pages), f"row {row} owns a page twice: {pages}"
            assert self.table_BP[row, : len(pages)].tolist() == pages, (
                f"row {row}: the table is not its pages"
            )
            for page in pages:
                owners[page] += 1
        assert owners == self._owners, "reference counts"
        used = [page for page, count in enumerate(owners) if count]
        assert len(used) + len(self._free) == self.num_pages, (
            f"{len(used)} used and {len(self._free)} free of {self.num_pages} pages"
        )
        assert not self._free.keys() & set(used), "pages that are free and used"
        assert all(self._digest_of[page] == digest for digest, page in self._page_of.items()), (
            "a text that its page no longer holds"
        )

    def _migration(self, num_pages: int) -> dict[int, int]:
        depth = max(map(len, self._pages), default=0)
        evicted = dict.fromkeys(
            pages[place]
            for place in range(depth)
            for pages in self._pages
            if place < len(pages) and pages[place] >= num_pages
        )
        # texts that are likely to be found again last
        free = sorted(
            (page for page in self._free if page < num_pages),
            key=lambda page: self._digest_of[page] is not None,
        )
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
            self._page_of[digest], self._digest_of[new], self._digest_of[old] = new, digest, None

    def _own(self, row: int, page: int) -> None:
        self._free.pop(page, None)
        self._owners[page] += 1
        place = len(self._pages[row])
        # assigned to one element, a number would be a copy from the host, and a sync
        self.table_BP[row, place : place + 1].fill_(page)
        self._pages[row].append(page)

    def _forget(self, page: int) -> None:
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
        self._digest_of[page] = None
        self._has_draft[page] = False


def _full_pages(tokens: Sequence[int], first: int, last: int) -> list[Sequence[int]]:
    return [tokens[page * PAGE_LEN : (page + 1) * PAGE_LEN] for page in range(first, last)]


def _digest(before: bytes, page_tokens: Sequence[int]) -> bytes:
    """Of the text up to and including a page: another text with the same one is not to be feared."""
    return blake2b(before + np.asarray(page_tokens, dtype=np.int32).tobytes(), digest_size=16).digest()
