"""Count compilations, and forbid them in the decode loop."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager

__all__ = ["compilations", "count_compilation", "no_compilation"]

_count = 0


class _Block:
    """A block that several threads can be in. The first that finds Dynamo loaded sets its rule, the last to
    leave lifts it.
    """

    def __init__(self) -> None:
        self.num_inside = 0
        self._lock = threading.Lock()
        self._dynamo: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._dynamo is None and "torch._dynamo" in sys.modules:
                import torch

                self._dynamo = torch.compiler.set_stance("fail_on_recompile")
                self._dynamo.__enter__()
            self.num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.num_inside -= 1
            if self.num_inside == 0 and self._dynamo is not None:
                self._dynamo.__exit__(None, None, None)
                self._dynamo = None


_block = _Block()


def count_compilation() -> None:
    """Count one built graph or library; raises RuntimeError inside `no_compilation`."""
    global _count
    if _block.num_inside:
        raise RuntimeError(
            "compilation inside the decode loop: every shape must come from the compiled menu"
        )
    _count += 1


def compilations() -> int:
    """Graphs and libraries built for this process, with those that Dynamo compiled by itself."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _count + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def no_compilation() -> AbstractContextManager[None]:
    """A block in which building a graph raises, and so does a recompilation by Dynamo, if it is loaded."""
    return _block
