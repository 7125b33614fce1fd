"""The requests of a batch: who waits, who runs, and which rows and pages they have.

```
waiting  --admit-->  running: prefilling --root reached--> decoding  --end, cancel--> removed
   ^                     |
   +------ preempt ------+
```

A row is preempted when no page is left for the next token of an older row: the youngest is computed again
later.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from yggdrasil.serve.pages import PagePool
from yggdrasil.serve.ticket import Ticket
from yggdrasil.state import Row

__all__ = ["Scheduler"]


class Scheduler:
    """Gives rows and pages to requests, and takes them back.

    Args:
        pool: Pages of both models.

    Attributes:
        waiting: Requests without a row, in the order in which they get one.
        running: Requests with a row, in the order of admission.
        base_pages: Pages of the pool without lent ones, which cannot be promised to a request.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.base_pages = pool.num_pages
        self._free_rows = list(reversed(range(len(pool.table_BP))))
        # The last ticket not admitted, and the free pages then: it is tried again when they change.
        self._not_admitted: tuple[Ticket, int] | None = None

    @property
    def prefilling(self) -> list[Ticket]:
        """Running requests whose prompt advances together with the rows that decode."""
        return [ticket for ticket in self.running if ticket.is_scored and not ticket.running.is_prefilled]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of running rows, roots included, that the target has not processed."""
        return sum(ticket.num_unseen for ticket in self.prefilling)

    def admit_(self) -> None:
        """Give rows and pages to waiting requests in order of arrival.

        Every running row keeps one free page to grow into.
        """
        while self.waiting and self._free_rows:
            ticket = self.waiting[0]
            row = self._free_rows[-1]
            if self._not_admitted == (ticket, self.pool.num_free):
                return
            # the logits of shared tokens are gone, so a prompt that is scored shares nothing
            sharing = self.pool.share_(row, ticket.state.tokens) if ticket.is_scored else (0, 0)
            target_len, draft_len = sharing
            num_missing = self.pool.num_missing(row, len(ticket.state.tokens))
            if not self._has_free_(num_missing + len(self.running)):
                self.pool.release_(row)
                self._not_admitted = ticket, self.pool.num_free
                return
            self.pool.extend_(row, len(ticket.state.tokens))
            ticket.row = Row(row, ticket.state, target_len, draft_len)
            ticket.shared_tokens = max(ticket.shared_tokens, target_len)
            ticket.admitted = ticket.admitted or time.perf_counter()
            self.waiting.popleft()
            self._free_rows.pop()
            self.running.append(ticket)

    def reserve_(self) -> list[Ticket]:
        """Give every row a page for its root; returns the rows that decode.

        If pages run out, the youngest rows are preempted.
        """
        for ticket in list(self.running):
            while ticket.row is not None and not self._has_free_(
                self.pool.num_missing(ticket.row.row, len(ticket.state.tokens))
            ):
                self._preempt_(self.running[-1])
            if ticket.row is not None:
                self.pool.extend_(ticket.row.row, len(ticket.state.tokens))
        return [ticket for ticket in self.running if ticket.running.is_prefilled]

    def has_room_(self, rows: Sequence[Row], num_nodes: int) -> bool:
        """Whether free pages can hold this many drafted nodes of each row."""
        return self._has_free_(
            sum(self.pool.num_missing(row.row, len(row.state.tokens) + num_nodes) for row in rows)
        )

    def trim_(self) -> None:
        """Take back the pages that hold no text."""
        for ticket in self.running:
            self.pool.trim_(ticket.running.row, len(ticket.state.tokens))

    def remove_(self, ticket: Ticket) -> None:
        """Free the row and the pages of a request, or take it from those that wait."""
        if ticket.row is not None:
            self._release_row_(ticket)
        elif ticket in self.waiting:
            self.waiting.remove(ticket)

    def check(self) -> None:
        """Assert that pages, rows and requests are consistent."""
        self.pool.check()
        rows = sorted([*(ticket.running.row for ticket in self.running), *self._free_rows])
        assert rows == list(range(len(self.pool.table_BP))), "a row is listed twice or not at all"
        for ticket in self.running:
            row = ticket.running
            kv_len = max(row.target_len, row.draft_len)
            assert kv_len <= row.state.root_pos, "KV beyond the root"
            assert self.pool.num_missing(row.row, kv_len) == 0, "KV without a page"
        if not self.running:
            assert self.pool.num_free == self.pool.num_pages, "pages that were not released"

    def _has_free_(self, num_pages: int) -> bool:
        """Whether this many pages are free; takes back those that the last trees needed if they are not."""
        if num_pages > self.pool.num_free:
            self.trim_()
        return num_pages <= self.pool.num_free

    def _preempt_(self, ticket: Ticket) -> None:
        """Move a row to the head of the queue without its KV, which is computed again from its text."""
        self._release_row_(ticket)
        if not ticket.is_scored:
            ticket.prompt_log_probs = []
        ticket.preemptions += 1
        self.waiting.appendleft(ticket)

    def _release_row_(self, ticket: Ticket) -> None:
        row = ticket.running.row
        self.running.remove(ticket)
        self.pool.release_(row)
        self._free_rows.append(row)
        ticket.row = None
