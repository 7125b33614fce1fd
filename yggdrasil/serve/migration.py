"""The order in which pages move, so that none is overwritten before it is read.

Shapes: P = pages, X = the other dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from yggdrasil.kernels.migrate import move_pages_

__all__ = ["migrate_", "waves"]


def waves(moves: Mapping[int, int], spare: int) -> Iterator[dict[int, int]]:
    """Groups of moves to run in order; no group both reads and writes a page, so each can be one kernel.

    Args:
        moves: Old page id to new one, any injective mapping.
        spare: A page outside of the mapping that is used to break cycles.

    Source: Nightjar section 5.3, step 4: topological order, cyclic swaps isolated.
    """
    pending = dict(moves)
    while pending:
        ready = {old: new for old, new in pending.items() if new not in pending}
        if not ready:  # only cycles are left: move one page to the spare, and its target can be written
            old = next(iter(pending))
            ready = {old: spare}
            pending[spare] = pending[old]
        for old in ready:
            del pending[old]
        yield ready


def migrate_(storage_PX: Tensor, moves: Mapping[int, int], spare: int) -> None:
    """Move the data of pages; arguments are those of `waves`. Cost: one kernel per wave, no sync."""
    for wave in waves(moves, spare):
        move_pages_(storage_PX, list(wave), list(wave.values()))
