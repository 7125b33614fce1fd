"""In which order pages move, so that none is overwritten before it was read.

Shapes: P = pages, X = elements of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from yggdrasil.kernels.migrate import move_pages_

__all__ = ["migrate_", "waves"]


def waves(moves: Mapping[int, int], spare: int) -> Iterator[dict[int, int]]:
    """Groups of moves, one after another; within a group no page is both read and written, so that it can
    run as one kernel.

    Args:
        moves: Old page id to new one, any injective mapping.
        spare: A page outside of it, through which a cycle is broken.

    Source: Nightjar section 5.3, step 4: topological order, cyclic swaps isolated.
    """
    pending = dict(moves)
    while pending:
        ready = {old: new for old, new in pending.items() if new not in pending}
        if not ready:  # nothing but cycles: park one page, and what waits for it can go
            old = next(iter(pending))
            ready = {old: spare}
            pending[spare] = pending[old]
        for old in ready:
            del pending[old]
        yield ready


def migrate_(storage_PX: Tensor, moves: Mapping[int, int], spare: int) -> None:
    """Move the data of a mapping of pages; arguments as in `waves`. Cost: a kernel a wave, no sync."""
    for wave in waves(moves, spare):
        move_pages_(storage_PX, list(wave), list(wave.values()))
