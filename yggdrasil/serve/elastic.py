"""Elastic memory: under load the draft's memory becomes KV pages; after the load the draft comes back.

```
                    gamma = 0 and few free pages, for a while
 draft resident  ---------------- expand ---------------------->  memory lent
       ^                                                              |
       |  all weights copied                                          |  contract: empty queue, free pages
       +-----------------------  draft returning  <-------------------+
```

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from yggdrasil.kv import KVStorage
from yggdrasil.serve.draft_memory import DraftMemory, MemoryState
from yggdrasil.serve.migration import migrate_
from yggdrasil.serve.pages import PagePool
from yggdrasil.trace import Trace

__all__ = ["ElasticMemory", "scarce_below"]


def scarce_below(tau_low: float, num_pages: int) -> int:
    """tau_low in pages: free pages are scarce if there are fewer.

    It is at least one, or the draft would never leave, and fewer than all, or an idle pool could not
    contract.
    """
    return min(max(1, int(tau_low * num_pages)), num_pages - 1)


class ElasticMemory:
    """Lends the draft's memory to the page pool and takes it back.

    Args:
        pool: Its pages are the base range; pages in the draft's memory follow.
        target: Storage that covers the base range and the draft's memory.
        memory: The tail of that storage.
        low_pages: tau_low: fewer free pages than this are scarce.
        persist_steps: T_persist: steps of scarcity without speculation before the draft leaves.

    Attributes:
        trace: Milliseconds and number of "expand", "contract" and "dispatch reload".

    Source: Nightjar sections 5.1 to 5.4.
    """

    def __init__(
        self, pool: PagePool, target: KVStorage, memory: DraftMemory, *, low_pages: int, persist_steps: int
    ) -> None:
        self.pool = pool
        self.target = target
        self.memory = memory
        self.low_pages = low_pages
        self.persist_steps = persist_steps
        self.base_pages = pool.num_pages
        self.trace = Trace()
        self._scarce_steps = 0

    @property
    def draft_pages(self) -> int:
        """S_draft in pages."""
        return len(self.target.storage_PL2GSF) - self.base_pages

    @property
    def is_draft_in(self) -> bool:
        """Whether the draft is complete in memory; otherwise no row may draft."""
        return self.memory.state is MemoryState.RESIDENT

    def advance_(self, *, gamma: int, num_waiting: int) -> None:
        """Between two steps: expand, contract or continue the draft's return, depending on the load.

        Args:
            gamma: Speculative length of the last step that decoded.

        Source: Nightjar section 5.1.
        """
        if self.memory.state is MemoryState.RETURNING:
            self.memory.advance_()
        elif self.memory.state is MemoryState.LENT:
            if num_waiting == 0 and self.pool.num_free > self.draft_pages + self.low_pages:
                self.contract_()
        else:
            is_scarce = gamma == 0 and self.pool.num_free < self.low_pages
            self._scarce_steps = self._scarce_steps + 1 if is_scarce else 0
            if self._scarce_steps >= self.persist_steps:
                self.expand_()

    def expand_(self) -> None:
        """Give the draft's memory to the pool, which grows in place; nothing is copied.

        Source: Nightjar section 5.2.
        """
        with self.trace.stage("expand"):
            self.memory.leave_()
            self.pool.expand_(self.base_pages + self.draft_pages)
            self._scarce_steps = 0

    def contract_(self) -> None:
        """Shrink the pool to its base, move lent pages below it, and begin to copy the draft back.

        Raises:
            CapacityError: more pages in use than the base has; nothing has changed.

        Source: Nightjar sections 5.3 and 5.4.
        """
        with self.trace.stage("contract"):
            moves = self.pool.contract_(self.base_pages)
            # Sources lie in the draft's memory and targets below it, so there are no cycles, and the last
            # page is no target.
            migrate_(self.target.storage_PL2GSF, moves, spare=self.base_pages + self.draft_pages - 1)
        with self.trace.stage("dispatch reload"):
            self.memory.begin_return_()

    def settle_(self) -> None:
        """Finish the draft's return while no request runs or waits."""
        self.memory.finish_()
