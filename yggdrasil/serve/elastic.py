"""Elastic memory: under load the draft's room becomes KV pages, and when the load is gone the draft comes
back.

```
             gamma = 0 and few free pages, for a while                       queue empty, room to spare
 draft in  ---- expand ---->  room lent  ---- contract ---->  returning  ---- whole ---->  draft in
```

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = features of a head.
"""

from __future__ import annotations

from yggdrasil.kv import KVStorage
from yggdrasil.serve.draft_memory import DraftRoom, Tenant
from yggdrasil.serve.migration import migrate_
from yggdrasil.serve.pages import PagePool
from yggdrasil.trace import Trace

__all__ = ["ElasticMemory", "scarce_below"]


def scarce_below(tau_low: float, num_pages: int) -> int:
    """tau_low in pages: fewer free ones are scarce. At least one, or the draft would never leave; fewer
    than all, or an idle pool could not contract.
    """
    return min(max(1, int(tau_low * num_pages)), num_pages - 1)


class ElasticMemory:
    """Lends the draft's room to the page pool, and takes it back.

    Args:
        pool: Its pages are the base range; the room's follow.
        target: Storage of base and room.
        room: The tail of that storage.
        low_pages: tau_low: fewer free pages than that are scarce.
        persist_steps: T_persist: this many steps of scarcity without speculation before the draft leaves.

    Attributes:
        trace: Milliseconds of "expand", "contract" and "dispatch reload", and how often.

    Source: Nightjar sections 5.1 to 5.4.
    """

    def __init__(
        self, pool: PagePool, target: KVStorage, room: DraftRoom, *, low_pages: int, persist_steps: int
    ) -> None:
        self.pool = pool
        self.target = target
        self.room = room
        self.low_pages = low_pages
        self.persist_steps = persist_steps
        self.base_pages = pool.num_pages
        self.trace = Trace()
        self._scarce_steps = 0

    @property
    def room_pages(self) -> int:
        """S_draft in pages."""
        return len(self.target.storage_PL2GSF) - self.base_pages

    @property
    def is_draft_in(self) -> bool:
        """Whether the draft is whole: nothing may draft before."""
        return self.room.tenant is Tenant.DRAFT

    def advance_(self, *, gamma: int, num_waiting: int) -> None:
        """Between two steps: expand, contract or continue the draft's return, depending on the load.

        Args:
            gamma: Speculative length of the last step that decoded.

        Source: Nightjar section 5.1.
        """
        if self.room.tenant is Tenant.RETURNING:
            self.room.advance_()
        elif self.room.tenant is Tenant.PAGES:
            if num_waiting == 0 and self.pool.num_free > self.room_pages + self.low_pages:
                self.contract_()
        else:
            is_scarce = gamma == 0 and self.pool.num_free < self.low_pages
            self._scarce_steps = self._scarce_steps + 1 if is_scarce else 0
            if self._scarce_steps >= self.persist_steps:
                self.expand_()

    def expand_(self) -> None:
        """The draft leaves, the pool grows in place by its room; nothing is copied. Source: Nightjar
        section 5.2.
        """
        with self.trace.stage("expand"):
            self.room.leave_()
            self.pool.expand_(self.base_pages + self.room_pages)
            self._scarce_steps = 0

    def contract_(self) -> None:
        """The pool shrinks to its base, pages in the room move below it, and the draft begins to come back.

        Raises:
            CapacityError: more pages in use than the base has; nothing has changed.

        Source: Nightjar sections 5.3 and 5.4.
        """
        with self.trace.stage("contract"):
            moves = self.pool.contract_(self.base_pages)
            # Sources lie in the room and targets below it, so no cycle arises; the room's last page is no
            # target.
            migrate_(self.target.storage_PL2GSF, moves, spare=self.base_pages + self.room_pages - 1)
        with self.trace.stage("dispatch reload"):
            self.room.begin_return_()

    def settle_(self) -> None:
        """Nothing runs and nothing waits: a draft on its way back may as well arrive."""
        self.room.finish_()
